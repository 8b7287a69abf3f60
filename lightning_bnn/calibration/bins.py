"""Bins of stated probabilities: streaming sums, and the reliability curve with its band.

A statement is a probability p and an outcome y in {0, 1}. In each bin of p we keep five sums,
Σ1, Σp, Σy, Σp² and Σpy, which are enough for the reliability curve (DeGroot and Fienberg 1983,
"The comparison and evaluation of forecasters"), the calibration errors and the decompositions of
the scores. Sums of batches and of processes add up, so nothing else has to be held in memory.

Bins are [a, b), and the last one is [a, b]: a stated probability of 1 has no bin of its own. What
is below an edge by rounding only has met it: 0.7 in float32, or a third after a softmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

__all__ = [
    "Array",
    "BinSums",
    "bin_index",
    "bin_sums",
    "binomial_band",
    "mass_edges",
    "outside_band",
    "reliability_curve",
    "width_edges",
]

Array = NDArray[np.float64]
Integers = NDArray[np.integer[Any]]

# By which part of the narrowest bin a value may be below an edge and count as on it. With 15 bins
# that is less than a millionth, and ten times what float32 rounds away.
_SLACK = 1e-5
# What is summed in each bin.
_SUMS = ("count", "stated", "observed", "stated_squared", "stated_observed")


def width_edges(bins: int) -> Array:
    """Give the edges of equally wide bins of [0, 1].

    Args:
        bins: The number of bins.

    Returns:
        The edges k / bins, each rounded once, so that a stated 0.2 meets the edge 3/15.

    Example:
        >>> width_edges(4).tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    return np.arange(bins + 1) / bins


def mass_edges(values: Array, bins: int) -> Array:
    """Give edges between which lie equally many of the values: their quantiles.

    Equal edges are merged, so that ties give fewer bins, and there are never more bins than
    values. Values that are all equal share one bin.

    Args:
        values: What is to be put into bins; at least one, and finite.
        bins: The number of bins to aim at.

    Returns:
        Strictly increasing edges, at least two.

    Example:
        >>> mass_edges(np.array([0.1, 0.2, 0.7, 0.8, 0.9]), bins=2).tolist()
        [0.1, 0.7, 0.9]
        >>> mass_edges(np.array([0.5, 1.0, 1.0, 1.0]), bins=3).tolist()
        [0.5, 1.0]
    """
    shares = np.arange(min(bins, values.size) + 1) / min(bins, values.size)
    edges = np.unique(np.quantile(values, shares))
    if len(edges) == 1:
        # One bin that is as narrow as can be, and inside of [0, 1] for a value of 0 or 1.
        only = edges[0]
        edges = np.array([np.nextafter(only, 0), only] if only else [0, np.nextafter(0, 1)])
        edges.sort()
    return edges


def bin_index(values: Array, edges: Array) -> NDArray[np.intp]:
    """Say in which bin each value lies: [a, b), the last [a, b]; beyond the ends, the end bins.

    A value below an edge by less than a hundred-thousandth of the narrowest bin is on that edge, so
    that rounding does not decide where 0.7 goes.

    Args:
        values: Of any shape.
        edges: Strictly increasing, of shape (bins + 1,).

    Returns:
        Indices from 0 to bins − 1, in the shape of the values.

    Example:
        >>> bin_index(np.array([0.0, 0.5, 0.99, 1.0]), width_edges(2)).tolist()
        [0, 1, 1, 1]
        >>> bin_index(np.array([0.7], np.float32), width_edges(10)).tolist()  # 0.69999999
        [7]
    """
    met = edges - _SLACK * np.diff(edges).min()
    return np.clip(np.searchsorted(met, values, side="right") - 1, 0, len(edges) - 2)


class BinSums:
    """The streaming sums of statements and outcomes in fixed bins.

    Attributes of shape (groups, bins): ``count`` (int64), ``stated`` Σp, ``observed`` Σy,
    ``stated_squared`` Σp² and ``stated_observed`` Σpy. A group is a kind of statement that is
    looked at by itself, such as "it is class k".

    Args:
        edges: The edges of the bins, strictly increasing.
        groups: The number of groups.

    Example:
        >>> sums = BinSums(width_edges(2))
        >>> sums.add(np.array([0.2, 0.9, 0.7]), np.array([0, 1, 0]))
        >>> sums.count.tolist(), sums.observed.tolist()
        ([[1, 2]], [[0.0, 1.0]])
    """

    def __init__(self, edges: Array, groups: int = 1) -> None:
        self.edges = np.asarray(edges, dtype=np.float64)
        self.bins, self.groups = len(self.edges) - 1, groups
        shape = (groups, self.bins)
        self.count = np.zeros(shape, dtype=np.int64)
        self.stated, self.observed = np.zeros(shape), np.zeros(shape)
        self.stated_squared, self.stated_observed = np.zeros(shape), np.zeros(shape)

    def add(self, stated: Array, observed: Array, group: Integers | int = 0) -> None:
        """Add statements.

        Args:
            stated: Probabilities of shape (n,), finite.
            observed: Whether the stated event was observed, 0 or 1, of shape (n,).
            group: The group of each, or of all.
        """
        p, y = np.asarray(stated, dtype=np.float64), np.asarray(observed, dtype=np.float64)
        place = bin_index(p, self.edges) + np.asarray(group, dtype=np.intp) * self.bins
        for name, terms in zip(_SUMS, (None, p, y, p * p, p * y), strict=True):
            sums = np.bincount(place, terms, minlength=self.count.size)
            getattr(self, name)[:] += sums.reshape(self.count.shape)

    def add_classes(self, probabilities: Array, targets: Integers) -> None:
        """Add for each class k, as group k, the statement "it is class k".

        Args:
            probabilities: Of shape (n, groups).
            targets: The observed classes, of shape (n,).
        """
        classes = np.tile(np.arange(self.groups), len(targets))
        self.add(probabilities.ravel(), np.repeat(targets, self.groups) == classes, classes)

    def __iadd__(self, other: BinSums) -> Self:
        """Add the sums of another part of the data, in the same bins and groups."""
        for name in _SUMS:
            getattr(self, name)[:] += getattr(other, name)
        return self


def bin_sums(stated: Array, observed: Array, edges: Array) -> BinSums:
    """Sum statements and outcomes in bins, in one call and one group.

    Example:
        >>> bin_sums(np.array([0.2, 0.9]), np.array([0, 1]), width_edges(2)).stated.tolist()
        [[0.2, 0.9]]
    """
    sums = BinSums(edges)
    sums.add(stated, observed)
    return sums


def outside_band(values: Array, lower: Array, upper: Array) -> NDArray[np.bool_]:
    """Which values leave their band; NaN does not.

    Example:
        >>> outside_band(np.array([1.0, 5.0]), np.zeros(2), np.full(2, 4.0))
        array([False,  True])
    """
    return np.asarray((values < lower) | (values > upper))


def reliability_curve(sums: BinSums, level: float = 0.99) -> dict[str, Array]:
    """What was stated against what was observed, bin by bin, with the band of perfect calibration.

    The band of a bin of n statements is that of a binomial count with the mean stated
    probability, from the quantile α/2 to 1 − α/2, where α = (1 − level) / (non-empty bins): a
    Bonferroni band, right jointly whatever the bins. If the probabilities in a bin differ, the
    true count has lighter tails than the binomial one (Hoeffding 1956, "On the distribution of
    the number of successes in independent trials"), or, where less than one hit or miss is
    expected, the same up to the factor 1 + α: the band is not too narrow. It holds for outcomes
    that are independent given the inputs.

    Args:
        sums: The sums in bins, of one group.
        level: The probability that the whole curve lies in the band if all that is stated is true.

    Returns:
        ``"edges"`` of shape (bins + 1,), and of shape (bins,) ``"count"``, the number of
        statements; the mean ``"stated"`` probability, the ``"observed"`` share that were true, and
        the band of that share from ``"lower"`` to ``"upper"``, both included: NaN in an empty bin.

    Example:
        >>> sums = bin_sums(np.full(100, 0.9), np.arange(100) < 60, width_edges(1))
        >>> curve = reliability_curve(sums)
        >>> curve["observed"].item(), curve["lower"].item()
        (0.6, 0.82)
    """
    count = sums.count[0]
    n = np.where(count > 0, count, np.nan)
    # Rounding of a sum can leave [0, 1] by one digit.
    stated = np.clip(sums.stated[0] / n, 0, 1)
    lower, upper = binomial_band((1 - level) / max(1, (count > 0).sum()), count, stated)
    return {
        "edges": sums.edges,
        "count": count.copy(),
        "stated": stated,
        "observed": sums.observed[0] / n,
        "lower": lower / n,
        "upper": upper / n,
    }


def binomial_band(
    false_alarm: float, trials: NDArray[np.int64], probability: Array
) -> tuple[Array, Array]:
    """Give the smallest and the largest count that binomials leave with ``false_alarm`` only.

    Example:
        >>> binomial_band(0.1, np.array([100]), np.array([0.5]))
        (array([42.]), array([58.]))
    """
    tail = false_alarm / 2
    from scipy.stats import binom  # takes long to import, and only bands need it

    return binom.ppf(tail, trials, probability), binom.isf(tail, trials, probability)
