r"""Counts: :math:`y_d \sim \mathrm{Poisson}(e^{f_d})`.

The predictive is a mixture of Poisson distributions with rates :math:`\lambda_s`. Its distribution
function is :math:`F(k) = \frac1S\sum_s Q(k + 1, \lambda_s)` with the regularised incomplete gamma
function Q.

The ranked probability score (Epstein, 1969) is :math:`\sum_k (F(k) - 1[k \ge y])^2 = E|X - y| -
\tfrac12 E|X - X'|` with X and X' two independent counts of the mixture. The first part has a closed
form. The second one sums the support of rates up to 250; for a pair of components with a larger
rate, the difference has mean :math:`\delta` and variance :math:`\sigma^2`, both known, and
:math:`E|X - X'|` is that of a Gaussian minus :math:`(1 + z^2)\varphi(z)/(4\sigma)` with
:math:`z = \delta/\sigma`: the next terms of Edgeworth's series, for whole numbers. What is left out
is below 1e-6 of the score and falls with :math:`\sigma^{-4}`, so that no rate is too large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from lightning_bnn.errors import DataError
from lightning_bnn.likelihoods.base import Likelihood, single_columns
from lightning_bnn.likelihoods.gaussian import BUDGET, expected_distance
from lightning_bnn.mixtures import (
    OrderedPredictive,
    along_draws,
    at_least_float32,
    full_precision,
    reshape_targets,
)

__all__ = ["Poisson", "PoissonPredictive"]

# The largest count that an entropy sums up to, so that a wild rate is an error and not a hang.
LONGEST_SUPPORT = 2**16
# The largest rate whose counts the ranked probability score sums one by one.
LARGEST_SUMMED = 250.0


def poisson_cdf(counts: Tensor, rates: Tensor) -> Tensor:
    """Probability of a count at or below ``counts`` under each rate."""
    shape = (counts.floor() + 1).clamp(min=1).expand_as(rates)
    return torch.where(counts < 0, 0.0, torch.special.gammaincc(shape, rates))


def support_length(largest: float) -> float:
    """A count that a Poisson of this rate exceeds with a chance below exp(-40)."""
    # Bernstein: the chance of exceeding the rate r by t is below exp(-t^2 / (2 (r + t / 3))).
    return largest + math.sqrt(80 * largest) + 27


def poisson_crps(values: Tensor, rates: Tensor, weights: Tensor | None = None) -> Tensor:
    """Ranked probability score of ``values`` of shape E under the mixture over axis 0 of rates.

    It is not finite where a rate is not; the other entries stay right. ``weights`` are relative
    ones, (S,), of the mean 1; None: all the same.
    """
    weights = along_draws(torch.ones(len(rates)) if weights is None else weights, rates)
    whole = values.floor()
    log_prob = torch.xlogy(whole, rates) - rates - torch.lgamma(whole + 1)
    up_to = poisson_cdf(whole, rates)
    to_value = 2 * (values - rates) * up_to + 2 * rates * log_prob.exp() - (values - rates)
    return (weights * to_value).mean(0) - _distance_between(rates, weights) / 2


def _distance_between(rates: Tensor, weights: Tensor) -> Tensor:
    """E|X - X'| of two independent counts of the mixture."""
    large = rates > LARGEST_SUMMED
    small = torch.where(large, 0.0, rates)
    number = torch.where(large, 0.0, weights).sum(0)
    longest = support_length(small.nan_to_num().max().item() if small.numel() else 0.0)
    support = torch.arange(math.ceil(longest) + 1, dtype=rates.dtype, device=rates.device)
    between, below = torch.zeros_like(rates[0]), torch.zeros_like(rates[0])
    log_small = small.clamp(min=torch.finfo(rates.dtype).tiny).log()  # 0 * log(0) would be NaN
    for counts in support.split(max(1, BUDGET // max(1, rates.numel()))):
        counts = counts.reshape(-1, *[1] * rates.ndim)
        log_prob = counts * log_small - small - torch.lgamma(counts + 1)
        cdf = below + torch.where(large, 0.0, weights * log_prob.exp()).sum(1).cumsum(0)
        # Twice the sum of F (1 - F) over the counts is E|X - X'|; here F sums over the components.
        between += 2 * (cdf * (number - cdf)).sum(0)
        below = cdf[-1]
    if large.any():
        between += _distance_with_large(rates, large, weights)
    return between / rates.shape[0] ** 2


def _distance_with_large(rates: Tensor, large: Tensor, weights: Tensor) -> Tensor:
    """Sum of E|X_s - X_t| over the pairs of which at least one rate is large."""
    total = torch.zeros_like(rates[0])
    step = max(1, BUDGET // max(1, rates.numel()))
    for some, some_large, some_weights in zip(
        rates.split(step), large.split(step), weights.split(step), strict=True
    ):
        difference, variance = some[:, None] - rates[None], some[:, None] + rates[None]
        square = difference.square() / variance
        correction = (1 + square) * (-square / 2).exp() / (variance * (32 * math.pi)).sqrt()
        distance = expected_distance(difference, variance) - correction
        distance = distance * some_weights[:, None] * weights
        total += torch.where(some_large[:, None] | large[None], distance, 0.0).sum((0, 1))
    return total


class PoissonPredictive(OrderedPredictive):
    """A mixture of Poisson distributions for each output.

    Args:
        outputs: Log rates of shape ``(S, B)`` or ``(S, B, D)``.

    Example:
        >>> import torch
        >>> from lightning_bnn.predictive import PoissonPredictive
        >>> predictive = PoissonPredictive(torch.tensor([[2.0], [4.0]]).log())  # two draws
        >>> predictive.mean, predictive.variance
        (tensor([3.]), tensor([4.]))
        >>> predictive.interval(0.9)
        (tensor([0.]), tensor([7.]))
    """

    discrete = True

    @cached_property
    def rates(self) -> Tensor:
        """Rates of the components, ``(S, B, ...)``."""
        return self.float_outputs.exp()

    @property
    def component_means(self) -> Tensor:
        """Rates of the components."""
        return self.rates

    @property
    def component_variances(self) -> Tensor:
        """Rates of the components, as a Poisson has them."""
        return self.rates

    def component_log_density(self, values: Tensor) -> Tensor:
        """Log probability of each count under each component."""
        log_rates = self.float_outputs
        return values * log_rates - self.rates - torch.lgamma(values + 1)

    def component_cdf(self, values: Tensor) -> Tensor:
        """Probability of a count at or below each value under each component."""
        wide = poisson_cdf(full_precision(values), full_precision(self.rates))
        return wide.to(self.rates.dtype)

    @cached_property
    def _entropies(self) -> tuple[Tensor, Tensor]:
        largest = self.rates.max().item() if self.rates.numel() else 0.0
        if not support_length(largest) <= LONGEST_SUPPORT:
            raise DataError(
                "the entropy of a Poisson mixture sums over the counts, which for the largest rate "
                f"{largest:.3g} are more than {LONGEST_SUPPORT}. Use .variance or .interval()."
            )
        return super()._entropies

    @torch.no_grad()
    def crps(self, targets: Tensor) -> Tensor:
        """Ranked probability score for each output, in counts; 0 is best (no gradient flows).

        It is the continuous one, whose integral is a sum for counts.
        """
        values = full_precision(self.align(targets))
        relative = None if self.weights is None else self.draws * self.weights
        return poisson_crps(values, full_precision(self.rates), relative).to(self.rates.dtype)


class Poisson(Likelihood):
    """Counts, from their log rates.

    Outputs are ``(B,)`` or ``(B, D)``; targets have the same shape and hold whole numbers from 0
    on, in any dtype. ``(B, 1)`` and ``(B,)`` go together. Metrics: rmse, nll, crps, coverage.

    Example:
        >>> import torch
        >>> from lightning_bnn.likelihoods import Poisson
        >>> Poisson().log_prob(torch.tensor([0.0, 2.0]), torch.tensor([0, 7]))
        tensor([-1.0000, -1.9142])
    """

    predictive_type = PoissonPredictive

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        """The roots of the rates, one output at a time."""
        return single_columns((0.5 * at_least_float32(outputs)).exp())

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check for whole numbers from 0 on in the shape of the outputs."""
        self.check_tensors(outputs, targets)
        reshape_targets(targets, outputs.shape)
        self.check_finite(targets)
        good = targets >= 0
        if targets.is_floating_point():
            good = good & (targets == targets.floor())
        self.check_values(
            good,
            targets,
            "counts, whole numbers from 0 on",
            "Undo any scaling of the targets, or use Gaussian() for real numbers.",
        )
