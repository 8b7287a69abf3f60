"""Callbacks that work with any strategy."""

from lightning_bnn.callbacks.chain_monitor import ChainMonitor
from lightning_bnn.callbacks.prediction_writer import PredictionWriter
from lightning_bnn.callbacks.sample_collector import SampleCollector

__all__ = ["ChainMonitor", "PredictionWriter", "SampleCollector"]
