r"""The predictive of yes-or-no labels: a mixture of products of Bernoulli distributions.

The labels of an example are independent within a draw, with :math:`p_s = \sigma(f_s)`. Mean,
entropy, aleatoric and epistemic parts are given for each label by itself, as for classes
(:mod:`lightning_bnn.predictive.categorical`); Brier's score is :math:`(\bar p - y)^2`, in [0, 1].
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_bnn.predictive.base import (
    ClassPredictive,
    at_least_float32,
    mixture_log_prob,
    reshape_targets,
    sum_event,
)

__all__ = ["BernoulliPredictive", "bernoulli_log_prob"]


def bernoulli_log_prob(logits: Tensor, targets: Tensor) -> Tensor:
    """Log probability of each 0/1 target under its logit, elementwise and stable."""
    logits = at_least_float32(logits)
    return -F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="none")


def binary_entropy(log_yes: Tensor, log_no: Tensor) -> Tensor:
    """Entropy of a yes-or-no event from the logarithms of its two probabilities."""
    return torch.special.entr(log_yes.exp()) + torch.special.entr(log_no.exp())


class BernoulliPredictive(ClassPredictive):
    """A mixture over yes-or-no labels.

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

    @cached_property
    def _component_log_yes(self) -> Tensor:
        return F.logsigmoid(at_least_float32(self.outputs))

    @cached_property
    def _component_log_no(self) -> Tensor:
        return F.logsigmoid(-at_least_float32(self.outputs))

    @property
    def log_probabilities(self) -> Tensor:
        """Log probabilities of no and of yes, (rows, 2)."""
        parts = (self._component_log_no, self._component_log_yes)
        return torch.stack([mixture_log_prob(part) for part in parts], -1).reshape(-1, 2)

    @cached_property
    def mean(self) -> Tensor:
        """Probability of a 1, in the shape of the network's outputs."""
        return mixture_log_prob(self._component_log_yes).exp()

    @cached_property
    def variance(self) -> Tensor:
        """Variance p (1 - p) of each label."""
        return self.mean * mixture_log_prob(self._component_log_no).exp()

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of each label under the mixture, in nats."""
        return binary_entropy(
            mixture_log_prob(self._component_log_yes), mixture_log_prob(self._component_log_no)
        )

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean over the draws of each label's entropy, in nats."""
        return binary_entropy(self._component_log_yes, self._component_log_no).mean(0)

    @cached_property
    def mode(self) -> Tensor:
        """1 where a 1 is more probable than a 0, else 0."""
        return (self.mean > 0.5).long()

    def _targets(self, targets: Tensor) -> Tensor:
        return reshape_targets(targets, self.outputs.shape[1:]).to(self.mean.dtype)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of the labels, jointly over the labels of an example; ``(B,)``."""
        labels = self._targets(targets).expand_as(self.outputs)
        return mixture_log_prob(sum_event(bernoulli_log_prob(self.outputs, labels), 2))

    def hits(self, targets: Tensor) -> Tensor:
        """Whether the more probable value came, for each label."""
        return self.mode == self._targets(targets)

    def brier(self, targets: Tensor) -> Tensor:
        """Squared error of the probability of a 1, for each label."""
        return (self.mean - self._targets(targets)).square()

    def reliability(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of a 1, and whether it came."""
        return self.mean, self._targets(targets) == 1
