"""Brier's score of class probabilities (Brier, 1950)."""

from __future__ import annotations

from torch import Tensor

from lightning_bnn.metrics.mean_score import MeanScore
from lightning_bnn.predictive import ClassPredictive

__all__ = ["BrierScore"]


class BrierScore(MeanScore[ClassPredictive]):
    """Mean squared distance from the stated probabilities to what came; 0 is best.

    For K classes it sums over the classes and lies in [0, 2]; for yes-or-no labels it is the
    squared error of the probability of a 1, in [0, 1].

    Example:
        >>> import torch
        >>> from lightning_bnn.metrics import BrierScore
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> metric = BrierScore()
        >>> metric.update(CategoricalPredictive(torch.zeros(1, 3, 2)), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.5000)
    """

    higher_is_better: bool | None = False

    def score(self, predictive: ClassPredictive, targets: Tensor) -> Tensor:
        """Brier's score of each target."""
        return predictive.brier(targets)
