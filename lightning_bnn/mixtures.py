r"""Mixtures over posterior draws: the base classes of every predictive.

A predictive is the mixture :math:`p(y|x) = \frac{1}{S} \sum_s p(y|x, w_s)` over S draws
:math:`w_s` of the posterior, which weigh the same unless ``weights`` says otherwise (an average
over models). Probabilities, densities and distribution functions are averaged over the draws; the
parameters of the components never are.

The outputs that a predictive keeps have axes (draws S, batch B, ...). Everything it returns has
the batch axis first, except what is named ``component_...``, which has the draws before it. A new
kind describes its components and gets the rest: see :class:`ClassPredictive` and
:class:`OrderedPredictive`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from lightning_bnn.checks import check_device, check_probability, numbers_of
from lightning_bnn.errors import ConfigurationError, DataError

__all__ = [
    "ClassPredictive",
    "OrderedPredictive",
    "Predictive",
    "along_draws",
    "at_least_float32",
    "full_precision",
    "known_classes",
    "mixture_log_prob",
    "reshape_targets",
    "sum_event",
]

# Bisection halves a bracket until no float64 lies between its ends; 80 halvings always do.
BISECTIONS = 80
# What the generic integrals leave out at either end of a distribution, and their points.
TAIL = 1e-9
NODES = 128


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


def mixture_log_prob(component_log_prob: Tensor, weights: Tensor | None = None) -> Tensor:
    """Log density of a mixture, by default equally weighted, from its components' on axis 0."""
    if component_log_prob.shape[0] == 1:
        return component_log_prob[0]  # of one component: itself, to the last digit
    if weights is not None:
        return (component_log_prob + along_draws(weights.log(), component_log_prob)).logsumexp(0)
    return component_log_prob.logsumexp(0) - math.log(component_log_prob.shape[0])


def along_draws(weights: Tensor, values: Tensor) -> Tensor:
    """One number for each draw in a shape, dtype and place to go with values (S, ...)."""
    return weights.to(values).reshape(-1, *[1] * (values.ndim - 1))


def check_targets(targets: Any) -> None:
    """Raise a DataError unless targets are a tensor of real numbers."""
    if not isinstance(targets, Tensor) or targets.is_complex():
        kind = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise DataError(f"expected targets in a tensor of real numbers; got {kind}.")


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
    check_targets(targets)
    axes = max(targets.ndim, len(shape))
    padded = [(*sizes, *[1] * (axes - len(sizes))) for sizes in (targets.shape, shape)]
    if targets.ndim == 0 or padded[0] != padded[1]:
        if targets.ndim == 0 or targets.shape[0] != shape[0]:
            fix = "The first axis is the batch, and must have the same size in both."
        elif not fix:
            fix = (
                f"The network gives {math.prod(shape[1:])} and the targets hold "
                f"{math.prod(targets.shape[1:])} numbers per example."
            )
        raise DataError(
            f"expected targets of shape {tuple(shape)}, the shape of the network's predictions; "
            f"got {tuple(targets.shape)}. {fix}"
        )
    return targets.reshape(tuple(shape))


class Predictive(ABC):
    """A mixture over S draws, for a batch of B examples.

    Attributes:
        outputs: The network's outputs as they were given, of shape ``(S, B, ...)``.
        task: "classification" or "regression".
        weights: How much each draw weighs, ``(S,)``, which sum to 1; None: all the same.
    """

    task: ClassVar[str]
    outputs: Tensor
    weights: Tensor | None = None

    def __init__(self, outputs: Tensor) -> None:
        if outputs.ndim < 2 or outputs.shape[0] == 0:
            raise DataError(
                "a predictive needs outputs of shape (S, B, ...): draws S >= 1, then examples; got "
                f"{tuple(outputs.shape)}. For a single draw add the axis: outputs[None]."
            )
        self.outputs = outputs

    @property
    def float_outputs(self) -> Tensor:
        """The outputs in float32 at least: what components are made from."""
        return at_least_float32(self.outputs)

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
    def align(self, targets: Tensor) -> Tensor:
        """Targets in the shape of what is predicted for one draw.

        Raises:
            DataError: They do not fit.
        """

    @abstractmethod
    def component_log_prob(self, targets: Tensor) -> Tensor:
        """Log density of each example's targets under each draw; ``(S, B)``."""

    @abstractmethod
    def columns(self) -> dict[str, Tensor]:
        """What a table of predictions shows, under each name one number for each row."""

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log density of each example's targets, jointly over its outputs; shape ``(B,)``.

        The components are multiplied over the outputs of an example *before* they are mixed:
        within a draw the outputs are independent, in the mixture they are not.
        """
        return mixture_log_prob(self.component_log_prob(targets), self.weights)

    def average(self, values: Tensor) -> Tensor:
        """The mean over the draws, as they weigh, of values ``(S, ...)``."""
        if self.weights is None:
            return values.mean(0)
        return (along_draws(self.weights, values) * values).sum(0)

    def variance_over_draws(self, values: Tensor) -> Tensor:
        """The variance over the draws, divided by S, as a mixture has it."""
        if self.weights is None:
            return values.var(0, correction=0)
        return self.average((values - self.average(values)).square())

    def tensors(self) -> dict[str, Tensor]:
        """The constructor's arguments, each with axes ``(S, B, ...)``."""
        return {"outputs": self.outputs}

    def options(self) -> dict[str, Any]:
        """The constructor's other arguments, which every part of the predictive shares."""
        return {}

    def alike(self, predictives: Sequence[Predictive]) -> Sequence[Any]:
        """Predictives in one form, if a kind knows one, before they are joined."""
        return predictives

    def labelled(self, targets: Tensor) -> Tensor | None:
        """Which examples have a target at all, ``(B,)``; None where all have, as most often."""
        return None

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same kind of predictive with every tensor changed.

        Args:
            function: Takes and gives a tensor with axes ``(S, B, ...)``, such as
                ``lambda tensor: tensor[:, :10]`` for the first ten examples.
        """
        tensors = {name: function(tensor) for name, tensor in self.tensors().items()}
        made = type(self)(**tensors, **self.options())
        made.weights = self.weights
        return made

    def __getitem__(self, index: Any) -> Self:
        """The predictive of some of the examples, chosen by a slice, a mask or indices."""
        return self.map(lambda tensor: tensor[:, index])

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Self:
        """Copy to a device, and to another precision if one is given."""
        device = check_device(device)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigurationError(
                f"dtype= is a floating-point one, such as torch.float64; got {dtype!r:.80}."
            )
        return self.map(lambda tensor: tensor.to(device, dtype))

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
    def mix(cls, predictives: Sequence[Self], weights: Sequence[float] | None = None) -> Self:
        """The mixture of predictives of one batch: the draws of all of them together.

        Args:
            predictives: At least one; all of one kind and of the same examples.
            weights: How much each predictive weighs, which its draws share; they sum to 1. By
                default all draws weigh the same.

        Raises:
            DataError: They cannot be mixed.

        Example:
            >>> from lightning_bnn.likelihoods import Gaussian
            >>> parts = [Gaussian(1.0).predictive(torch.full((draws, 1), 4.0 * draws))
            ...          for draws in (1, 2)]
            >>> Predictive.mix(parts).mean, Predictive.mix(parts, weights=[0.75, 0.25]).mean
            (tensor([6.6667]), tensor([5.]))
        """
        made = cls._join(predictives, axis=0)
        sizes = [one.draws for one in predictives]
        equal = [size / made.draws for size in sizes]
        shares = equal if weights is None else numbers_of(weights)
        if len(shares) != len(sizes) or not all(0 <= one <= 1 for one in shares):
            raise DataError(
                f"expected {len(sizes)} weights from 0 to 1, one each; got {weights!r:.200}."
            )
        if not math.isclose(sum(shares), 1, rel_tol=1e-6):
            raise DataError(f"expected weights whose sum is 1; got {shares}.")
        own = [
            torch.full((one.draws,), 1 / one.draws, dtype=torch.float64)
            if one.weights is None
            else one.weights
            for one in predictives
        ]
        each = torch.cat([share * one for share, one in zip(shares, own, strict=True)])
        same = bool((each * len(each) - 1).abs().max() < 1e-12)
        made.weights = None if same else each / each.sum()
        return made

    @classmethod
    def _join(cls, predictives: Sequence[Self], axis: int) -> Self:
        several = isinstance(predictives, Sequence) and not isinstance(predictives, str | bytes)
        if not several or not all(isinstance(one, Predictive) for one in predictives):
            raise DataError(f"expected a list of predictives to join, got {predictives!r:.80}.")
        if not predictives:
            raise DataError("expected at least one predictive to join, got an empty list.")
        predictives = predictives[0].alike(predictives)
        first = predictives[0]
        for other in predictives:
            same = other.draws == first.draws if axis == 1 else len(other) == len(first)
            if type(other) is not type(first) or not same:
                what = "the same number of draws" if axis == 1 else "the same examples"
                raise DataError(
                    f"only predictives of one kind and of {what} can be joined; got "
                    f"{first} and {other}."
                )
        if axis == 1 and any(_weights_of(one) != _weights_of(first) for one in predictives):
            raise DataError("only predictives whose draws weigh the same can be joined.")
        tensors = [predictive.tensors() for predictive in predictives]
        joined = {}
        # what one of them has been given and another not, both have as attributes
        for name in dict.fromkeys(name for each in tensors for name in each):
            parts = [
                each[name] if name in each else getattr(one, name)
                for one, each in zip(predictives, tensors, strict=True)
            ]
            if len({part.shape[2:] for part in parts}) > 1:
                raise DataError(
                    "only predictives of the same classes, or the same outputs, can be joined; got "
                    f"{', '.join(map(repr, predictives))}."
                )
            joined[name] = torch.cat(parts, axis)
        made = type(first)(**joined, **first.options())
        made.weights = first.weights if axis == 1 else None
        return made


def _weights_of(predictive: Predictive) -> list[float] | None:
    return None if predictive.weights is None else predictive.weights.tolist()


class ClassPredictive(Predictive):
    r"""A mixture over K classes: what the classification metrics need.

    A new kind gives ``component_log_probabilities``, made from ``float_outputs``. With :math:`p_s`
    the probabilities of draw s and :math:`\bar p = \frac1S \sum_s p_s`:

    * entropy: :math:`H[\bar p]`, the total uncertainty;
    * aleatoric: :math:`\frac1S \sum_s H[p_s]`;
    * epistemic, the mutual information: :math:`H[\bar p] - \frac1S \sum_s H[p_s] \ge 0`.

    See Depeweg et al. (2018), "Decomposition of uncertainty in Bayesian deep learning", and Brier
    (1950) for the score :math:`\sum_k (\bar p_k - 1[y = k])^2`, which lies in [0, 2].

    Attributes:
        binary: Whether the targets are yes-or-no labels.
        ignore_index: The target of what has no label; no score counts it. None where all have one.
    """

    task = "classification"
    binary: ClassVar[bool] = False
    ignore_index: int | None = None

    @property
    @abstractmethod
    def component_log_probabilities(self) -> Tensor:
        """Logarithms of each draw's class probabilities, ``(S, B, K, *positions)``."""

    @cached_property
    def _log_mean(self) -> Tensor:
        """Logarithms of the mixture's class probabilities, ``(B, K, *positions)``."""
        # In log space: with S = 1 these are the component's own to the last bit.
        return mixture_log_prob(self.component_log_probabilities, self.weights)

    @property
    def log_probabilities(self) -> Tensor:
        """Logarithms of the mixture's class probabilities, ``(rows, K)``.

        The rows are example after example, and in each position after position.
        """
        return self._log_mean.movedim(1, -1).reshape(-1, self._log_mean.shape[1])

    @cached_property
    def mean(self) -> Tensor:
        """Class probabilities ``(B, K, *positions)``; they sum to 1 over axis 1."""
        return self._log_mean.exp()

    @cached_property
    def variance(self) -> Tensor:
        """Variance p (1 - p) of each class's indicator, in the shape of ``mean``."""
        return self.mean * (1 - self.mean)

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy of the mean probabilities, ``(B, *positions)``, in nats."""
        return torch.special.entr(self._log_mean.exp()).sum(1)

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean over the draws of each one's entropy, ``(B, *positions)``, in nats."""
        return self.average(torch.special.entr(self.component_log_probabilities.exp()).sum(2))

    @property
    def epistemic(self) -> Tensor:
        """The mutual information between the class and the weights: entropy - aleatoric."""
        return self.mutual_information

    @property
    def mutual_information(self) -> Tensor:
        """Entropy of the mixture minus the mean entropy of its components; at least 0."""
        return (self.entropy - self.aleatoric).clamp(min=0)

    @cached_property
    def mode(self) -> Tensor:
        """The most probable class, ``(B, *positions)``."""
        return self._log_mean.argmax(1)

    def align(self, targets: Tensor) -> Tensor:
        """Class indices ``(B, *positions)``."""
        check_class_shapes(self.component_log_probabilities.shape[1:], targets)
        return targets

    def component_log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of the classes under each draw, summed over positions; ``(S, B)``."""
        # gather rather than cross_entropy: the latter skips the index -100 without a word.
        targets = self.align(targets)
        index = known_classes(targets, self.ignore_index)[None, :, None]
        index = index.expand(self.draws, *index.shape[1:])
        log_prob = self.component_log_probabilities.gather(2, index).squeeze(2)
        if self.ignore_index is not None:
            log_prob = log_prob.masked_fill(targets.long() == self.ignore_index, 0.0)
        return sum_event(log_prob, 2)

    def labelled(self, targets: Tensor) -> Tensor | None:
        """Which examples have a label, or one position with a label."""
        if self.ignore_index is None:
            return None
        return (self.align(targets).long() != self.ignore_index).reshape(len(targets), -1).any(1)

    def _of_labels(self, values: Tensor, targets: Tensor) -> Tensor:
        """The values of what has a label, ``(B, *positions)`` where all have."""
        return values if self.ignore_index is None else values[targets.long() != self.ignore_index]

    def hits(self, targets: Tensor) -> Tensor:
        """Whether the most probable class is the observed one, one per label."""
        return self._of_labels(self.mode == self.align(targets), targets)

    def brier(self, targets: Tensor) -> Tensor:
        """Brier's score: squared distance from probabilities to what was observed, per label."""
        observed = known_classes(self.align(targets), self.ignore_index).unsqueeze(1)
        one_hot = torch.zeros_like(self.mean).scatter_(1, observed, 1.0)
        return self._of_labels((self.mean - one_hot).square().sum(1), targets)

    def reliability(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Stated probabilities, and whether what they were stated of was observed."""
        return self._of_labels(self.mean.amax(1), targets), self.hits(targets)

    def columns(self) -> dict[str, Tensor]:
        """Class, its probability and the uncertainties; a row per example, or per position."""
        columns = {"class": self.mode, "probability": self.mean.amax(1), **self.uncertainties()}
        if self.mode.ndim > 1:
            positions = torch.arange(math.prod(self.mode.shape[1:])).repeat(len(self))
            columns = {"position": positions, **columns}
        return {name: column.reshape(-1) for name, column in columns.items()}

    def uncertainties(self) -> dict[str, Tensor]:
        """Entropy and its two parts, by name."""
        names = ("entropy", "aleatoric", "mutual_information")
        return {name: getattr(self, name) for name in names}


def known_classes(targets: Tensor, ignore_index: int | None) -> Tensor:
    """Class indices to look up, with class 0 in the place of what has no label."""
    if ignore_index is None:
        return targets.long()
    classes = targets.long()  # in which a negative index cannot be taken for one of 8 bits
    return classes.masked_fill(classes == ignore_index, 0)


def check_class_shapes(shape: Sequence[int], targets: Tensor) -> None:
    """Raise a DataError unless logits ``(B, K, *positions)`` fit targets ``(B, *positions)``."""
    check_targets(targets)
    if len(shape) < 2:
        raise DataError(
            "expected logits of shape (B, K) or (B, K, *positions) with one logit per class on "
            f"axis 1; got {tuple(shape)}. For one logit per example use Bernoulli()."
        )
    expected = (shape[0], *shape[2:])
    if tuple(targets.shape) != expected:
        fix = (
            "If they are one-hot, pass targets.argmax(1); if they have an axis too many, "
            "targets.squeeze(1)."
        )
        if len(shape) > 2 and tuple(targets.shape) == tuple(shape[:-1]):
            fix = (
                "The logits seem to have their classes on the last axis, as models of tokens "
                "have; pass output=lambda logits: logits.movedim(-1, 1) to the strategy."
            )
        raise DataError(
            f"expected class indices of shape {expected} for logits of shape {tuple(shape)}; got "
            f"targets of shape {tuple(targets.shape)}. {fix}"
        )


class OrderedPredictive(Predictive):
    r"""A mixture over real numbers or counts: a regression.

    A new kind gives ``component_means``, ``component_variances``, ``component_log_density`` and
    ``component_cdf``, each ``(S, B, ...)`` and made from ``float_outputs``. By the law of total
    variance

    .. math:: \mathrm{Var}[y] = \underbrace{\tfrac1S \sum_s \sigma_s^2}_{\text{aleatoric}}
              + \underbrace{\mathrm{Var}_s[\mu_s]}_{\text{epistemic}}.

    Everything but ``log_prob`` is of each output by itself (the marginals), in the shape of
    ``mean``. Quantiles are roots of the mixture's distribution function, found by bisection.
    Entropy and CRPS are integrals over it, by Gauss and Legendre's rule (sums, for counts). These
    are right to about 1e-6 where the components have similar widths; a kind with closed forms
    overrides them.

    Attributes:
        discrete: Whether the targets are whole numbers.
    """

    task = "regression"
    discrete: ClassVar[bool] = False

    @property
    @abstractmethod
    def component_means(self) -> Tensor:
        """Mean of each draw's distribution."""

    @property
    @abstractmethod
    def component_variances(self) -> Tensor:
        """Variance of each draw's distribution."""

    @abstractmethod
    def component_log_density(self, values: Tensor) -> Tensor:
        """Log density (for counts: log probability) of each value under each draw."""

    @abstractmethod
    def component_cdf(self, values: Tensor) -> Tensor:
        """Probability of a value at or below each of ``values`` under each draw."""

    @cached_property
    def mean(self) -> Tensor:
        """Mean of the mixture, in the shape of a draw's means."""
        return self.average(self.component_means)

    @cached_property
    def variance(self) -> Tensor:
        """Variance of the mixture: aleatoric + epistemic."""
        return self.aleatoric + self.epistemic

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean over the draws of their variance."""
        return self.average(self.component_variances)

    @cached_property
    def epistemic(self) -> Tensor:
        """Variance of the means over the draws (divided by S, as a mixture has it)."""
        return self.variance_over_draws(self.component_means)

    @property
    def entropy(self) -> Tensor:
        """Entropy of the mixture for each output, in nats (no gradient flows through it)."""
        return self._entropies[0]

    @cached_property
    def mutual_information(self) -> Tensor:
        """Entropy of the mixture minus the components' mean entropy, for each output; >= 0."""
        total, within = self._entropies
        return (total - within).clamp(min=0)

    @cached_property
    @torch.no_grad()
    def _entropies(self) -> tuple[Tensor, Tensor]:
        """Entropy of the mixture, and mean entropy of its components."""
        wide = self._wide

        def integrand(values: Tensor) -> Tensor:
            densities = wide.component_log_density(values).exp()
            entropies = wide.average(torch.special.entr(densities))
            return torch.stack([torch.special.entr(wide.average(densities)), entropies])

        total, within = self._integrate(integrand, wide.quantile(TAIL), wide.quantile(1 - TAIL))
        return total.to(self.mean.dtype), within.to(self.mean.dtype)

    def align(self, targets: Tensor) -> Tensor:
        """Targets in the shape and dtype of ``mean``; ``(B,)`` and ``(B, 1)`` go together."""
        means = self.component_means
        return reshape_targets(targets, means.shape[1:]).to(means.dtype)

    def component_log_prob(self, targets: Tensor) -> Tensor:
        """Log density of the targets under each draw, summed over the outputs; ``(S, B)``."""
        return sum_event(self.component_log_density(self.align(targets)), 2)

    def cdf(self, targets: Tensor) -> Tensor:
        """Probability of a value at or below the target, for each output."""
        return self.average(self.component_cdf(self.align(targets)))

    @torch.no_grad()
    def quantile(self, q: float) -> Tensor:
        """The smallest value whose distribution function reaches q, for each output."""
        check_probability("q", q)
        wide = self._wide
        lower, upper = wide._bracket(q)
        for _ in range(BISECTIONS):
            middle = lower + (upper - lower) / 2
            if self.discrete:
                middle = middle.floor()
            if not ((lower < middle) & (middle < upper)).any():
                break
            reached = wide.cdf(middle) >= q
            upper, lower = torch.where(reached, middle, upper), torch.where(reached, lower, middle)
        return upper.to(self.mean.dtype)

    def _bracket(self, q: float) -> tuple[Tensor, Tensor]:
        """A value below the q-quantile and one at or above it, by Cantelli's inequality."""
        spread = self.variance.sqrt()
        lower = self.mean - spread * math.sqrt((1 - q) / q)
        upper = self.mean + spread * math.sqrt(q / (1 - q))
        return (lower.floor() - 1, upper.ceil()) if self.discrete else (lower, upper)

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval of the mixture that holds ``level`` of its probability."""
        check_probability("level", level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def covers(self, targets: Tensor, level: float = 0.9) -> Tensor:
        """Whether each target lies in the central interval; cheaper than finding its ends."""
        check_probability("level", level)
        lower, upper = (1 - level) / 2, (1 + level) / 2
        wide = self._wide
        values = wide.align(targets)
        reached = wide.cdf(values)
        if self.discrete:  # the interval's ends are counts, and belong to it
            return (reached >= lower) & (wide.cdf(values - 1) < upper)
        return (reached >= lower) & (reached <= upper)

    @torch.no_grad()
    def crps(self, targets: Tensor) -> Tensor:
        r"""Continuous ranked probability score of each output; 0 is best (no gradient flows).

        It is :math:`\int (F(z) - 1[z \ge y])^2 dz`, in the unit of the targets.
        """
        wide = self._wide
        values = wide.align(targets)
        lower = torch.minimum(wide.quantile(TAIL), values)
        upper = torch.maximum(wide.quantile(1 - TAIL), values)
        below = self._integrate(lambda points: wide.cdf(points).square(), lower, values)
        above = self._integrate(lambda points: (1 - wide.cdf(points)).square(), values, upper)
        return (below + above).to(self.mean.dtype)

    def _integrate(
        self, function: Callable[[Tensor], Tensor], lower: Tensor, upper: Tensor
    ) -> Tensor:
        """Integral from lower to upper; for counts the sum from lower to upper - 1."""
        if self.discrete:
            length = int((upper - lower).max().item()) if lower.numel() else 0
            points = (lower + step for step in range(length))
            return sum(
                (torch.where(point < upper, function(point), 0.0) for point in points),
                torch.zeros_like(function(lower)),
            )
        places, weights = np.polynomial.legendre.leggauss(NODES)
        half = (upper - lower) / 2
        terms = (w * function(lower + half * (1 + x)) for x, w in zip(places, weights, strict=True))
        return half * sum(terms, torch.zeros_like(function(lower)))

    def columns(self) -> dict[str, Tensor]:
        """Mean, spread and the central 90% interval; numbered where there are several outputs."""
        lower, upper = self.interval(0.9)
        return numbered_columns(
            {
                "mean": self.mean,
                "standard_deviation": self.variance.sqrt(),
                "aleatoric": self.aleatoric,
                "epistemic": self.epistemic,
                "lower_90": lower,
                "upper_90": upper,
            }
        )

    @property
    def _wide(self) -> Self:
        """The same predictive in full precision; not kept, as it takes twice the memory."""
        return self.map(full_precision)


def numbered_columns(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split columns of several outputs into one for each, numbered if there is more than one."""
    flat = {name: column.reshape(len(column), -1) for name, column in columns.items()}
    size = next(iter(flat.values())).shape[1]
    if size == 1:
        return {name: column[:, 0] for name, column in flat.items()}
    return {f"{name}_{i}": column[:, i] for i in range(size) for name, column in flat.items()}
