"""Callbacks for the Lightning trainer."""

from lightning_bnn.callbacks.prediction_writer import PredictionWriter

__all__ = ["PredictionWriter"]
