r"""Classes: :math:`p(y = k | f) = \mathrm{softmax}(f)_k`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.checks import check_number, is_whole
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods.base import Likelihood
from lightning_bnn.mixtures import (
    ClassPredictive,
    at_least_float32,
    check_class_shapes,
    known_classes,
    sum_event,
)

__all__ = ["Categorical", "CategoricalPredictive"]


class CategoricalPredictive(ClassPredictive):
    """A mixture of softmax distributions over K classes.

    Args:
        outputs: Logits of shape ``(S, B, K)`` or ``(S, B, K, *positions)``.
        ignore_index: The target of what has no label, if some have none.

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

    def __init__(self, outputs: Tensor, ignore_index: int | None = None) -> None:
        super().__init__(outputs)
        self.ignore_index = ignore_index

    def options(self) -> dict[str, Any]:
        """The target of what has no label."""
        return {} if self.ignore_index is None else {"ignore_index": self.ignore_index}

    @cached_property
    def component_log_probabilities(self) -> Tensor:
        """Logarithms of each draw's softmax, ``(S, B, K, *positions)``."""
        return self.float_outputs.log_softmax(2)


class Categorical(Likelihood):
    """One of K classes, from K logits.

    Outputs are ``(B, K)``, or ``(B, K, *positions)`` with the class axis second, as in torch's
    cross entropy; targets are class indices ``(B, *positions)`` of an integer dtype. Metrics:
    accuracy, nll, brier, ece.

    Args:
        ignore_index: The target of examples or positions without a label, such as -100: they add
            nothing to the likelihood, and no metric counts them. N counts examples as before,
            with a label or without. By default every target must be a class.
        class_weights: How often an observation of each class counts, K numbers; 1 each by
            default. The likelihood becomes :math:`p(y|f)^{w_y}`, so that the posterior is that
            of data in which the class was seen :math:`w_y` times as often; weights with a mean
            of 1 over the data keep its width. Predictions are for data of that other make-up.
            Metrics count every example once.

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

    def __init__(
        self, ignore_index: int | None = None, class_weights: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        if ignore_index is not None and not is_whole(ignore_index):
            raise ConfigurationError(
                f"ignore_index= is a whole number, such as -100, or None; got {ignore_index!r}."
            )
        self.ignore_index = None if ignore_index is None else int(ignore_index)
        self.class_weights = None if class_weights is None else _class_weights(class_weights)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log probability of the classes, summed over positions; ``(B,)``."""
        # As the predictive has it, without the axis of draws: every training step passes here.
        check_class_shapes(outputs.shape, targets)
        log_probabilities = at_least_float32(outputs).log_softmax(1)
        index = known_classes(targets, self.ignore_index)
        log_prob = log_probabilities.gather(1, index.unsqueeze(1)).squeeze(1)
        if self.class_weights is not None:
            # Made anew each time: a buffer would be rounded in a network of half precision.
            log_prob = log_prob * log_prob.new_tensor(self.class_weights)[index]
        if self.ignore_index is not None:
            log_prob = log_prob.masked_fill(targets.long() == self.ignore_index, 0.0)
        return sum_event(log_prob, 1)

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        """For each class k of each position √p_k (e_k − p), times the root of the weight."""
        probabilities = at_least_float32(outputs.detach()).softmax(1)
        probabilities = probabilities.reshape(*outputs.shape[:2], -1)
        counts = torch.ones_like(targets, dtype=probabilities.dtype)
        index = known_classes(targets, self.ignore_index)
        if self.class_weights is not None:
            counts = counts.new_tensor(self.class_weights)[index]
        if self.ignore_index is not None:
            counts = counts.masked_fill(targets.long() == self.ignore_index, 0.0)
        scale = (probabilities * counts.reshape(len(outputs), 1, -1)).sqrt()
        for position in range(probabilities.shape[2]):
            for index_of_class in range(probabilities.shape[1]):
                column = torch.zeros_like(probabilities)
                column[:, :, position] = -probabilities[:, :, position]
                column[:, index_of_class, position] += 1
                yield (column * scale[:, index_of_class, None]).reshape(outputs.shape)

    def predictive(self, outputs: Tensor) -> CategoricalPredictive:
        """Mixture of softmax distributions from ``(S, B, K, *positions)`` logits."""
        if self.ignore_index is None:
            return self.predictive_type(outputs)
        return self.predictive_type(outputs, self.ignore_index)

    def config(self) -> dict[str, Any]:
        """What is ignored, and the weights of the classes, where they are set."""
        options = {"ignore_index": self.ignore_index, "class_weights": self.class_weights}
        return {name: value for name, value in options.items() if value is not None}

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
        if self.class_weights is not None and len(self.class_weights) != classes:
            raise DataError(
                f"Categorical has {len(self.class_weights)} class weights, and the network gives "
                f"{classes} logits. Pass one weight for each class."
            )
        # in every training step: one operation, and the rest only to say what is wrong
        known = known_classes(targets, self.ignore_index)
        if known.numel() == 0 or all(0 <= int(end) < classes for end in known.aminmax()):
            return
        self.check_values(
            (known >= 0) & (known < classes),
            targets,
            f"classes from 0 to {classes - 1}, as the network gives {classes} logits",
            "Number the classes from 0, or give the network's last layer more outputs; for targets "
            "that stand for no label pass Categorical(ignore_index=...).",
        )


def _class_weights(values: Any) -> list[float]:
    values = values.tolist() if hasattr(values, "tolist") else values  # a tensor, an array
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ConfigurationError(f"class_weights= is a list of numbers; got {values!r}.")
    weights = [check_number("class_weights", value, positive=False) for value in values]
    if not any(weights):
        raise ConfigurationError("class_weights= must have a weight above 0, or nothing counts.")
    return weights
