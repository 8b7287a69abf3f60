"""Sums over rows that depend on each other: the pixels of a picture, the outputs of an example.

Tests of independent rows cry out there without a cause. So S_e is the sum of a column over the
rows of example e, and Σ_e S_e is compared with the larger one of the variance that independent
rows would have and Σ_e S_e², which holds however the rows of one example depend on each other
(Liang and Zeger 1986), with a correction for the skewness of S_e (Johnson 1978) where it makes
the statistic smaller.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr

from lightning_bnn.calibration.bins import Array

__all__ = ["ClusterSums", "cluster_sums", "cluster_test", "standard_score"]

# Below this mean score, in nats, a predictor is as good as its word, and rounding in float32
# (all classes equally probable: variance 0) must not decide.
IMMATERIAL = 1e-6


@dataclass(frozen=True)
class ClusterSums:
    """Sums over examples of the powers of S_e, the sum of a column over the example's rows.

    Attributes:
        examples: Their number.
        squares: Of S_e².
        cubes: Of S_e³.

    Example:
        >>> cluster_sums(np.array([3, 3, 5]), np.array([1.0, 2.0, 4.0]))
        ClusterSums(examples=2, squares=25.0, cubes=91.0)
    """

    examples: int = 0
    squares: float = 0.0
    cubes: float = 0.0

    def __add__(self, other: ClusterSums) -> ClusterSums:
        """The sums over the examples of both, which have none in common."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return ClusterSums(*(ours + theirs for ours, theirs in pairs))


def cluster_sums(example: Any, values: Array) -> ClusterSums:
    """Sum a column over the rows of each example, and its powers over the examples.

    Args:
        example: The example of each row, (n,), in any order.
        values: Of shape (n,).

    Example:
        >>> cluster_sums(np.array([0, 1]), np.array([1.0, -2.0])).squares
        5.0
    """
    names, index = np.unique(example, return_inverse=True)
    sums = np.bincount(index, values, minlength=len(names))
    with np.errstate(over="ignore"):
        return ClusterSums(len(names), float((sums**2).sum()), float((sums**3).sum()))


def standard_score(total: float, variance: float, count: int) -> float:
    """A sum of ``count`` rows in standard deviations; 0 where its mean is immaterial.

    Example:
        >>> standard_score(6.0, 4.0, 100), standard_score(1e-9, 4.0, 100)
        (3.0, 0.0)
    """
    if abs(total) <= IMMATERIAL * count:
        return 0.0
    if not math.isfinite(total) or variance <= 0:
        return math.copysign(math.inf, total)
    return total / math.sqrt(variance)


def cluster_test(
    total: float, variance: float, clusters: ClusterSums, count: int
) -> tuple[float, float]:
    """Give z and its two-sided p-value, where rows of one example depend on each other."""
    variance = max(variance, clusters.squares)
    z = standard_score(total, variance, count)
    if z and math.isfinite(z):
        skewness = clusters.cubes / variance**1.5
        # Few large S_e on one side: without them the sum lies on the other side, and looks sure.
        corrected = z + skewness / 6 + skewness * z**2 / 3
        if abs(corrected) < abs(z) or corrected * z < 0:
            z = corrected if corrected * z > 0 else 0.0
    return z, float(2 * ndtr(-abs(z)))
