r"""Classes: :math:`p(y = k | f) = \mathrm{softmax}(f)_k`."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from lightning_bnn.errors import DataError
from lightning_bnn.likelihoods.base import Likelihood
from lightning_bnn.mixtures import ClassPredictive, at_least_float32, check_class_shapes, sum_event

__all__ = ["Categorical", "CategoricalPredictive"]


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

    @cached_property
    def component_log_probabilities(self) -> Tensor:
        """Logarithms of each draw's softmax, ``(S, B, K, *positions)``."""
        return self.float_outputs.log_softmax(2)


class Categorical(Likelihood):
    """One of K classes, from K logits.

    Outputs are ``(B, K)``, or ``(B, K, *positions)`` with the class axis second, as in torch's
    cross entropy; targets are class indices ``(B, *positions)`` of an integer dtype. Metrics:
    accuracy, nll, brier, ece.

    Example:
        >>> import torch
        >>> from lightning_bnn.likelihoods import Categorical
        >>> likelihood = Categorical()
        >>> outputs, targets = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0])
        >>> likelihood.log_prob(outputs, targets)
        tensor([-0.2395])
        >>> likelihood.check(outputs, torch.tensor([3]))
        Traceback (most recent call last):
        lightning_bnn.errors.DataError: Categorical expected classes from 0 to 2, ...
    """

    predictive_type = CategoricalPredictive

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log probability of the classes, summed over positions; ``(B,)``."""
        # As the predictive has it, without the axis of draws: every training step passes here.
        check_class_shapes(outputs.shape, targets)
        log_probabilities = at_least_float32(outputs).log_softmax(1)
        return sum_event(log_probabilities.gather(1, targets.long().unsqueeze(1)).squeeze(1), 1)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check for integer class indices between 0 and K - 1 in the right shape."""
        self.check_tensors(outputs, targets)
        check_class_shapes(outputs.shape, targets)
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise DataError(
                f"Categorical expected class indices of an integer dtype, got {targets.dtype}. "
                "Convert them with targets.long()."
            )
        classes = outputs.shape[1]
        if classes < 2:
            raise DataError(
                f"Categorical expected at least 2 logits per example, got {classes}. Give the "
                "network one output per class, or use Bernoulli() for yes or no."
            )
        # in every training step: one operation, and the rest only to say what is wrong
        if targets.numel() == 0 or all(0 <= int(end) < classes for end in targets.aminmax()):
            return
        self.check_values(
            (targets >= 0) & (targets < classes),
            targets,
            f"classes from 0 to {classes - 1}, as the network gives {classes} logits",
            "Number the classes from 0, or give the network's last layer more outputs.",
        )
