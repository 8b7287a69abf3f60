"""The metrics of each task, as collections ready to update and log."""

from __future__ import annotations

from torchmetrics import MetricCollection

from lightning_bnn.metrics.calibration import ExpectedCalibrationError
from lightning_bnn.metrics.scores import (
    Accuracy,
    BrierScore,
    ContinuousRankedProbabilityScore,
    IntervalCoverage,
    NegativeLogLikelihood,
    RootMeanSquaredError,
)

__all__ = ["classification_metrics", "regression_metrics"]

# compute_groups=False: torchmetrics would otherwise merge metrics whose states are equal after
# the first batch (a perfect one has nll = brier = 0) and report one for the other ever after.


def classification_metrics() -> MetricCollection:
    """Accuracy, nll, brier and ece.

    Example:
        >>> from lightning_bnn.metrics import classification_metrics
        >>> sorted(classification_metrics())
        ['accuracy', 'brier', 'ece', 'nll']
    """
    return MetricCollection(
        {
            "accuracy": Accuracy(),
            "nll": NegativeLogLikelihood(),
            "brier": BrierScore(),
            "ece": ExpectedCalibrationError(),
        },
        compute_groups=False,
    )


def regression_metrics() -> MetricCollection:
    """Rmse, nll, crps and the coverage of the central 90% interval, for numbers and counts.

    Example:
        >>> from lightning_bnn.metrics import regression_metrics
        >>> sorted(regression_metrics())
        ['coverage', 'crps', 'nll', 'rmse']
    """
    return MetricCollection(
        {
            "rmse": RootMeanSquaredError(),
            "nll": NegativeLogLikelihood(),
            "crps": ContinuousRankedProbabilityScore(),
            "coverage": IntervalCoverage(0.9),
        },
        compute_groups=False,
    )
