"""Callbacks that work with any strategy."""

from lightning_bnn.callbacks.calibration_report import CalibrationReport
from lightning_bnn.callbacks.chain_monitor import ChainMonitor
from lightning_bnn.callbacks.prediction_writer import PredictionWriter
from lightning_bnn.callbacks.sample_collector import SampleCollector
from lightning_bnn.callbacks.snr_pruning import SNRPruning
from lightning_bnn.callbacks.swag_moments import SWAGMoments

__all__ = [
    "CalibrationReport",
    "ChainMonitor",
    "PredictionWriter",
    "SNRPruning",
    "SWAGMoments",
    "SampleCollector",
]
