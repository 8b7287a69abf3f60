r"""The predictive of counts: a mixture of Poisson distributions.

The network gives log rates :math:`\log\lambda_s`. Mean :math:`E[\lambda]`, variance
:math:`E[\lambda] + \mathrm{Var}[\lambda]` (aleatoric + epistemic). The distribution function is
:math:`F(k) = \frac1S\sum_s Q(k + 1, \lambda_s)` with the regularised incomplete gamma function Q;
quantiles are the smallest counts that reach q, found by bisection below the bound that Cantelli's
inequality gives, :math:`m + \sqrt{v\,q/(1-q)}` with m and v the mixture's mean and variance.
Entropies sum the support until the rest holds less than :math:`e^{-40}`.

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
from functools import cached_property

import torch
from torch import Tensor

from lightning_bnn.errors import DataError
from lightning_bnn.predictive.base import (
    OrderedPredictive,
    at_least_float32,
    full_precision,
    mixture_log_prob,
    reshape_targets,
    sum_event,
)
from lightning_bnn.predictive.gaussian_mixture import expected_distance

__all__ = ["PoissonPredictive", "poisson_crps", "poisson_entropies", "poisson_log_prob"]

# The most numbers that a temporary tensor may hold: 32 MB in float64.
BUDGET = 2**22
# The largest count that an entropy sums up to, so that a wild rate is an error and not a hang.
LONGEST_SUPPORT = 2**16
# The largest rate whose counts the ranked probability score sums one by one.
LARGEST_SUMMED = 250.0


def poisson_log_prob(log_rates: Tensor, targets: Tensor) -> Tensor:
    """Log probability of each count under its log rate, elementwise."""
    log_rates = at_least_float32(log_rates)
    counts = targets.to(log_rates.dtype)
    return counts * log_rates - log_rates.exp() - torch.lgamma(counts + 1)


def poisson_cdf(counts: Tensor, rates: Tensor) -> Tensor:
    """Probability of a count at or below ``counts`` under each rate."""
    shape = (counts.floor() + 1).clamp(min=1).expand_as(rates)
    return torch.where(counts < 0, 0.0, torch.special.gammaincc(shape, rates))


def poisson_mixture_cdf(counts: Tensor, rates: Tensor) -> Tensor:
    """Probability of a count at or below ``counts``; the draws are on axis 0 of the rates."""
    return poisson_cdf(counts, rates).mean(0)


def support_length(largest: float) -> float:
    """A count that a Poisson of this rate exceeds with a chance below exp(-40)."""
    # Bernstein: the chance of exceeding the rate r by t is below exp(-t^2 / (2 (r + t / 3))).
    return largest + math.sqrt(80 * largest) + 27


def poisson_crps(values: Tensor, rates: Tensor) -> Tensor:
    """Ranked probability score of ``values`` of shape E under the mixture over axis 0 of rates.

    It is not finite where a rate is not; the other entries stay right.
    """
    whole = values.floor()
    log_prob = torch.xlogy(whole, rates) - rates - torch.lgamma(whole + 1)
    up_to = poisson_cdf(whole, rates)
    to_value = 2 * (values - rates) * up_to + 2 * rates * log_prob.exp() - (values - rates)
    return to_value.mean(0) - _distance_between(rates) / 2


def _distance_between(rates: Tensor) -> Tensor:
    """E|X - X'| of two independent counts of the mixture."""
    large = rates > LARGEST_SUMMED
    small = torch.where(large, 0.0, rates)
    number = (~large).sum(0)
    longest = support_length(small.nan_to_num().max().item() if small.numel() else 0.0)
    support = torch.arange(math.ceil(longest) + 1, dtype=rates.dtype, device=rates.device)
    between, below = torch.zeros_like(rates[0]), torch.zeros_like(rates[0])
    log_small = small.clamp(min=torch.finfo(rates.dtype).tiny).log()  # 0 * log(0) would be NaN
    for counts in support.split(max(1, BUDGET // max(1, rates.numel()))):
        counts = counts.reshape(-1, *[1] * rates.ndim)
        log_prob = counts * log_small - small - torch.lgamma(counts + 1)
        cdf = below + torch.where(large, 0.0, log_prob.exp()).sum(1).cumsum(0)
        # Twice the sum of F (1 - F) over the counts is E|X - X'|; here F sums over the components.
        between += 2 * (cdf * (number - cdf)).sum(0)
        below = cdf[-1]
    if large.any():
        between += _distance_with_large(rates, large)
    return between / rates.shape[0] ** 2


def _distance_with_large(rates: Tensor, large: Tensor) -> Tensor:
    """Sum of E|X_s - X_t| over the pairs of which at least one rate is large."""
    total = torch.zeros_like(rates[0])
    step = max(1, BUDGET // max(1, rates.numel()))
    for some, some_large in zip(rates.split(step), large.split(step), strict=True):
        difference, variance = some[:, None] - rates[None], some[:, None] + rates[None]
        square = difference.square() / variance
        correction = (1 + square) * (-square / 2).exp() / (variance * (32 * math.pi)).sqrt()
        distance = expected_distance(difference, variance) - correction
        total += torch.where(some_large[:, None] | large[None], distance, 0.0).sum((0, 1))
    return total


def poisson_entropies(log_rates: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy of the mixture over axis 0, and mean entropy of its components, in nats.

    Raises:
        DataError: A rate is so large (or not finite) that the support is too long to sum.
    """
    wide = full_precision(log_rates)
    largest = wide.max().exp().item() if wide.numel() else 0.0
    longest = support_length(largest)
    if not longest <= LONGEST_SUPPORT:
        raise DataError(
            f"the entropy of a Poisson mixture sums over the counts, which for the largest rate "
            f"{largest:.3g} go up to {longest:.3g}; the limit is {LONGEST_SUPPORT}. Use .variance "
            "or .interval() for such rates, or predict the counts in a larger unit."
        )
    total, within = torch.zeros_like(wide[0]), torch.zeros_like(wide[0])
    step = max(1, BUDGET // max(1, wide.numel()))
    support = torch.arange(math.ceil(longest) + 1, dtype=wide.dtype, device=wide.device)
    for counts in support.split(step):
        counts = counts.reshape(-1, *[1] * wide.ndim)
        log_prob = counts * wide - wide.exp() - torch.lgamma(counts + 1)
        within -= (log_prob.exp() * log_prob).sum(0).mean(0)
        total += torch.special.entr(log_prob.exp().mean(1)).sum(0)
    return total.to(log_rates.dtype), within.to(log_rates.dtype)


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

    @property
    def component_means(self) -> Tensor:
        """The rates of the draws."""
        return self.rates

    @cached_property
    def rates(self) -> Tensor:
        """Rates of the components, ``(S, B, ...)``."""
        return at_least_float32(self.outputs).exp()

    @cached_property
    def mean(self) -> Tensor:
        """Mean count."""
        return self.rates.mean(0)

    @cached_property
    def variance(self) -> Tensor:
        """Variance of the count: aleatoric + epistemic."""
        return self.aleatoric + self.epistemic

    @property
    def aleatoric(self) -> Tensor:
        """Mean over the draws of the Poisson variance, which is the rate."""
        return self.mean

    @cached_property
    def epistemic(self) -> Tensor:
        """Variance of the rate over the draws."""
        return self.rates.var(0, correction=0)

    @cached_property
    def _entropies(self) -> tuple[Tensor, Tensor]:
        return poisson_entropies(at_least_float32(self.outputs))

    @property
    def entropy(self) -> Tensor:
        """Entropy of the mixture for each output, in nats."""
        return self._entropies[0]

    @cached_property
    def mutual_information(self) -> Tensor:
        """Entropy of the mixture minus the components' mean entropy, for each output; >= 0."""
        total, within = self._entropies
        return (total - within).clamp(min=0)

    def _targets(self, targets: Tensor) -> Tensor:
        return reshape_targets(targets, self.outputs.shape[1:]).to(self.rates.dtype)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log probability of the counts, jointly over the outputs of an example; ``(B,)``."""
        log_prob = poisson_log_prob(self.outputs, self._targets(targets))
        return mixture_log_prob(sum_event(log_prob, 2))

    def cdf(self, targets: Tensor) -> Tensor:
        """Probability of a count at or below the target, for each output."""
        counts = full_precision(self._targets(targets))
        return poisson_mixture_cdf(counts, full_precision(self.rates)).to(self.rates.dtype)

    @torch.no_grad()
    def quantile(self, q: float) -> Tensor:
        """Smallest count whose distribution function reaches q, for each output."""
        self._check_probability(q, "q")
        rates = full_precision(self.rates)
        mean, variance = rates.mean(0), rates.mean(0) + rates.var(0, correction=0)
        lower = torch.full_like(mean, -1)
        upper = (mean + (variance * q / (1 - q)).sqrt()).ceil()
        # Counts above 2^53 are not told apart in float64, so more halvings change nothing.
        widest = min(2.0**53, (upper - lower).max().item()) if upper.numel() else 1.0
        for _ in range(math.ceil(math.log2(widest)) + 1):
            middle = ((lower + upper) / 2).floor()
            reached = poisson_mixture_cdf(middle, rates) >= q
            upper = torch.where(reached, middle, upper)
            lower = torch.where(reached, lower, middle)
        return upper.to(self.rates.dtype)

    def covers(self, targets: Tensor, level: float = 0.9) -> Tensor:
        """Whether each target lies in the central interval, its ends included."""
        lower, upper = self._tails(level)
        counts = full_precision(self._targets(targets))
        rates = full_precision(self.rates)
        reaches = poisson_mixture_cdf(counts, rates) >= lower
        return reaches & (poisson_mixture_cdf(counts - 1, rates) < upper)

    @torch.no_grad()
    def crps(self, targets: Tensor) -> Tensor:
        """Ranked probability score for each output, in counts; 0 is best (no gradient flows).

        It is the continuous one, whose integral is a sum for counts.
        """
        values = full_precision(self._targets(targets))
        return poisson_crps(values, full_precision(self.rates)).to(self.rates.dtype)
