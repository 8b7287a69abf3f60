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

Rows of one example depend on each other, and are judged as
:mod:`lightning_bnn.calibration.clusters` says; the band is not used for the label then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import gammainc, gammaincc, ndtr

from lightning_bnn.calibration.bins import (
    Array,
    ReliabilityCurve,
    bin_sums,
    reliability_curve,
    width_edges,
)
from lightning_bnn.calibration.clusters import IMMATERIAL, ClusterSums, cluster_sums, cluster_test

__all__ = [
    "CLASS_BAND_LEVEL",
    "FALSE_ALARM",
    "Verdict",
    "class_verdict",
    "rows_verdict",
    "score_moments",
]

FALSE_ALARM = 0.01
CLASS_BAND_LEVEL = 1 - FALSE_ALARM / 2

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
        spread_outside: Numbers only: the bins of sd whose spread is wrong.
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
        targets: The classes that came, (n,).

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
        targets: The classes that came, (n,).
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
    score, variance, third = score_moments(log_probabilities, probabilities, targets)
    clusters = cluster_sums(examples, score)
    return class_verdict(
        reliability_curve(sums, level=CLASS_BAND_LEVEL),
        float(score.sum()),
        float(variance.sum()),
        float(third.sum()),
        clusters if clusters.examples < len(score) else None,
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
        curve: Of (largest probability, whether it came), with its band at
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
    if clusters is not None:
        z, p_value = cluster_test(score_sum, score_variance, clusters, count)
        sides = ("over-confident" if z < 0 else "under-confident", "calibrated")
        return Verdict(sides[p_value >= FALSE_ALARM], z, p_value, outside, clustered=True)
    z, p_value = _score_test(score_sum, score_variance, score_third, count)
    if p_value < FALSE_ALARM - (1 - CLASS_BAND_LEVEL):
        return Verdict("over-confident" if z < 0 else "under-confident", z, p_value, outside)
    if not outside:
        return Verdict("calibrated", z, p_value)
    above = [bool(curve.came[index] > curve.upper[index]) for index in outside]
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
