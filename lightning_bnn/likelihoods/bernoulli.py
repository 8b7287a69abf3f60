r"""Yes-or-no labels: :math:`p(y_l = 1 | f) = 1 / (1 + e^{-f_l})`, independent given f."""

from __future__ import annotations

from torch import Tensor
from torchmetrics import MetricCollection

from lightning_bnn.errors import DataError
from lightning_bnn.likelihoods.base import Likelihood, check_all, check_outputs
from lightning_bnn.metrics import classification_metrics
from lightning_bnn.predictive import BernoulliPredictive
from lightning_bnn.predictive.base import reshape_targets, sum_event
from lightning_bnn.predictive.bernoulli import bernoulli_log_prob

__all__ = ["Bernoulli"]


class Bernoulli(Likelihood):
    """Yes or no, once or for L labels, from one logit each.

    Outputs are ``(B,)`` or ``(B, L)``; targets have the same shape and hold 0 and 1 in any
    dtype. ``(B, 1)`` and ``(B,)`` go together. Metrics, over all labels: accuracy, brier, ece;
    and nll, jointly per example.

    Example:
        >>> import torch
        >>> from lightning_bnn.likelihoods import Bernoulli
        >>> Bernoulli().log_prob(torch.zeros(2, 3), torch.tensor([[0, 1, 1], [0, 0, 0]]))
        tensor([-2.0794, -2.0794])
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log probability of the labels, summed over the labels of an example; ``(B,)``."""
        return sum_event(bernoulli_log_prob(outputs, reshape_targets(targets, outputs.shape)), 1)

    def predictive(self, outputs: Tensor) -> BernoulliPredictive:
        """Mixture over draws from ``(S, B)`` or ``(S, B, L)`` logits."""
        return BernoulliPredictive(outputs)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check for zeros and ones in the shape of the outputs."""
        check_outputs("Bernoulli", outputs, targets)
        reshape_targets(targets, outputs.shape)
        if targets.is_complex():
            raise DataError(
                f"Bernoulli expected real targets, got {targets.dtype}. Pass zeros and ones."
            )
        check_all(
            "Bernoulli",
            (targets == 0) | (targets == 1),
            targets,
            "targets that are 0 or 1",
            "Round them if they are probabilities; for more than two classes use Categorical().",
        )

    def metrics(self) -> MetricCollection:
        """Accuracy, negative log likelihood, Brier's score, expected calibration error."""
        return classification_metrics()
