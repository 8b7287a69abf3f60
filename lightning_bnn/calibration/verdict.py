"""The verdict: is a predictor calibrated, and if not, is it too sure or not sure enough?

Each verdict is a set of tests whose false-alarm rates add up to :data:`FALSE_ALARM`, 1 %: a
predictor whose statements are all true is called calibrated in at least 99 of 100 data sets.

**Classes.** The score s = log p_y − Σ_k p_k log p_k is the derivative of the log-likelihood in
the inverse temperature, at 1. If p is true it has mean 0 and known moments, row by row. Its sum S
below 0 says that a higher temperature would be better: over-confident. (The mean NLL is the mean
entropy − S/n, so −S/n is the excess of the NLL over what the predictor expects of itself.) This
test of one direction has the power; half of the 1 % is spent on it. The other half goes to the
band of the reliability curve, which sees what no temperature mends.

The tail of S comes from a scaled Poisson count a (N − λ) with the variance and the third moment
of S. For many middling statements it is the normal tail; for sharp predictors, where S is the sum
of a few rare surprises, it stays right where the normal tail would cry out at the second one.

**Numbers.** z = Φ⁻¹(PIT) is standard normal if the predictive distribution is true. So Σ(z − z̄)²
is chi-square with n − 1 degrees of freedom (too large: over-confident), and independently z̄ √n
is standard normal (bias). The PIT histogram's band sees the rest. A third of the 1 % each.

All of it is for rows that are independent given the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scipy.special import chdtr, chdtrc, gammainc, gammaincc, ndtr

from lightning_bnn.calibration.bins import ReliabilityCurve
from lightning_bnn.errors import DataError

__all__ = [
    "CLASS_BAND_LEVEL",
    "FALSE_ALARM",
    "NUMBER_BAND_LEVEL",
    "Verdict",
    "class_verdict",
    "number_verdict",
]

FALSE_ALARM = 0.01
CLASS_BAND_LEVEL = 1 - FALSE_ALARM / 2
NUMBER_BAND_LEVEL = 1 - FALSE_ALARM / 3

# Below this mean score, in nats, a predictor is as good as its word, and rounding in float32
# (all classes equally probable: variance 0) must not decide.
_IMMATERIAL = 1e-6
# Above this λ the scaled Poisson tail is the normal one to all digits that matter.
_NORMAL = 1e8


@dataclass(frozen=True)
class Verdict:
    """What the tests say.

    Attributes:
        label: ``"calibrated"``, ``"over-confident"``, ``"under-confident"``, ``"miscalibrated"``
            (no common direction), ``"biased"`` (numbers only), or ``"unknown"`` without any row.
        z: The statistic in standard deviations. Classes: below 0 is over-confident. Numbers: of
            the dispersion, above 0 is over-confident, or of the bias if the label says so.
        p_value: Of that statistic, two-sided.
        outside: The bins outside of the band.
    """

    label: str
    z: float
    p_value: float
    outside: list[int] = field(default_factory=list)


def class_verdict(
    curve: ReliabilityCurve, score_sum: float, score_variance: float, score_third: float
) -> Verdict:
    """Judge the probabilities of classes.

    Args:
        curve: Of (largest probability, whether it came), with its band at
            :data:`CLASS_BAND_LEVEL`.
        score_sum: The sum over rows of s = log p_y − Σ_k p_k log p_k.
        score_variance: The sum of the variances of s if p is true: Σ_k p_k (log p_k + H)², with
            the entropy H of the row.
        score_third: The sum of the third moments of s if p is true: Σ_k p_k (log p_k + H)³.

    Returns:
        The direction of a significant score. Else that of the bins outside of the band if they
        agree, and ``"miscalibrated"`` if they do not.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.bins import bin_sums, reliability_curve, width_edges
        >>> p, came = np.full(200, 0.9), np.arange(200) < 140  # says 90 %, right in 70 %
        >>> curve = reliability_curve(bin_sums(p, came, width_edges(15)), level=CLASS_BAND_LEVEL)
        >>> logit = np.log(9)
        >>> moments = 200 * 0.09 * logit**2, 200 * 0.09 * (0.1 - 0.9) * logit**3
        >>> class_verdict(curve, ((came - p) * logit).sum(), *moments).label
        'over-confident'
    """
    count = int(curve.count.sum())
    if not count:
        return Verdict("unknown", math.nan, math.nan)
    outside = curve.outside
    z, p_value = _score_test(score_sum, score_variance, score_third, count)
    if p_value < FALSE_ALARM - (1 - CLASS_BAND_LEVEL):
        return Verdict("over-confident" if z < 0 else "under-confident", z, p_value, outside)
    if not outside:
        return Verdict("calibrated", z, p_value)
    above = [bool(curve.came[index] > curve.upper[index]) for index in outside]
    if all(above):
        return Verdict("under-confident", z, p_value, outside)
    return Verdict("miscalibrated" if any(above) else "over-confident", z, p_value, outside)


def number_verdict(
    z_sum: float, z_squared_sum: float, count: int, outside: Sequence[int] = ()
) -> Verdict:
    """Judge predictive distributions of numbers by z = Φ⁻¹(PIT).

    Args:
        z_sum: The sum of z.
        z_squared_sum: The sum of z²; infinite if a PIT of 0 or 1 is among them.
        count: The number of rows.
        outside: The bins of the PIT histogram outside of its band at :data:`NUMBER_BAND_LEVEL`.

    Returns:
        ``"over-confident"`` or ``"under-confident"`` if the dispersion is significant, ``"biased"``
        if the mean of z is (if both are, what lies further out), ``"miscalibrated"`` if only the
        histogram leaves its band.

    Example:
        >>> import numpy as np
        >>> z = 1.5 * np.random.default_rng(0).normal(size=500)  # errors 1.5 times what is said
        >>> number_verdict(z.sum(), (z**2).sum(), 500).label
        'over-confident'
    """
    if count < 0:
        raise DataError(f"The number of rows must not be negative; {count} came.")
    if not count:
        return Verdict("unknown", math.nan, math.nan)
    bins = list(outside)
    if not math.isfinite(z_squared_sum):
        return Verdict("over-confident", math.inf, 0.0, bins)
    bias = z_sum / math.sqrt(count)
    bias_p = float(2 * ndtr(-abs(bias)))
    # About the mean, so that a bias is not taken for a wrong spread as well.
    spread, spread_p = _spread_test(max(0.0, z_squared_sum - bias**2), count - 1)
    each = FALSE_ALARM / 3
    wide, off = spread_p < each, bias_p < each
    if off and not (wide and abs(spread) >= abs(bias)):
        return Verdict("biased", bias, bias_p, bins)
    if wide:
        label = "over-confident" if spread > 0 else "under-confident"
        return Verdict(label, spread, spread_p, bins)
    return Verdict("miscalibrated" if bins else "calibrated", spread, spread_p, bins)


def _score_test(total: float, variance: float, third: float, count: int) -> tuple[float, float]:
    """Give z and the two-sided p-value of a sum with these moments and mean 0."""
    if abs(total) <= _IMMATERIAL * count:
        return 0.0, 1.0
    if not math.isfinite(total) or variance <= 0:
        return math.copysign(math.inf, total), 0.0
    z = total / math.sqrt(variance)
    # a (N − λ) has variance a² λ and third moment a³ λ, so that λ = 1 / skewness²
    square = third**2
    rate = variance**3 / square if square > 0 else math.inf
    if rate > _NORMAL:
        return z, float(2 * ndtr(-abs(z)))
    surprises = rate + math.copysign(1, third) * z * math.sqrt(rate)
    many = gammainc(surprises, rate) if surprises > 0 else 1.0  # P(N >= surprises)
    few = gammaincc(max(surprises, 0.0) + 1, rate)  # P(N <= surprises)
    return z, float(min(1.0, 2 * min(many, few)))


def _spread_test(squares: float, freedom: int) -> tuple[float, float]:
    """Give the standard deviations that match a chi-square tail, and the two-sided p-value."""
    if freedom < 1:
        return 0.0, 1.0
    smaller = min(chdtr(freedom, squares), chdtrc(freedom, squares))
    size = (squares - freedom) / math.sqrt(2 * freedom)
    return size, float(min(1.0, 2 * smaller))
