r"""How far a number would move if the test set were drawn again: the bootstrap.

A replicate draws as many *examples* as there are, with replacement, and computes the number on
them (Efron, 1979). What is drawn is not kept as a list of rows but as a weight for each row: how
often its example was drawn. A mean is then :math:`\sum_i w_i x_i / \sum_i w_i`, and all replicates
are one matrix product. Rows of one example (its pixels, labels or outputs) are not independent, so
that they are drawn together.

The percentile interval takes the quantiles q of the replicates :math:`\hat\theta^*` as they are.
That is wrong for a calibration error: noise inflates it, and the replicates hold the noise twice,
so that they never come near the 0 of a calibrated predictor. Reflecting the replicates at the
estimate (the basic interval) does not undo it either: it holds the 0 in two of three cases only,
because absolute values grow with the root of the noise's variance. Squares do add up: what noise
adds to :math:`\hat\theta^2` it adds again to :math:`\hat\theta^{*2}`. So the lower end is reflected
there, and the upper end is the estimate, biased upwards as it is, plus the replicates' own spread:

.. math:: \Big[\sqrt{\max(0,\, 2\hat\theta^2 - q_{(1+\text{level})/2}^2)},\;
          \hat\theta + q_{(1+\text{level})/2} - q_{1/2}\Big].

In simulations with 100 to 2000 rows and errors from 0 to 0.2 it held the truth in 95% to 100% of
the cases at a level of 95%.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_bnn.calibration.bins import Array

__all__ = [
    "basic_interval",
    "mean_replicates",
    "paired_difference_is_clear",
    "percentile_interval",
    "replicates",
    "resample_weights",
]

Weights = NDArray[np.float32]

MOST_REPLICATES = 1000
FEWEST_REPLICATES = 200
# Replicates times examples, up to which there are as many replicates as wanted.
DRAWN = 10_000_000
# Numbers of float64 that a product holds at a time: 32 MB.
_BUDGET = 2**22


def replicates(examples: int) -> int:
    """Number of replicates for a data set of this size: fewer for large ones, to bound the time.

    Example:
        >>> from lightning_bnn.calibration.bootstrap import replicates
        >>> replicates(360), replicates(20_000), replicates(1_000_000)
        (1000, 500, 200)
    """
    return max(FEWEST_REPLICATES, min(MOST_REPLICATES, DRAWN // max(1, examples)))


def resample_weights(example: NDArray[np.int64], count: int, seed: int = 0) -> Weights:
    """How often each row is drawn in each replicate.

    The same examples and the same seed give the same weights, so that models that are judged on
    the same rows can be compared replicate by replicate.

    Args:
        example: The example that each row belongs to, in any order, of shape ``(n,)``.
        count: Number of replicates R.
        seed: Of the random numbers.

    Returns:
        Counts of shape ``(R, n)``. Over the examples they sum to the number of examples.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.bootstrap import resample_weights
        >>> resample_weights(np.array([7, 7, 8, 9]), 3)  # rows 0 and 1 are of one example
        array([[0., 0., 2., 1.],
               [3., 3., 0., 0.],
               [3., 3., 0., 0.]], dtype=float32)
    """
    names, inverse = np.unique(example, return_inverse=True)
    examples, generator = len(names), np.random.default_rng(seed)
    drawn = np.empty((count, examples), np.float32)
    for row in drawn:
        chosen = generator.integers(0, examples, size=examples)
        row[:] = np.bincount(chosen, minlength=examples)
    return drawn[:, inverse]


def mean_replicates(column: Array, weights: NDArray[np.floating]) -> Array:
    """Mean of a column, or of several at once, in each replicate.

    Args:
        column: Values of shape ``(n,)``, or ``(n, C)`` for C columns. An infinite one or a NaN
            spoils the replicates that draw it, and no others.
        weights: Of shape ``(R, n)``.

    Returns:
        Means of shape ``(R,)`` or ``(R, C)``.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.bootstrap import mean_replicates
        >>> mean_replicates(np.array([1.0, 2.0, 6.0]), np.array([[1, 1, 1], [0, 3, 0]], np.float32))
        array([3., 2.])
    """
    means = np.empty((len(weights), *column.shape[1:]))
    finite = np.isfinite(column)
    clean, spoiling = np.where(finite, column, 0.0), np.where(finite, 0.0, column).sum(0)
    step = max(1, _BUDGET // max(1, len(column)))
    for start in range(0, len(weights), step):
        part = weights[start : start + step].astype(np.float64)
        total = part.sum(1).reshape(-1, *[1] * (column.ndim - 1))
        mean = (part @ clean) / total
        if not finite.all():  # a weight of 0 times infinity would be NaN
            mean = np.where(part @ ~finite > 0, spoiling, mean)
        means[start : start + step] = mean
    return means


def percentile_interval(values: Array, level: float = 0.95) -> tuple[float, float]:
    """Quantiles of the replicates that hold ``level`` of them in the middle.

    Replicates in which the number is not defined (NaN) are left out; NaN if it never is.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.bootstrap import percentile_interval
        >>> percentile_interval(np.arange(101.0), level=0.5)
        (25.0, 75.0)
    """
    known = values[~np.isnan(values)]
    if len(known) == 0:
        return float("nan"), float("nan")
    # One of the replicates and not a point between two, because infinite ones have no middle.
    ends = np.quantile(known, [(1 - level) / 2, (1 + level) / 2], method="nearest")
    return float(ends[0]), float(ends[1])


def basic_interval(estimate: float, values: Array, level: float = 0.95) -> tuple[float, float]:
    """Interval of a distance >= 0 that noise inflates, such as a calibration error.

    It is 0 at the lower end where all of the estimate may be noise, and always holds the estimate.

    Args:
        estimate: The number on all rows.
        values: Its replicates, ``(R,)``; undefined ones (NaN) are left out.
        level: Share of data sets whose interval is to hold the truth.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.bootstrap import basic_interval
        >>> basic_interval(2.5, np.linspace(2.0, 4.0, 101), level=0.5)  # the middle: 2.5 to 3.5
        (0.5, 3.0)
        >>> basic_interval(2.0, np.linspace(2.0, 4.0, 101), level=0.5)
        (0.0, 2.5)
    """
    _, high = percentile_interval(values, level)
    if np.isnan(high) or np.isnan(estimate):
        return float("nan"), float("nan")
    lower = max(0.0, 2 * estimate**2 - high**2) ** 0.5
    return min(lower, estimate), float(estimate + (high - np.nanmedian(values)))


def paired_difference_is_clear(
    best: Array, other: Array, level: float = 0.95, distances: tuple[float, float] | None = None
) -> bool:
    r"""Whether two numbers differ in one direction in ``level`` of the replicates.

    Both must come from the same weights. The difference of two models on the same examples varies
    far less than either number, so that overlapping intervals do not mean a tie.

    Distances >= 0 are inflated by noise, such as calibration errors. The noise adds :math:`c` to
    the squared distance of the data and again to that of a replicate, and more of it for one model
    than for the other. So the differences :math:`d = a^2 - b^2` of the replicates are reflected at
    that of the data, :math:`d_0`, and it is clear where 0 is not in the interval from
    :math:`2 d_0 - q_{(1+\text{level})/2}` to :math:`2 d_0 - q_{(1-\text{level})/2}`.

    Args:
        best: Replicates of the one, ``(R,)``.
        other: Replicates of the other, from the same weights.
        level: Of the interval.
        distances: Both numbers on all rows, if they are distances.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.bootstrap import paired_difference_is_clear
        >>> noise = np.random.default_rng(0).normal(size=1000)
        >>> paired_difference_is_clear(noise, noise + 0.1)
        True
        >>> paired_difference_is_clear(noise, noise[::-1] + 0.1)
        False
        >>> noisy = np.linspace(0.04, 0.06, 101)  # an estimate of 0.03 that is all noise
        >>> paired_difference_is_clear(np.zeros(101), noisy, distances=(0.0, 0.03))
        False
    """
    power, reflected = 1, 0.0
    if distances is not None:
        power, reflected = 2, 2 * (distances[0] ** 2 - distances[1] ** 2)
    with np.errstate(invalid="ignore"):  # both infinite: NaN, which counts for neither
        lower, upper = percentile_interval(best**power - other**power, level)
    return reflected - upper > 0 or reflected - lower < 0
