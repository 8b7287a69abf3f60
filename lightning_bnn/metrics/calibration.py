"""The expected calibration error: stated probabilities against how often they come true."""

from __future__ import annotations

from torch import Tensor
from torchmetrics.classification import BinaryCalibrationError

from lightning_bnn.predictive import ClassPredictive

__all__ = ["ExpectedCalibrationError"]


class ExpectedCalibrationError(BinaryCalibrationError):
    """Mean distance between stated probability and frequency over equally wide bins.

    For classes the statement is "the most probable class will come", with its probability; for
    labels "a 1 will come". Either way it is about a yes-or-no event, so that torchmetrics' binary
    error serves both and the number of classes need not be known. Guo et al. (2017).

    Args:
        bins: The number of bins of [0, 1].

    Example:
        >>> import torch
        >>> from lightning_bnn.metrics import ExpectedCalibrationError
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> metric = ExpectedCalibrationError()
        >>> logits = torch.tensor([0.8, 0.2]).log().expand(1, 5, 2)  # 80% sure, 5 times
        >>> metric.update(CategoricalPredictive(logits), torch.tensor([0, 0, 0, 1, 1]))
        >>> metric.compute()  # right 3 times in 5
        tensor(0.2000)
    """

    def __init__(self, bins: int = 15) -> None:
        super().__init__(n_bins=bins, norm="l1")
        # The inputs are made here; checking their values would stop the device at each batch.
        self.validate_args = False

    def update(self, predictive: ClassPredictive, targets: Tensor) -> None:  # type: ignore[override]
        """Add the statements of a batch, and whether they came true."""
        probabilities, outcomes = predictive.reliability(targets)
        # Rounding can give 1 + 1e-7, which torchmetrics would take for a sign of logits.
        super().update(probabilities.clamp(0, 1).flatten(), outcomes.long().flatten())
