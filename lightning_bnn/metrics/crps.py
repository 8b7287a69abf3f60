"""The continuous ranked probability score (Matheson and Winkler, 1976)."""

from __future__ import annotations

from torch import Tensor

from lightning_bnn.metrics.mean_score import MeanScore
from lightning_bnn.predictive import GaussianPredictive, PoissonPredictive

__all__ = ["ContinuousRankedProbabilityScore"]


class ContinuousRankedProbabilityScore(MeanScore[GaussianPredictive | PoissonPredictive]):
    r"""Mean of :math:`\int (F(z) - 1[z \ge y])^2 dz` over all outputs.

    It is in the unit of the targets, 0 is best, and for a point prediction it is the absolute
    error. For counts F is a step function, and the integral the sum of the ranked probability
    score.

    Example:
        >>> import torch
        >>> from lightning_bnn.metrics import ContinuousRankedProbabilityScore
        >>> from lightning_bnn.predictive import GaussianPredictive
        >>> metric = ContinuousRankedProbabilityScore()
        >>> predictive = GaussianPredictive(torch.zeros(1, 1), torch.ones(()))
        >>> metric.update(predictive, torch.zeros(1))
        >>> metric.compute()  # (sqrt(2) - 1) / sqrt(pi)
        tensor(0.2337)
    """

    higher_is_better: bool | None = False

    def score(self, predictive: GaussianPredictive | PoissonPredictive, targets: Tensor) -> Tensor:
        """CRPS of each output."""
        return predictive.crps(targets)
