"""The expected calibration error: stated probabilities against how often they are true."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.classification import BinaryCalibrationError
from torchmetrics.utilities import dim_zero_cat

from lightning_bnn.calibration.bins import Array, bin_sums, width_edges
from lightning_bnn.calibration.error import expected_calibration_error
from lightning_bnn.checks import check_whole
from lightning_bnn.mixtures import ClassPredictive

__all__ = ["ExpectedCalibrationError"]


class ExpectedCalibrationError(BinaryCalibrationError):
    """Mean distance between stated probability and frequency over equally wide bins.

    For classes the statement is "the most probable class is the true one", with its probability;
    for labels "it is a 1". Either way it is about a yes-or-no event, so that torchmetrics' binary
    error serves both and the number of classes need not be known. Guo et al. (2017).

    The bins are those of the calibration reports: [a, b) with the last one closed, where
    torchmetrics gives a stated 1.0 a bin of its own. What rounding leaves below an edge counts as
    on it, so that 0.7 is in the bin from 0.7 in float32 too. For classes a report gives the same
    number, up to a millionth where the predictions are float32, which it takes to six digits. For
    labels it does not: a report looks at the most probable value, at "it is a 0, with 0.8"
    where this metric has "it is a 1, with 0.2"; the report's classwise error is the one that
    has both.

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
        super().__init__(n_bins=check_whole("bins", bins, 1), norm="l1")
        # The inputs are made here; checking their values would stop the device at each batch.
        self.validate_args = False

    def update(self, predictive: ClassPredictive, targets: Tensor) -> None:  # type: ignore[override]
        """Add the statements of a batch, and whether they were true."""
        probabilities, outcomes = predictive.reliability(targets)
        # Rounding can give 1 + 1e-7, which torchmetrics would take for a sign of logits.
        super().update(probabilities.clamp(0, 1).flatten(), outcomes.long().flatten())

    def compute(self) -> Tensor:
        """Give the error over all statements so far; NaN if one of them is."""
        stated, observed = dim_zero_cat(self.confidences), dim_zero_cat(self.accuracies)
        if stated.isnan().any():
            return stated.new_tensor(float("nan"))
        sums = bin_sums(_array(stated), _array(observed), width_edges(self.n_bins))
        return stated.new_tensor(expected_calibration_error(sums))


def _array(column: Tensor) -> Array:
    return column.detach().cpu().to(torch.float64).numpy()
