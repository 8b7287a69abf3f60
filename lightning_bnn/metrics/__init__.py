"""Metrics of predictive mixtures, updated as ``metric.update(predictive, targets)``.

Each is an ordinary ``torchmetrics.Metric``: it adds up over batches, synchronises over processes
and resets. The values come from methods of the predictive, which know the shape of their targets.
"""

from lightning_bnn.metrics.accuracy import Accuracy
from lightning_bnn.metrics.brier import BrierScore
from lightning_bnn.metrics.calibration import ExpectedCalibrationError
from lightning_bnn.metrics.collections import (
    classification_metrics,
    count_metrics,
    regression_metrics,
)
from lightning_bnn.metrics.coverage import IntervalCoverage
from lightning_bnn.metrics.crps import ContinuousRankedProbabilityScore
from lightning_bnn.metrics.mean_score import MeanScore
from lightning_bnn.metrics.nll import NegativeLogLikelihood
from lightning_bnn.metrics.rmse import RootMeanSquaredError

__all__ = [
    "Accuracy",
    "BrierScore",
    "ContinuousRankedProbabilityScore",
    "ExpectedCalibrationError",
    "IntervalCoverage",
    "MeanScore",
    "NegativeLogLikelihood",
    "RootMeanSquaredError",
    "classification_metrics",
    "count_metrics",
    "regression_metrics",
]
