"""The verdict on predictive distributions of numbers.

z = Φ⁻¹(PIT) is standard normal if the predictive distribution is true. So Σ(z − z̄)²
is chi-square with n − 1 degrees of freedom (too large: over-confident), and independently z̄ √n
is standard normal (bias). The PIT histogram's band sees the rest of the marginal. Last, in ten bins
of the stated standard deviation Σz² is chi-square with as many degrees of freedom as rows, which
sees a stated spread that is right on average and unrelated to the errors. A quarter of the 1 %
each.

Where an example has several rows (outputs), they are judged as
:mod:`lightning_bnn.calibration.clusters` says, and the bands and bins are not used for the label.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.special import chdtr, chdtrc, ndtr

from lightning_bnn.calibration.bins import Array, bin_index, mass_edges
from lightning_bnn.calibration.clusters import ClusterSums, cluster_test
from lightning_bnn.calibration.verdict import FALSE_ALARM, Verdict
from lightning_bnn.errors import DataError

__all__ = ["NUMBER_BAND_LEVEL", "SpreadBins", "number_verdict", "spread_by_sd"]

NUMBER_BAND_LEVEL = 1 - FALSE_ALARM / 4


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


def number_verdict(
    z_sum: float,
    z_squared_sum: float,
    count: int,
    outside: Sequence[int] = (),
    spread_bins: SpreadBins | None = None,
    clusters: tuple[ClusterSums, ClusterSums] | None = None,
) -> Verdict:
    """Judge predictive distributions of numbers by z = Φ⁻¹(PIT).

    Args:
        z_sum: The sum of z.
        z_squared_sum: The sum of z²; infinite if a PIT of 0 or 1 is among them.
        count: The number of rows.
        outside: The bins of the PIT histogram outside of its band at :data:`NUMBER_BAND_LEVEL`.
        spread_bins: What :func:`spread_by_sd` found.
        clusters: Of z and of z² − 1, where examples have several rows.

    Returns:
        ``"over-confident"`` or ``"under-confident"`` if the dispersion is significant, ``"biased"``
        if the mean of z is (if both are, what lies further out). Else ``"miscalibrated"`` if the
        histogram leaves its band or the spread is wrong in bins of sd, but for bins that are all
        too narrow or all too wide.

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
    found = spread_bins or SpreadBins()
    wrong = sorted(found.narrow + found.wide)
    if not math.isfinite(z_squared_sum):
        return Verdict("over-confident", math.inf, 0.0, bins, wrong, clusters is not None)
    if clusters is not None:
        return _clustered(z_sum, z_squared_sum, count, bins, wrong, clusters)
    bias = z_sum / math.sqrt(count)
    bias_p = float(2 * ndtr(-abs(bias)))
    # About the mean, so that a bias is not taken for a wrong spread as well.
    spread, spread_p = _spread_test(max(0.0, z_squared_sum - bias**2), count - 1)
    each = FALSE_ALARM / 4
    wide, off = spread_p < each, bias_p < each
    if off and not (wide and abs(spread) >= abs(bias)):
        return Verdict("biased", bias, bias_p, bins, wrong)
    if wide:
        label = "over-confident" if spread > 0 else "under-confident"
    elif bins or (found.narrow and found.wide):
        label = "miscalibrated"
    elif wrong:
        label = "over-confident" if found.narrow else "under-confident"
    else:
        label = "calibrated"
    return Verdict(label, spread, spread_p, bins, wrong)


def _clustered(
    z_sum: float,
    z_squared_sum: float,
    count: int,
    bins: list[int],
    wrong: list[int],
    clusters: tuple[ClusterSums, ClusterSums],
) -> Verdict:
    """The tests of bias and dispersion, half of the 1 % each, for dependent rows."""
    bias, bias_p = cluster_test(z_sum, count, clusters[0], count)
    excess = z_squared_sum - z_sum**2 / count - count
    spread, spread_p = cluster_test(excess, 2 * count, clusters[1], count)
    wide, off = spread_p < FALSE_ALARM / 2, bias_p < FALSE_ALARM / 2
    if off and not (wide and abs(spread) >= abs(bias)):
        return Verdict("biased", bias, bias_p, bins, wrong, True)
    sides = ("calibrated", "over-confident" if spread > 0 else "under-confident")
    return Verdict(sides[wide], spread, spread_p, bins, wrong, True)


def _spread_test(squares: float, freedom: int) -> tuple[float, float]:
    """Give the standard deviations that match a chi-square tail, and the two-sided p-value."""
    if freedom < 1:
        return 0.0, 1.0
    smaller = min(chdtr(freedom, squares), chdtrc(freedom, squares))
    size = (squares - freedom) / math.sqrt(2 * freedom)
    return size, float(min(1.0, 2 * smaller))
