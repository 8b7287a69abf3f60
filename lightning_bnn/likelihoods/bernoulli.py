r"""Yes-or-no labels: :math:`p(y_l = 1 | f) = 1 / (1 + e^{-f_l})`, independent given f."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_bnn.likelihoods.base import Likelihood, single_columns
from lightning_bnn.mixtures import (
    ClassPredictive,
    at_least_float32,
    numbered_columns,
    reshape_targets,
    sum_event,
)

__all__ = ["Bernoulli", "BernoulliPredictive"]


class BernoulliPredictive(ClassPredictive):
    r"""A mixture over yes-or-no labels.

    The labels of an example are independent within a draw. Mean, entropy, aleatoric and epistemic
    parts are given for each label by itself; Brier's score is :math:`(\bar p - y)^2`, in [0, 1].

    Args:
        outputs: Logits of shape ``(S, B)`` or ``(S, B, L)``.

    Example:
        >>> import torch
        >>> from lightning_bnn.predictive import BernoulliPredictive
        >>> predictive = BernoulliPredictive(torch.tensor([[0.0, 2.0], [0.0, -2.0]]))
        >>> predictive.mean
        tensor([0.5000, 0.5000])
        >>> predictive.epistemic  # the draws agree on the first label only
        tensor([0.0000, 0.3278])
    """

    binary = True

    @cached_property
    def component_log_probabilities(self) -> Tensor:
        """Logarithms of each draw's probabilities of a 0 and of a 1, ``(S, B, 2, ...)``."""
        logits = self.float_outputs
        return torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], 2)

    @cached_property
    def mean(self) -> Tensor:
        """Probability of a 1, in the shape of the network's outputs."""
        return self._log_mean[:, 1].exp()

    @cached_property
    def variance(self) -> Tensor:
        """Variance p (1 - p) of each label."""
        return self._log_mean.sum(1).exp()

    def align(self, targets: Tensor) -> Tensor:
        """Labels in the shape of the outputs; ``(B,)`` and ``(B, 1)`` go together."""
        return reshape_targets(targets, self.outputs.shape[1:])

    def component_log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of the labels under each draw, summed over them; ``(S, B)``."""
        # Not from component_log_probabilities: a training step needs one of the two only.
        logits = self.float_outputs
        labels = self.align(targets).to(logits.dtype).expand_as(logits)
        loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        return sum_event(-loss, 2)

    def brier(self, targets: Tensor) -> Tensor:
        """Squared error of the probability of a 1, for each label."""
        return (self.mean - self.align(targets).to(self.mean.dtype)).square()

    def reliability(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of a 1, and whether it was observed."""
        return self.mean, self.align(targets) == 1

    def columns(self) -> dict[str, Tensor]:
        """Label, probability of a 1 and the uncertainties; numbered where there are several."""
        return numbered_columns(
            {"label": self.mode, "probability": self.mean, **self.uncertainties()}
        )


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

    predictive_type = BernoulliPredictive

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        """The roots of p (1 - p), one output at a time."""
        logits = at_least_float32(outputs)
        return single_columns((0.5 * (F.logsigmoid(logits) + F.logsigmoid(-logits))).exp())

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check for zeros and ones in the shape of the outputs."""
        self.check_tensors(outputs, targets)
        reshape_targets(targets, outputs.shape)
        self.check_values(
            (targets == 0) | (targets == 1),
            targets,
            "targets that are 0 or 1",
            "Round them if they are probabilities; for more than two classes use Categorical().",
        )
