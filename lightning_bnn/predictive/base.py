r"""What every predictive distribution has in common.

A predictive is the mixture :math:`p(y|x) = \frac{1}{S} \sum_s p(y|x, w_s)` over S equally
weighted draws :math:`w_s` of the posterior. Probabilities, densities and distribution functions
are averaged over the draws; the parameters of the components never are.

The outputs that a predictive keeps have axes (draws S, batch B, ...). Everything it returns has
the batch axis first.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_bnn.errors import ConfigurationError, DataError

__all__ = [
    "ClassPredictive",
    "OrderedPredictive",
    "Predictive",
    "at_least_float32",
    "full_precision",
    "mixture_log_prob",
    "reshape_targets",
    "sum_event",
]


def at_least_float32(values: Tensor) -> Tensor:
    """Give half-precision values (as autocast makes them) in float32; leave the others alone."""
    if values.dtype in (torch.float32, torch.float64):
        return values
    return values.to(torch.promote_types(values.dtype, torch.float32))


def full_precision(values: Tensor) -> Tensor:
    """Give values in float64 where the device has it, else in float32 (Apple's MPS)."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)


def sum_event(values: Tensor, batch_axes: int) -> Tensor:
    """Sum over every axis after the first ``batch_axes``."""
    kept = values.shape[:batch_axes]
    if all(size == 1 for size in values.shape[batch_axes:]):
        return values.reshape(kept)  # nothing to add up, and a view costs less
    return values.sum(tuple(range(batch_axes, values.ndim)))


def mixture_log_prob(component_log_prob: Tensor) -> Tensor:
    """Log density of the equally weighted mixture, from those of its components on axis 0."""
    if component_log_prob.shape[0] == 1:
        return component_log_prob[0]  # of one component: itself, to the last digit
    return component_log_prob.logsumexp(0) - math.log(component_log_prob.shape[0])


def reshape_targets(targets: Tensor, shape: Sequence[int], fix: str = "") -> Tensor:
    """Give targets the shape of what the network predicts, and never broadcast.

    Only axes of size 1 at the end may differ: ``(B,)`` and ``(B, 1)`` hold the same numbers.
    Subtracting one from the other would silently give ``(B, B)``.

    Args:
        targets: What the data loader gave.
        shape: The expected shape, batch axis first.
        fix: What to tell the user to do, where the general advice does not fit.

    Raises:
        DataError: The two shapes do not hold the same numbers in the same order.
    """

    def trimmed(sizes: Sequence[int]) -> tuple[int, ...]:
        kept = list(sizes)
        while len(kept) > 1 and kept[-1] == 1:
            kept.pop()
        return tuple(kept)

    if trimmed(targets.shape) != trimmed(shape):
        if targets.ndim == 0 or targets.shape[0] != shape[0]:
            fix = "The first axis is the batch, and must have the same size in both."
        elif not fix:
            fix = (
                f"The network gives {math.prod(shape[1:])} and the targets hold "
                f"{math.prod(targets.shape[1:])} numbers per example: change the network's last "
                "layer or the targets so that they agree."
            )
        raise DataError(
            f"expected targets of shape {tuple(shape)}, the shape of the network's predictions; "
            f"got {tuple(targets.shape)}. {fix}"
        )
    return targets.reshape(tuple(shape))


class Predictive(ABC):
    """A mixture over S draws, for a batch of B examples.

    Attributes:
        outputs: The network's outputs as they came, of shape ``(S, B, ...)``.
    """

    outputs: Tensor
    task: ClassVar[str]
    """``"classification"`` or ``"regression"``: what a report and its metrics can say of it."""

    def __init__(self, outputs: Tensor) -> None:
        if outputs.ndim < 2 or outputs.shape[0] == 0:
            raise DataError(
                "a predictive needs outputs with an axis of draws and an axis of examples, "
                f"(S, B, ...) with S >= 1; got shape {tuple(outputs.shape)}. "
                "For a single draw add the axis: outputs[None]."
            )
        self.outputs = outputs

    @property
    def draws(self) -> int:
        """The number of draws S in the mixture."""
        return self.outputs.shape[0]

    def __len__(self) -> int:
        return self.outputs.shape[1]

    def __repr__(self) -> str:
        shape = tuple(self.outputs.shape[2:])
        return f"{type(self).__name__}(draws={self.draws}, examples={len(self)}, outputs={shape})"

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """The mean of the mixture (for classes: their probabilities)."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """The variance of the mixture."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """The part of the uncertainty that more data would not remove."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """The part of the uncertainty that comes from not knowing the weights."""

    @property
    @abstractmethod
    def entropy(self) -> Tensor:
        """The entropy of the mixture, in nats."""

    @property
    @abstractmethod
    def mutual_information(self) -> Tensor:
        """What observing y would tell about the weights, in nats: H[mixture] - E[H[component]]."""

    @abstractmethod
    def log_prob(self, targets: Tensor) -> Tensor:
        """Log density of each example's targets, jointly over its outputs; shape ``(B,)``.

        The components are multiplied over the outputs of an example *before* they are mixed:
        within a draw the outputs are independent, in the mixture they are not.
        """

    def _tensors(self) -> dict[str, Tensor]:
        """The constructor's arguments, each with axes ``(S, B, ...)``."""
        return {"outputs": self.outputs}

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(**{name: function(tensor) for name, tensor in self._tensors().items()})

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Copy to a device, and to another precision if one is given."""
        return self._map(lambda tensor: tensor.to(device, dtype))

    def __getitem__(self, index: Any) -> Self:
        """The predictive of some of the examples, chosen by a slice, a mask or indices."""
        return self._map(lambda tensor: tensor[:, index])

    @classmethod
    def concatenate(cls, predictives: Sequence[Self]) -> Self:
        """Join predictives of several batches, such as ``trainer.predict`` returns, into one.

        Args:
            predictives: At least one; all of one kind and with the same number of draws.

        Raises:
            DataError: They cannot be joined.
        """
        return cls._join(predictives, axis=1)

    @classmethod
    def mix(cls, predictives: Sequence[Self]) -> Self:
        """The mixture of predictives of one batch: the draws of all of them together.

        Args:
            predictives: At least one; all of one kind and of the same examples.

        Raises:
            DataError: They cannot be mixed.
        """
        return cls._join(predictives, axis=0)

    @classmethod
    def _join(cls, predictives: Sequence[Self], axis: int) -> Self:
        if not predictives:
            raise DataError("expected at least one predictive to join, got an empty list.")
        first = predictives[0]
        for position, other in enumerate(predictives):
            same = other.draws == first.draws if axis == 1 else len(other) == len(first)
            if type(other) is not type(first) or not same:
                fix = (
                    "Only batches predicted by one posterior with the same draws= can be joined."
                    if axis == 1
                    else "Only predictives of the same examples can be mixed."
                )
                raise DataError(
                    f"predictive 0 is a {type(first).__name__} of {first.draws} draws and "
                    f"{len(first)} examples, predictive {position} a {type(other).__name__} of "
                    f"{other.draws} and {len(other)}. {fix}"
                )
        parts = [predictive._tensors() for predictive in predictives]
        return type(first)(
            **{name: torch.cat([part[name] for part in parts], axis) for name in parts[0]}
        )


class ClassPredictive(Predictive):
    """A mixture over classes: what the classification metrics need."""

    task = "classification"

    @property
    @abstractmethod
    def log_probabilities(self) -> Tensor:
        """Log probabilities of the mixture, (rows, K): example after example, label after label."""

    @property
    @abstractmethod
    def mode(self) -> Tensor:
        """The most probable class, in the shape of the targets."""

    @abstractmethod
    def hits(self, targets: Tensor) -> Tensor:
        """Whether the most probable class is the one that came, one per target."""

    @abstractmethod
    def brier(self, targets: Tensor) -> Tensor:
        """Brier's score: squared distance from the probabilities to what came, one per target."""

    @abstractmethod
    def reliability(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Stated probabilities, and whether what they were stated of came true."""

    @property
    def epistemic(self) -> Tensor:
        """The mutual information between the class and the weights: entropy - aleatoric."""
        return self.mutual_information

    @property
    def mutual_information(self) -> Tensor:
        """Entropy of the mixture minus the mean entropy of its components; at least 0."""
        return (self.entropy - self.aleatoric).clamp(min=0)

    def quantile(self, q: float) -> NoReturn:
        """Raise: classes have no order, so they have no quantiles."""
        raise ConfigurationError(
            f"{type(self).__name__} has no quantile({q}) and no interval: classes have no order. "
            "Use .mean for the class probabilities, or .entropy for the spread."
        )

    def interval(self, level: float = 0.9) -> NoReturn:
        """Raise: classes have no order, so they have no intervals."""
        self.quantile(level)


class OrderedPredictive(Predictive):
    """A mixture over numbers: it has a distribution function, quantiles and intervals.

    They are of each output by itself (the marginals), in the shape of ``mean``.
    """

    task = "regression"
    discrete: ClassVar[bool] = False
    """Whether targets are counts, whose distribution function has steps."""

    @property
    @abstractmethod
    def component_means(self) -> Tensor:
        """The mean of each draw, ``(S, B, ...)``."""

    @abstractmethod
    def crps(self, targets: Tensor) -> Tensor:
        """The continuous ranked probability score, for each output."""

    @abstractmethod
    def cdf(self, targets: Tensor) -> Tensor:
        """Probability of a value at or below the target, for each output."""

    @abstractmethod
    def quantile(self, q: float) -> Tensor:
        """The smallest value whose distribution function reaches q, for each output."""

    @abstractmethod
    def covers(self, targets: Tensor, level: float = 0.9) -> Tensor:
        """Whether each target lies in the central interval; cheaper than finding its ends."""

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval of the mixture that holds ``level`` of its probability."""
        lower, upper = self._tails(level)
        return self.quantile(lower), self.quantile(upper)

    @staticmethod
    def _tails(level: float) -> tuple[float, float]:
        OrderedPredictive._check_probability(level, "level")
        return (1 - level) / 2, (1 + level) / 2

    @staticmethod
    def _check_probability(value: float, name: str) -> None:
        if not 0 < value < 1:
            raise ConfigurationError(
                f"expected {name} strictly between 0 and 1, got {value}. For 90 percent pass 0.9."
            )
