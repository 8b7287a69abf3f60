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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import chdtr, chdtrc, gammainc, gammaincc, ndtr

from lightning_bnn.calibration.bins import (
    Array,
    bin_index,
    mass_edges,
    outside_band,
)
from lightning_bnn.calibration.clusters import ClusterSums, cluster_test, standard_score

__all__ = [
    "CLASS_BAND_LEVEL",
    "FALSE_ALARM",
    "REGRESSION_BAND_LEVEL",
    "Verdict",
    "class_verdict",
    "regression_verdict",
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
            (no common direction), or ``"biased"`` (regression only).
        z: The statistic in standard deviations. Classification: below 0 is over-confident.
            Regression: of the dispersion, above 0 is over-confident, or of the bias if the label
            says so.
        p_value: Of that statistic, two-sided.
        spread_outside: Regression only: the bins of sd whose spread is wrong.
        clustered: Whether several rows of an example were allowed for.
    """

    label: str
    z: float
    p_value: float
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


def class_verdict(
    curve: Mapping[str, Array],
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
        >>> from lightning_bnn.calibration.bins import bin_sums, reliability_curve, width_edges
        >>> p, right = np.full(200, 0.9), np.arange(200) < 140  # says 90 %, right in 70 %
        >>> curve = reliability_curve(bin_sums(p, right, width_edges(15)), level=CLASS_BAND_LEVEL)
        >>> logit = np.log(9)
        >>> moments = 200 * 0.09 * logit**2, 200 * 0.09 * (0.1 - 0.9) * logit**3
        >>> class_verdict(curve, ((right - p) * logit).sum(), *moments).label
        'over-confident'
    """
    count = int(curve["count"].sum())
    if clusters is not None:
        z, p_value = cluster_test(score_sum, score_variance, clusters, count)
        significant = p_value < FALSE_ALARM
    else:
        z, p_value = _score_test(score_sum, score_variance, score_third, count)
        significant = p_value < FALSE_ALARM - (1 - CLASS_BAND_LEVEL)
    outside = outside_band(curve["observed"], curve["lower"], curve["upper"])
    if significant:
        label = "over-confident" if z < 0 else "under-confident"
    elif clusters is not None or not outside.any():
        label = "calibrated"
    elif len(sides := np.unique((curve["observed"] > curve["upper"])[outside])) == 2:
        label = "miscalibrated"
    else:
        label = "under-confident" if sides[0] else "over-confident"
    return Verdict(label, z, p_value, clustered=clusters is not None)


def _score_test(total: float, variance: float, third: float, count: int) -> tuple[float, float]:
    """Give z and the two-sided p-value of a sum with these moments and mean 0."""
    z = standard_score(total, variance, count)
    # a (N − λ) has variance a² λ and third moment a³ λ, so that λ = 1 / skewness²
    square = third**2
    rate = variance**3 / square if square > 0 else math.inf
    if not z or math.isinf(z) or rate > _NORMAL:
        return z, float(2 * ndtr(-abs(z)))
    surprises = rate + math.copysign(1, third) * z * math.sqrt(rate)
    many = gammainc(surprises, rate) if surprises > 0 else 1.0  # P(N >= surprises)
    few = gammaincc(max(surprises, 0.0) + 1, rate)  # P(N <= surprises)
    return z, float(min(1.0, 2 * min(many, few)))


# ---------------------------------------------------------------- regression


def spread_by_sd(sd: Array, z: Array, bins: int = 10) -> tuple[list[int], list[int]]:
    """Test the spread in bins of the stated standard deviation, each with as many rows.

    Args:
        sd: Stated standard deviations, (n,).
        z: Φ⁻¹(PIT), (n,).
        bins: Number of bins; fewer where many sd are equal, and none where all are.

    Returns:
        The bins that a quarter of :data:`FALSE_ALARM` rejects, numbered as by ``error_by_sd``:
        those whose errors are larger than stated (over-confident), and those with smaller ones.

    Example:
        >>> generator = np.random.default_rng(0)
        >>> sd = generator.uniform(0.5, 2.0, 2000)
        >>> z = generator.normal(size=2000) / sd  # true errors of 1, whatever was stated
        >>> spread_by_sd(sd, z, bins=4)
        ([0], [2, 3])
    """
    used, index = np.unique(bin_index(sd, mass_edges(sd, bins)), return_inverse=True)
    if len(used) < 2:
        return [], []  # the test of the dispersion has seen it already
    count, squares = np.bincount(index), np.bincount(index, z**2)
    tail = FALSE_ALARM / 4 / len(used) / 2
    with np.errstate(invalid="ignore"):
        narrow, wide = chdtrc(count, squares) < tail, chdtr(count, squares) < tail
    narrow |= np.isinf(squares)
    return np.flatnonzero(narrow).tolist(), np.flatnonzero(wide).tolist()


def regression_verdict(
    z_sum: float,
    z_squared_sum: float,
    count: int,
    outside: bool = False,
    spread_bins: tuple[list[int], list[int]] = ([], []),
    clusters: tuple[ClusterSums, ClusterSums] | None = None,
) -> Verdict:
    """Judge the predictive distributions of a regression by z = Φ⁻¹(PIT).

    Args:
        z_sum: The sum of z.
        z_squared_sum: The sum of z²; infinite if a PIT of 0 or 1 is among them.
        count: The number of rows.
        outside: Whether the PIT histogram leaves its band at :data:`REGRESSION_BAND_LEVEL`.
        spread_bins: What :func:`spread_by_sd` gives.
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
    narrow, wide = spread_bins
    wrong = sorted(narrow + wide)
    if not math.isfinite(z_squared_sum):
        return Verdict("over-confident", math.inf, 0.0, wrong, clusters is not None)
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
    significant = spread_p < each
    if bias_p < each and not (significant and abs(spread) >= abs(bias)):
        return Verdict("biased", bias, bias_p, wrong, clusters is not None)
    if significant:
        label = "over-confident" if spread > 0 else "under-confident"
    elif clusters is not None or not (outside or wrong):
        label = "calibrated"
    elif outside or (narrow and wide):
        label = "miscalibrated"
    else:
        label = "over-confident" if narrow else "under-confident"
    return Verdict(label, spread, spread_p, wrong, clusters is not None)


def _spread_test(squares: float, freedom: int) -> tuple[float, float]:
    """Give the standard deviations that match a chi-square tail, and the two-sided p-value."""
    if freedom < 1:
        return 0.0, 1.0
    smaller = min(chdtr(freedom, squares), chdtrc(freedom, squares))
    size = (squares - freedom) / math.sqrt(2 * freedom)
    return size, float(min(1.0, 2 * smaller))
