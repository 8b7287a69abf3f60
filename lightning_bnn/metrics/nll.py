"""The negative log likelihood of the mixture."""

from __future__ import annotations

from torch import Tensor

from lightning_bnn.metrics.mean_score import MeanScore
from lightning_bnn.predictive import Predictive

__all__ = ["NegativeLogLikelihood"]


class NegativeLogLikelihood(MeanScore[Predictive]):
    r"""Mean over examples of :math:`-\log \frac1S \sum_s p(y | x, w_s)`, in nats.

    The density is that of all outputs of an example together, and of the mixture: the mean of the
    draws' own losses would be larger.

    Example:
        >>> import torch
        >>> from lightning_bnn.metrics import NegativeLogLikelihood
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> metric = NegativeLogLikelihood()
        >>> metric.update(CategoricalPredictive(torch.zeros(3, 2, 2)), torch.tensor([0, 1]))
        >>> metric.compute()  # log 2
        tensor(0.6931)
    """

    higher_is_better: bool | None = False

    def score(self, predictive: Predictive, targets: Tensor) -> Tensor:
        """Negative log density of each example."""
        return -predictive.log_prob(targets)
