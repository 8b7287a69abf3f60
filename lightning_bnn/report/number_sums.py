r"""What a report sums up exactly over all rows of a regression, however many there are.

A row lies in the central interval of level L where :math:`|2u - 1| \le L`, with u its PIT; and
:math:`z = \Phi^{-1}(u)` is standard normal where the predictive is true.
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtri

from lightning_bnn.calibration.clusters import ClusterSums, cluster_sums
from lightning_bnn.report.rows import Array, Rows

__all__ = ["LEVELS", "MEANS", "NumberSums", "normal_scores"]

MEANS = ("error", "squared_error", "nll", "crps", "sd", "aleatoric", "epistemic", "z", "z_squared")
# Nominal levels of the coverage curve.
LEVELS = np.array([*(percent / 100 for percent in range(5, 100, 5)), 0.99])
# A PIT this close to 0 or 1 is rounded off: 8.2 standard deviations, the same on both sides.
_SMALLEST = 2.0**-53


def normal_scores(pit: Array, deviation: Array, sd: Array) -> Array:
    """The standard normal quantile of each PIT.

    Beyond 8.2 standard deviations the PIT is 0 or 1 in float64. There it is the deviation in units
    of the sd, which is the same for a Gaussian.

    Args:
        pit: Of shape (n,).
        deviation: Target minus predicted mean, (n,).
        sd: Predicted standard deviations, (n,).

    Example:
        >>> normal_scores(np.array([0.0, 0.5, 1.0]), np.array([-40.0, 0.0, 9.0]), np.ones(3))
        array([-40.,   0.,   9.])
    """
    scores: Array = ndtri(np.clip(pit, _SMALLEST, 1 - _SMALLEST))
    far = (pit <= _SMALLEST) | (pit >= 1 - _SMALLEST)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.abs(deviation[far] / sd[far])
    scores[far] = np.copysign(np.fmax(steps, np.abs(scores[far])), scores[far])
    return scores


class NumberSums:
    """Sums over the rows of a regression; those of two processes are added.

    Args:
        bins: Number of bins of the PIT histogram.

    Attributes:
        count: Number of rows.
        bias: Sums of powers of the examples' sums of z.
        spread: The same of z² - 1.
        sums: The sum of each column of MEANS; the error is mean - target.
        pit: Rows in each bin of the PIT, (bins,).
        central: Rows within the central interval of each of LEVELS.
    """

    def __init__(self, bins: int) -> None:
        self.count = 0
        self.bias = ClusterSums()
        self.spread = ClusterSums()
        self.sums = dict.fromkeys(MEANS, 0.0)
        self.pit = np.zeros(bins)
        self.central = np.zeros(len(LEVELS))

    def add(self, rows: Rows) -> None:
        """Add the rows of a batch."""
        columns = dict(rows.columns)
        pit = columns["pit"]
        columns["error"] = columns["mean"] - columns["target"]
        columns["squared_error"] = columns["error"] ** 2
        columns["z"] = normal_scores(pit, -columns["error"], columns["sd"])
        columns["z_squared"] = columns["z"] ** 2
        self.count += len(rows)
        # An example comes with all of its rows in one batch.
        self.bias += cluster_sums(rows.example, columns["z"])
        self.spread += cluster_sums(rows.example, columns["z_squared"] - 1)
        for name in MEANS:
            self.sums[name] += float(columns[name].sum())
        index = np.minimum((pit * len(self.pit)).astype(np.int64), len(self.pit) - 1)
        self.pit += np.bincount(index, minlength=len(self.pit))
        self.central += (np.abs(2 * pit - 1)[:, None] <= LEVELS).sum(0)

    def merge(self, other: NumberSums) -> None:
        """Add the sums of other rows."""
        self.count += other.count
        self.bias += other.bias
        self.spread += other.spread
        for name in MEANS:
            self.sums[name] += other.sums[name]
        self.pit += other.pit
        self.central += other.central

    def mean(self, name: str) -> float:
        """The mean of a column over all rows."""
        return self.sums[name] / self.count
