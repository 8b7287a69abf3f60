r"""The predictive of a classification: a mixture of softmax distributions.

With :math:`p_s = \mathrm{softmax}(f_s)` for draw s and :math:`\bar p = \frac1S \sum_s p_s`:

* entropy: :math:`H[\bar p]`, the total uncertainty;
* aleatoric: :math:`\frac1S \sum_s H[p_s]`;
* epistemic, the mutual information: :math:`H[\bar p] - \frac1S \sum_s H[p_s] \ge 0`.

See Depeweg et al. (2018), "Decomposition of uncertainty in Bayesian deep learning", and Brier
(1950) for the score :math:`\sum_k (\bar p_k - 1[y = k])^2`, which lies in [0, 2].
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from lightning_bnn.errors import DataError
from lightning_bnn.predictive.base import (
    ClassPredictive,
    at_least_float32,
    mixture_log_prob,
    sum_event,
)

__all__ = ["CategoricalPredictive", "categorical_log_prob", "check_class_shapes"]


def check_class_shapes(outputs: Tensor, targets: Tensor) -> None:
    """Raise a DataError unless outputs ``(B, K, *positions)`` fit targets ``(B, *positions)``."""
    if outputs.ndim < 2:
        raise DataError(
            "expected logits of shape (B, K) or (B, K, *positions) with one logit per class on "
            f"axis 1; got {tuple(outputs.shape)}. For one logit per example use Bernoulli()."
        )
    expected = (outputs.shape[0], *outputs.shape[2:])
    if tuple(targets.shape) == expected:
        return
    if targets.shape == outputs.shape:
        fix = "If they are one-hot, pass targets.argmax(1)."
    elif targets.ndim == outputs.ndim and targets.shape[1] == 1:
        fix = "Pass targets.squeeze(1)."
    else:
        fix = "Give one class index per example (and position), with the class axis left out."
    raise DataError(
        f"expected class indices of shape {expected} for logits of shape {tuple(outputs.shape)}; "
        f"got targets of shape {tuple(targets.shape)}. {fix}"
    )


def categorical_log_prob(logits: Tensor, targets: Tensor) -> Tensor:
    """Log probability of ``(B, *positions)`` classes under ``(B, K, *positions)`` logits; (B,)."""
    # gather rather than cross_entropy: the latter skips the index -100 without a word.
    log_probabilities = at_least_float32(logits).log_softmax(1)
    return sum_event(log_probabilities.gather(1, targets.long().unsqueeze(1)).squeeze(1), 1)


class CategoricalPredictive(ClassPredictive):
    """A mixture of softmax distributions over K classes.

    Args:
        outputs: Logits of shape ``(S, B, K)`` or ``(S, B, K, *positions)``.

    Example:
        >>> import torch
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> logits = torch.tensor([[[4.0, 0.0]], [[0.0, 4.0]]])  # two draws that disagree
        >>> predictive = CategoricalPredictive(logits)
        >>> predictive.mean
        tensor([[0.5000, 0.5000]])
        >>> bool(predictive.epistemic > predictive.aleatoric)
        True
    """

    def __init__(self, outputs: Tensor) -> None:
        super().__init__(outputs)
        if outputs.ndim < 3:
            raise DataError(
                "a categorical predictive needs logits of shape (S, B, K, ...): draws, examples, "
                f"classes; got {tuple(outputs.shape)}."
            )

    @cached_property
    def _component_log_probabilities(self) -> Tensor:
        return at_least_float32(self.outputs).log_softmax(2)

    @property
    def log_probabilities(self) -> Tensor:
        """Log probabilities of the mixture, (rows, K), for each example and position."""
        log_mean = mixture_log_prob(self._component_log_probabilities)
        return log_mean.movedim(1, -1).reshape(-1, log_mean.shape[1])

    @cached_property
    def mean(self) -> Tensor:
        """Class probabilities ``(B, K, *positions)``; they sum to 1 over axis 1."""
        # In log space: with S = 1 this is the component's own softmax to the last bit.
        return mixture_log_prob(self._component_log_probabilities).exp()

    @cached_property
    def variance(self) -> Tensor:
        """Variance p (1 - p) of each class's indicator, in the shape of ``mean``."""
        return self.mean * (1 - self.mean)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the mean probabilities, ``(B, *positions)``, in nats."""
        return torch.special.entr(self.mean).sum(1)

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean over the draws of each one's entropy, ``(B, *positions)``, in nats."""
        return torch.special.entr(self._component_log_probabilities.exp()).sum(2).mean(0)

    @cached_property
    def mode(self) -> Tensor:
        """The most probable class, ``(B, *positions)``."""
        return self.mean.argmax(1)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of the classes, jointly over the positions of an example; ``(B,)``."""
        check_class_shapes(self.outputs[0], targets)
        index = targets.long()[None, :, None].expand(self.draws, -1, -1, *targets.shape[1:])
        chosen = self._component_log_probabilities.gather(2, index).squeeze(2)
        return mixture_log_prob(sum_event(chosen, 2))

    def hits(self, targets: Tensor) -> Tensor:
        """Whether the most probable class came, ``(B, *positions)``."""
        check_class_shapes(self.outputs[0], targets)
        return self.mode == targets

    def brier(self, targets: Tensor) -> Tensor:
        """Sum over classes of the squared error of the probabilities; ``(B, *positions)``."""
        check_class_shapes(self.outputs[0], targets)
        one_hot = torch.zeros_like(self.mean).scatter_(1, targets.long().unsqueeze(1), 1.0)
        return (self.mean - one_hot).square().sum(1)

    def reliability(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probability of the most probable class, and whether it was right."""
        return self.mean.amax(1), self.hits(targets)
