"""The digits of a stated number that are more than rounding, so that equal statements are equal.

A logarithm, a softmax and a mean over draws leave 0.6 as 0.6000000000000001 in one row and as
0.5999999999999999 in another. Ranks (AURC, AUROC) would order such ties by their noise. So what is
ranked is rounded: to 12 decimals in float64, and to 6 digits of the smaller one of p and 1 - p in
lower precision. The nearness of p to 1 is kept that way: 1 - 1e-9 stays above 1 - 2e-9.
"""

from __future__ import annotations

import numpy as np

from lightning_bnn.calibration.bins import Array

__all__ = ["rounded", "rounded_probability"]

DECIMALS = 12
DIGITS = 6


def rounded(values: Array) -> Array:
    """Numbers >= 0 to 12 decimals; what rounding made negative is 0.

    Example:
        >>> rounded(np.array([0.1 + 0.2, -1e-16])).tolist()
        [0.3, 0.0]
    """
    return np.maximum(np.round(values, DECIMALS), 0.0)


def rounded_probability(probability: Array, rest: Array, single: bool) -> Array:
    """Probabilities without the digits that rounding made.

    Args:
        probability: Of shape (n,).
        rest: 1 - probability, which may be known better than by subtracting.
        single: Whether they come from float32 or less.

    Example:
        >>> stated = np.array([0.7, 1 / 3], np.float32).astype(float)
        >>> rounded_probability(stated, 1 - stated, single=True).tolist()
        [0.7, 0.333333]
    """
    if not single:
        return np.clip(np.round(probability, DECIMALS), 0.0, 1.0)
    smaller: Array = np.asarray(np.round(np.minimum(probability, rest), DECIMALS), np.float64)
    places = DIGITS - 1 - np.floor(np.log10(np.where(smaller > 0, smaller, 1.0)))
    scale: Array = np.power(10.0, places)
    smaller = np.round(smaller * scale) / scale
    return np.clip(np.where(probability < rest, smaller, 1.0 - smaller), 0.0, 1.0)
