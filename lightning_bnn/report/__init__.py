"""Figures of what a posterior predicts."""
