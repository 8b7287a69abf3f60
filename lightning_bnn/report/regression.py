r"""What a report knows of every regression: exact sums, scores, the verdict, their replicates.

A row lies in the central interval of level L where :math:`|2u - 1| \le L`, with u its PIT; and
:math:`z = \Phi^{-1}(u)` is standard normal where the predictive is true.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy.special import ndtri

from lightning_bnn.calibration.bins import outside_band
from lightning_bnn.calibration.bootstrap import mean_replicates
from lightning_bnn.calibration.clusters import ClusterSums, cluster_sums
from lightning_bnn.calibration.pit import pit_histogram
from lightning_bnn.calibration.verdict import (
    REGRESSION_BAND_LEVEL,
    regression_verdict,
    spread_by_sd,
)
from lightning_bnn.report.rows import Array, Rows, Sums

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["LEVELS", "SD_BINS", "Regression", "normal_scores", "widening"]

# Nominal levels of the coverage curve.
LEVELS = np.array([*(percent / 100 for percent in range(5, 100, 5)), 0.99])
SD_BINS = 10
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


def widening(scores: Array, level: float = 0.9) -> float:
    """The factor by which intervals must be widened for the central one to hold its level.

    It is exact where the predictive is Gaussian.

    Args:
        scores: The standard normal quantile of each PIT.
        level: Of the interval.

    Example:
        >>> round(widening(2 * ndtri(np.linspace(0, 1, 100_001)[1:-1])), 3)  # errors twice as large
        2.0
    """
    return float(np.quantile(np.abs(scores), level)) / float(ndtri((1 + level) / 2))


class Regression(Sums):
    """Sums over the rows of a regression.

    Args:
        bins: Number of bins of the PIT histogram.

    Attributes:
        bias: Sums of powers of the examples' sums of z.
        spread: The same of z² - 1.
        pit: Rows in each bin of the PIT, (bins,).
        central: Rows within the central interval of each of LEVELS.
    """

    # the error is mean - target
    means = (
        "error", "squared_error", "nll", "crps", "sd", "aleatoric", "epistemic", "z", "z_squared",
    )  # fmt: skip
    columns = ("target", "mean", "sd", "aleatoric", "epistemic", "epistemic_sd", "pit", "nll",
               "crps")  # fmt: skip
    scores = (
        ("rmse", "RMSE", "lower", None),
        ("nll", "NLL", "lower", None),
        ("crps", "CRPS", "lower", None),
        ("coverage_90", "Coverage of the 90% interval", "near", 0.9),
        ("sharpness", "Sharpness (mean sd)", None, None),
    )
    ood: ClassVar = {"sd": "sd", "epistemic_sd": "epistemic_sd"}

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bias = ClusterSums()
        self.spread = ClusterSums()
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
        self.add_columns(columns)
        # An example comes with all of its rows in one batch.
        self.bias += cluster_sums(rows.example, columns["z"])
        self.spread += cluster_sums(rows.example, columns["z_squared"] - 1)
        index = np.minimum((pit * len(self.pit)).astype(np.int64), len(self.pit) - 1)
        self.pit += np.bincount(index, minlength=len(self.pit))
        self.central += (np.abs(2 * pit - 1)[:, None] <= LEVELS).sum(0)

    def block(self, model: Statistics, risk: float) -> dict[str, Any]:
        """Verdict and scores of a model; ``risk`` is not used."""
        sample = model.sample
        scores = normal_scores(sample["pit"], sample["target"] - sample["mean"], sample["sd"])
        clustered = self.count > self.bias.examples
        histogram = pit_histogram(self.pit, level=REGRESSION_BAND_LEVEL)
        verdict = regression_verdict(
            self.total("z"),
            self.total("z_squared"),
            self.count,
            bool(outside_band(histogram["count"], histogram["lower"], histogram["upper"]).any()),
            ([], []) if clustered else spread_by_sd(sample["sd"], scores, SD_BINS),
            (self.bias, self.spread) if clustered else None,
        )
        variance = self.mean("aleatoric") + self.mean("epistemic")
        held = self.central[np.flatnonzero(LEVELS == 0.9)[0]]
        return {
            "verdict": asdict(verdict),
            "scalars": {
                "rmse": math.sqrt(self.mean("squared_error")),
                **{name: self.mean(name) for name in ("nll", "crps")},
                "coverage_90": float(held / self.count),
                "sharpness": self.mean("sd"),
                "epistemic_share": self.mean("epistemic") / variance if variance > 0 else math.nan,
                "bias": self.mean("error"),
                "mean_score": self.mean("z"),
                "widening_90": widening(scores),
            },
        }

    def replicated(
        self, model: Statistics, block: Mapping[str, Any], rows: Any, weights: Array
    ) -> dict[str, Array]:
        """Each score in every replicate of the bootstrap, (R,), by the keys of ``scores``."""
        chosen = rows.chosen(model.sample)
        names = ("mean", "target", "nll", "crps", "pit", "sd")
        mean, target, nll, crps, pit, sd = (model.sample[name][chosen] for name in names)
        covered = np.abs(2 * pit - 1) <= 0.9
        columns = np.stack([(mean - target) ** 2, nll, crps, covered, sd], 1)
        means = dict(
            zip((key for key, *_ in self.scores), mean_replicates(columns, weights).T, strict=True)
        )
        return means | {"rmse": np.sqrt(means["rmse"])}
