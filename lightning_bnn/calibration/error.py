"""Calibration errors: the distance between what is stated and what is observed, over bins.

With bins b of n_b statements each, mean stated probability p_b and share of hits y_b:

    expected (ECE) = Σ_b (n_b / n) |p_b − y_b|        Naeini et al. (2015), Guo et al. (2017)
    classwise      = mean over classes k of the ECE of "it is class k", Kull et al. (2019)

On bins of equal mass the first is the adaptive calibration error. All of them are larger than 0
for a perfectly calibrated predictor as well, by the chance of a finite sample: they rank
predictors on the same data, and the band of the reliability curve says what is significant.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_bnn.calibration.bins import Array, BinSums, bin_index

__all__ = ["expected_calibration_error", "expected_calibration_errors"]


def expected_calibration_error(sums: BinSums) -> float:
    """Give the mean distance between stated and observed, weighted by the number of statements.

    Args:
        sums: The sums in bins, of equal width (ECE) or of equal mass (adaptive ECE). Of several
            groups, as of :meth:`BinSums.add_classes`, the mean of their errors (classwise ECE).

    Returns:
        The error in [0, 1]; NaN if nothing was stated.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.bins import bin_sums, width_edges
        >>> sums = bin_sums(np.full(5, 0.8), np.array([1, 1, 1, 0, 0]), width_edges(15))
        >>> round(expected_calibration_error(sums), 6)  # right 3 times in 5
        0.2
    """
    with np.errstate(invalid="ignore"):  # nothing stated: NaN
        errors = np.abs(sums.stated - sums.observed).sum(axis=1) / sums.count.sum(axis=1)
    return float(errors.mean())


def expected_calibration_errors(
    stated: Array, observed: Array, edges: Array, weights: NDArray[np.floating]
) -> Array:
    """Give the expected calibration error of many weightings of the same statements at once.

    Args:
        stated: Probabilities of shape (n,).
        observed: Whether it was observed, of shape (n,).
        edges: The edges of the bins, the same for all.
        weights: How often each statement counts, of shape (R, n).

    Returns:
        The R errors.

    Example:
        >>> import numpy as np
        >>> stated, observed, edges = np.array([0.8, 0.6]), np.array([1, 0]), np.array([0.0, 1.0])
        >>> weights = np.array([[1.0, 1.0], [2.0, 0.0]])
        >>> expected_calibration_errors(stated, observed, edges, weights).round(6).tolist()
        [0.2, 0.2]
    """
    place = bin_index(stated, edges)
    # One column a bin that is used: the product with it sums the gaps of that bin. It stays in
    # the type of the weights, which are by far the largest array.
    used, column = np.unique(place, return_inverse=True)
    gaps = np.zeros((len(stated), len(used)), dtype=weights.dtype)
    gaps[np.arange(len(stated)), column] = stated - observed
    total = np.abs(weights @ gaps).sum(axis=1, dtype=np.float64)
    return np.asarray(total / weights.sum(axis=1, dtype=np.float64))
