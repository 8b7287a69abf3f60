"""Metrics of predictive mixtures, updated as ``metric.update(predictive, targets)``.

Each is an ordinary ``torchmetrics.Metric``: it adds up over batches, synchronises over processes
and resets. The values come from methods of the predictive, which know the shape of their targets.
"""

from lightning_bnn.metrics.calibration import ExpectedCalibrationError
from lightning_bnn.metrics.monte_carlo import MonteCarloStandardError
from lightning_bnn.metrics.scores import (
    Accuracy,
    BrierScore,
    ContinuousRankedProbabilityScore,
    IntervalCoverage,
    MeanScore,
    NegativeLogLikelihood,
    RootMeanSquaredError,
    classification_metrics,
    regression_metrics,
)

__all__ = [
    "Accuracy",
    "BrierScore",
    "ContinuousRankedProbabilityScore",
    "ExpectedCalibrationError",
    "IntervalCoverage",
    "MeanScore",
    "MonteCarloStandardError",
    "NegativeLogLikelihood",
    "RootMeanSquaredError",
    "classification_metrics",
    "regression_metrics",
]
