"""Benchmarks: each module is a program, run with ``python -m benchmarks.<name>``."""
