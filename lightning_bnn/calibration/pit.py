r"""Whether the distributions of a regression hold what they promise: PIT, coverage, error by sd.

The probability integral transform of a target is its place in its own predictive distribution,
:math:`u_i = F_i(y_i)`. If the predictions are true the :math:`u_i` are uniform on [0, 1] (Dawid,
1984; Gneiting, Balabdaoui and Raftery, 2007): a histogram with the form of a U says that they are
too narrow, a hump that they are too wide, a slope that they are biased. A central interval of level
L holds the target exactly where :math:`|2u_i - 1| \le L`.

Each statistic comes with a band: where all of it lies with a probability of at least ``level`` if
the predictions are true. A count is binomial, and its band exact; a mean squared error is a sum of
:math:`\sigma_i^2\chi^2_1`, which is taken for the :math:`\chi^2` with the same mean and variance
(Satterthwaite, 1946), exact where the :math:`\sigma_i` are equal. With m bins or levels each one
gets the part :math:`(1 - \text{level})/m` of the chance of a false alarm (Bonferroni), so that the
bands err on the wide side.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv

from lightning_bnn.calibration.bins import Array, bin_index, binomial_band, mass_edges, width_edges

__all__ = ["coverage_curve", "error_by_sd", "pit_histogram"]


def pit_histogram(counts_per_bin: NDArray[np.number], level: float = 0.99) -> dict[str, Array]:
    """The histogram of the probability integral transform, with its band.

    Args:
        counts_per_bin: Counts in bins of equal width, ``(m,)``.
        level: Probability with which all bins lie inside of the band if the predictions are true.

    Returns:
        The ``"edges"`` of the bins, ``(m + 1,)``, and of each bin its ``"count"`` and the smallest
        and largest one inside of the band, ``"lower"`` and ``"upper"``.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.pit import pit_histogram
        >>> histogram = pit_histogram(np.array([140, 95, 91, 74]))
        >>> histogram["lower"], histogram["upper"]
        (array([75., 75., 75., 75.]), array([127., 127., 127., 127.]))
    """
    count = np.asarray(counts_per_bin, dtype=np.float64)
    share = np.full(len(count), 1 / len(count))
    trials = np.full(len(count), count.sum(), np.int64)
    lower, upper = binomial_band((1 - level) / len(count), trials, share)
    return {"edges": width_edges(len(count)), "count": count, "lower": lower, "upper": upper}


def coverage_curve(
    central_counts: NDArray[np.number], levels: Array, count: int, level: float = 0.99
) -> dict[str, Array]:
    """The observed against the nominal coverage, with its band.

    Args:
        central_counts: For each nominal level L the number of rows with ``|2 pit - 1| <= L``.
        levels: The nominal levels.
        count: Number of all rows.
        level: Probability with which the whole curve lies in the band if the predictions are true.

    Returns:
        The ``"nominal"`` levels, the ``"observed"`` shares of targets inside, and the smallest and
        largest share inside of the band, ``"lower"`` and ``"upper"``.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.pit import coverage_curve
        >>> curve = coverage_curve(np.array([55, 80]), np.array([0.5, 0.9]), count=100)
        >>> curve["observed"], curve["lower"], curve["upper"]
        (array([0.55, 0.8 ]), array([0.36, 0.81]), array([0.64, 0.97]))
    """
    nominal = np.asarray(levels, dtype=np.float64)
    trials = np.full(len(nominal), count, np.int64)
    lower, upper = binomial_band((1 - level) / len(nominal), trials, nominal)
    observed = np.asarray(central_counts, dtype=np.float64)
    shares = {"observed": observed, "lower": lower, "upper": upper}
    return {"nominal": nominal} | {name: each / trials for name, each in shares.items()}


def error_by_sd(
    sd: Array, error: Array, bins: int = 10, level: float = 0.99, rate: Array | None = None
) -> dict[str, Array]:
    r"""The error in bins of the predicted standard deviation, each with as many rows.

    The band is :math:`\bar\sigma \sqrt{\chi^2_\nu / \nu}` with :math:`\bar\sigma^2` the mean of the
    :math:`\sigma_i^2` of the bin and :math:`\nu = (\sum\sigma_i^2)^2 / \sum\sigma_i^4`. The squared
    error of a count of rate :math:`\lambda_i` has the variance :math:`2\sigma_i^4 + \lambda_i`, so
    that :math:`\nu` is smaller there: :math:`2(\sum\sigma_i^2)^2 / \sum(2\sigma_i^4 + \lambda_i)`.

    Args:
        sd: Predicted standard deviations, ``(n,)``.
        error: Target minus predicted mean, ``(n,)``.
        bins: Number of bins; fewer come back where many sd are equal.
        level: Probability with which all bins lie in the band if the errors are Gaussian (Poisson
            with ``rate``) and the sd true.
        rate: Mean rates of counts, ``(n,)``; None for Gaussian errors.

    Returns:
        Of each bin that is not empty ``"sd"`` (root mean square), ``"rmse"``, ``"count"``, and the
        band of the rmse, ``"lower"`` and ``"upper"``.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.pit import error_by_sd
        >>> sd, error = np.array([1.0, 1.0, 2.0, 2.0]), np.array([1.0, -1.0, 3.0, -1.0])
        >>> result = error_by_sd(sd, error, bins=2)
        >>> result["sd"], result["rmse"], result["count"]
        (array([1., 2.]), array([1.        , 2.23606798]), array([2., 2.]))
    """
    index = np.unique(bin_index(sd, mass_edges(sd, bins)), return_inverse=True)[1]
    count = np.bincount(index).astype(np.float64)
    total = np.bincount(index, weights=sd**2)
    squares = np.bincount(index, weights=sd**4 + (0 if rate is None else rate / 2))
    # A bin of certain predictions (sd = 0) has a band of no width, whatever the freedom.
    freedom = np.divide(total**2, squares, out=np.ones_like(total), where=squares > 0)
    mean_sd = np.sqrt(total / count)
    tail = (1 - level) / len(count) / 2
    lower, upper = (
        mean_sd * np.sqrt(2 * gammaincinv(freedom / 2, p) / freedom) for p in (tail, 1 - tail)
    )
    rmse = np.sqrt(np.bincount(index, weights=np.square(error)) / count)
    return {"sd": mean_sd, "rmse": rmse, "count": count, "lower": lower, "upper": upper}
