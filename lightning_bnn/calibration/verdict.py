"""The verdict: is a predictor calibrated, and if not, is it too sure or not sure enough?

Each verdict is a set of tests whose false-alarm rates add up to :data:`FALSE_ALARM`, 1 %: a
predictor whose statements are all true is called calibrated in at least 99 of 100 data sets.

**Classification.** The score s = log p_y − Σ_k p_k log p_k is the derivative of the log-likelihood
in the inverse temperature, at 1. If p is true it has mean 0 and known moments, row by row. Its sum
S below 0 says that a higher temperature would be better: over-confident. (The mean NLL is the mean
entropy − S/n, so −S/n is the excess of the NLL over what the predictor expects of itself.) This
test of one direction has the power; half of the 1 % is spent on it. The other half goes to the
band of the reliability curve, which sees what no temperature mends.

The tail of S comes from a scaled Poisson count a (N − λ) with the variance and the third moment
of S. For many middling statements it is the normal tail; for sharp predictors, where S is the sum
of a few rare surprises, it stays right where the normal tail would cry out at the second one.

**Regression.** z = Φ⁻¹(PIT) is standard normal if the predictive distribution is true. So Σ(z − z̄)²
is chi-square with n − 1 degrees of freedom (too large: over-confident), and independently z̄ √n
is standard normal (bias). The PIT histogram's band sees the rest of the marginal. Last, in ten bins
of the stated standard deviation Σz² is chi-square with as many degrees of freedom as rows, which
sees a stated spread that is right on average and unrelated to the errors. A quarter of the 1 %
each.

Where an example has several rows (positions, outputs), they depend on each other, and are judged as
:mod:`lightning_bnn.calibration.clusters` says; bands and bins are not used for the label then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import chdtr, chdtrc, gammainc, gammaincc, ndtr

from lightning_bnn.calibration.bins import (
    Array,
    ReliabilityCurve,
    bin_index,
    bin_sums,
    mass_edges,
    reliability_curve,
    width_edges,
)
from lightning_bnn.calibration.clusters import IMMATERIAL, ClusterSums, cluster_sums, cluster_test

__all__ = [
    "CLASS_BAND_LEVEL",
    "FALSE_ALARM",
    "REGRESSION_BAND_LEVEL",
    "SpreadBins",
    "Verdict",
    "class_verdict",
    "regression_verdict",
    "rows_verdict",
    "score_moments",
    "spread_by_sd",
]

FALSE_ALARM = 0.01
CLASS_BAND_LEVEL = 1 - FALSE_ALARM / 2
REGRESSION_BAND_LEVEL = 1 - FALSE_ALARM / 4

# Above this λ the scaled Poisson tail is the normal one to all digits that matter.
_NORMAL = 1e8


@dataclass(frozen=True)
class Verdict:
    """What the tests say.

    Attributes:
        label: ``"calibrated"``, ``"over-confident"``, ``"under-confident"``, ``"miscalibrated"``
            (no common direction), ``"biased"`` (regression only), or ``"unknown"`` without any row.
        z: The statistic in standard deviations. Classification: below 0 is over-confident.
            Regression: of the dispersion, above 0 is over-confident, or of the bias if the label
            says so.
        p_value: Of that statistic, two-sided.
        outside: The bins outside of the band.
        spread_outside: Regression only: the bins of sd whose spread is wrong.
        clustered: Whether several rows of an example were allowed for.
    """

    label: str
    z: float
    p_value: float
    outside: list[int] = field(default_factory=list)
    spread_outside: list[int] = field(default_factory=list)
    clustered: bool = False


def score_moments(
    log_probabilities: Array, probabilities: Array, targets: Any
) -> tuple[Array, Array, Array]:
    """Give each row's score log p_y − Σ_k p_k log p_k, and its variance and third moment.

    Args:
        log_probabilities: Of shape (n, K).
        probabilities: Their exponentials.
        targets: The observed classes, (n,).

    Example:
        >>> p = np.array([[0.5, 0.5]])
        >>> [float(moment[0]) for moment in score_moments(np.log(p), p, np.array([0]))]
        [0.0, 0.0, 0.0]
    """
    finite = np.where(probabilities > 0, log_probabilities, 0.0)  # 0 log 0 = 0
    negative_entropy = (probabilities * finite).sum(1)
    centred = finite - negative_entropy[:, None]
    moment = probabilities * centred**2
    score = log_probabilities[np.arange(len(targets)), targets] - negative_entropy
    return score, moment.sum(1), (moment * centred).sum(1)


def rows_verdict(log_probabilities: Array, targets: Any, examples: Any, bins: int) -> Verdict:
    """Judge rows of probabilities that are held in memory.

    Args:
        log_probabilities: Of shape (n, K).
        targets: The observed classes, (n,).
        examples: The example of each row, (n,).
        bins: Number of bins of the reliability curve.

    Example:
        >>> stated = np.log([[0.9, 0.1]] * 200)
        >>> rows_verdict(stated, np.arange(200) % 2, np.arange(200), bins=15).label
        'over-confident'
    """
    probabilities = np.exp(log_probabilities)
    index, predicted = np.arange(len(targets)), log_probabilities.argmax(1)
    confidence = np.minimum(probabilities[index, predicted], 1.0)
    sums = bin_sums(confidence, predicted == targets, width_edges(bins))
    moments = score_moments(log_probabilities, probabilities, targets)
    clusters = cluster_sums(examples, moments[0])
    score, variance, third = (float(moment.sum()) for moment in moments)
    return class_verdict(
        reliability_curve(sums, level=CLASS_BAND_LEVEL),
        score,
        variance,
        third,
        clusters if clusters.examples < len(targets) else None,
    )


def class_verdict(
    curve: ReliabilityCurve,
    score_sum: float,
    score_variance: float,
    score_third: float,
    clusters: ClusterSums | None = None,
) -> Verdict:
    """Judge the probabilities of classes.

    Args:
        curve: Of (largest probability, whether it was right), with its band at
            :data:`CLASS_BAND_LEVEL`.
        score_sum: The sum over rows of s = log p_y − Σ_k p_k log p_k.
        score_variance: The sum of the variances of s if p is true: Σ_k p_k (log p_k + H)², with
            the entropy H of the row.
        score_third: The sum of the third moments of s if p is true: Σ_k p_k (log p_k + H)³.
        clusters: Of s, where examples have several rows.

    Returns:
        The direction of a significant score. Else that of the bins outside of the band if they
        agree, and ``"miscalibrated"`` if they do not.

    Example:
        >>> p, right = np.full(200, 0.9), np.arange(200) < 140  # says 90 %, right in 70 %
        >>> curve = reliability_curve(bin_sums(p, right, width_edges(15)), level=CLASS_BAND_LEVEL)
        >>> logit = np.log(9)
        >>> moments = 200 * 0.09 * logit**2, 200 * 0.09 * (0.1 - 0.9) * logit**3
        >>> class_verdict(curve, ((right - p) * logit).sum(), *moments).label
        'over-confident'
    """
    count = int(curve.count.sum())
    if not count:
        return Verdict("unknown", math.nan, math.nan)
    outside = curve.outside
    if clusters is not None:
        z, p_value = cluster_test(score_sum, score_variance, clusters, count)
        sides = ("over-confident" if z < 0 else "under-confident", "calibrated")
        return Verdict(sides[p_value >= FALSE_ALARM], z, p_value, outside, clustered=True)
    z, p_value = _score_test(score_sum, score_variance, score_third, count)
    if p_value < FALSE_ALARM - (1 - CLASS_BAND_LEVEL):
        return Verdict("over-confident" if z < 0 else "under-confident", z, p_value, outside)
    if not outside:
        return Verdict("calibrated", z, p_value)
    above = [bool(curve.observed[index] > curve.upper[index]) for index in outside]
    if all(above):
        return Verdict("under-confident", z, p_value, outside)
    return Verdict("miscalibrated" if any(above) else "over-confident", z, p_value, outside)


def _score_test(total: float, variance: float, third: float, count: int) -> tuple[float, float]:
    """Give z and the two-sided p-value of a sum with these moments and mean 0."""
    if abs(total) <= IMMATERIAL * count:
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


# ---------------------------------------------------------------- regression


@dataclass(frozen=True)
class SpreadBins:
    """The bins of stated standard deviation in which the spread of the errors is another.

    Attributes:
        narrow: Bins whose errors are larger than stated: over-confident.
        wide: Bins whose errors are smaller.
    """

    narrow: list[int] = field(default_factory=list)
    wide: list[int] = field(default_factory=list)


def spread_by_sd(sd: Array, z: Array, bins: int = 10) -> SpreadBins:
    """Test the spread in bins of the stated standard deviation, each with as many rows.

    Args:
        sd: Stated standard deviations, (n,).
        z: Φ⁻¹(PIT), (n,).
        bins: Number of bins; fewer where many sd are equal, and none where all are.

    Returns:
        The bins that a quarter of :data:`FALSE_ALARM` rejects, numbered as by ``error_by_sd``.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> sd = generator.uniform(0.5, 2.0, 2000)
        >>> z = generator.normal(size=2000) / sd  # true errors of 1, whatever was stated
        >>> spread = spread_by_sd(sd, z, bins=4)
        >>> spread.narrow, spread.wide
        ([0], [2, 3])
    """
    used, index = np.unique(bin_index(sd, mass_edges(sd, bins)), return_inverse=True)
    if len(used) < 2:
        return SpreadBins()  # the test of the dispersion has seen it already
    count, squares = np.bincount(index), np.bincount(index, z**2)
    tail = FALSE_ALARM / 4 / len(used) / 2
    with np.errstate(invalid="ignore"):
        narrow, wide = chdtrc(count, squares) < tail, chdtr(count, squares) < tail
    narrow |= np.isinf(squares)
    return SpreadBins(np.flatnonzero(narrow).tolist(), np.flatnonzero(wide).tolist())


def regression_verdict(
    z_sum: float,
    z_squared_sum: float,
    count: int,
    outside: Sequence[int] = (),
    spread_bins: SpreadBins | None = None,
    clusters: tuple[ClusterSums, ClusterSums] | None = None,
) -> Verdict:
    """Judge the predictive distributions of a regression by z = Φ⁻¹(PIT).

    Args:
        z_sum: The sum of z.
        z_squared_sum: The sum of z²; infinite if a PIT of 0 or 1 is among them.
        count: The number of rows.
        outside: The bins of the PIT histogram outside of its band at :data:`REGRESSION_BAND_LEVEL`.
        spread_bins: What :func:`spread_by_sd` spreads.
        clusters: Of z and of z² − 1, where examples have several rows.

    Returns:
        ``"over-confident"`` or ``"under-confident"`` if the dispersion is significant, ``"biased"``
        if the mean of z is (if both are, what lies further out). Else ``"miscalibrated"`` if the
        histogram leaves its band or the spread is wrong in bins of sd, but for bins that are all
        too narrow or all too wide.

    Example:
        >>> z = 1.5 * np.random.default_rng(0).normal(size=500)  # errors 1.5 times what is said
        >>> regression_verdict(z.sum(), (z**2).sum(), 500).label
        'over-confident'
    """
    if not count:
        return Verdict("unknown", math.nan, math.nan)
    bins = list(outside)
    spreads = spread_bins or SpreadBins()
    wrong = sorted(spreads.narrow + spreads.wide)
    if not math.isfinite(z_squared_sum):
        return Verdict("over-confident", math.inf, 0.0, bins, wrong, clusters is not None)
    if clusters is None:
        bias = z_sum / math.sqrt(count)
        bias_p = float(2 * ndtr(-abs(bias)))
        # About the mean, so that a bias is not taken for a wrong spread as well.
        spread, spread_p = _spread_test(max(0.0, z_squared_sum - bias**2), count - 1)
        each = FALSE_ALARM / 4
    else:
        bias, bias_p = cluster_test(z_sum, count, clusters[0], count)
        excess = z_squared_sum - z_sum**2 / count - count
        spread, spread_p = cluster_test(excess, 2 * count, clusters[1], count)
        each = FALSE_ALARM / 2
    off, wide = bias_p < each, spread_p < each
    if off and not (wide and abs(spread) >= abs(bias)):
        return Verdict("biased", bias, bias_p, bins, wrong, clusters is not None)
    if wide:
        label = "over-confident" if spread > 0 else "under-confident"
    elif clusters is not None or not (bins or wrong):
        label = "calibrated"
    elif bins or (spreads.narrow and spreads.wide):
        label = "miscalibrated"
    else:
        label = "over-confident" if spreads.narrow else "under-confident"
    return Verdict(label, spread, spread_p, bins, wrong, clusters is not None)


def _spread_test(squares: float, freedom: int) -> tuple[float, float]:
    """Give the standard deviations that match a chi-square tail, and the two-sided p-value."""
    if freedom < 1:
        return 0.0, 1.0
    smaller = min(chdtr(freedom, squares), chdtrc(freedom, squares))
    size = (squares - freedom) / math.sqrt(2 * freedom)
    return size, float(min(1.0, 2 * smaller))
