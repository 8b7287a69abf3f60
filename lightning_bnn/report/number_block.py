"""The numbers of one model in a report of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import ndtri

from lightning_bnn.calibration.bins import bin_index, mass_edges
from lightning_bnn.calibration.pit import coverage_curve, error_by_sd, pit_histogram
from lightning_bnn.calibration.verdict import (
    REGRESSION_BAND_LEVEL,
    regression_verdict,
    spread_by_sd,
)
from lightning_bnn.report.number_sums import LEVELS, NumberSums, normal_scores
from lightning_bnn.report.outside import Outside
from lightning_bnn.report.sample import Sample
from lightning_bnn.report.shift import shift_numbers
from lightning_bnn.report.statistics import FIT_LEVEL, Statistics

__all__ = ["number_block", "widening"]

SD_BINS = 10
SCATTER_ROWS = 1000


def widening(scores: Any, level: float = 0.9) -> float:
    """The factor by which intervals must be widened for the central one to hold its level.

    It is exact where the predictive is Gaussian.

    Args:
        scores: The standard normal quantile of each PIT.
        level: Of the interval.

    Example:
        >>> round(widening(2 * ndtri(np.linspace(0, 1, 100_001)[1:-1])), 3)  # errors twice as large
        2.0
    """
    reached = float(np.quantile(np.abs(scores), level))
    return reached / float(ndtri((1 + level) / 2))


def number_block(
    name: str, statistics: Statistics, outside: Mapping[str, Outside]
) -> dict[str, Any]:
    """The numbers of one model.

    Args:
        name: The model's.
        statistics: What it said and what came.
        outside: Its scores on each out-of-distribution loader.
    """
    sums: NumberSums = statistics.sums
    sample = statistics.sample
    error = sample["mean"] - sample["target"]
    scores = normal_scores(sample["pit"], -error, sample["sd"])
    clustered = sums.count > sums.bias.examples
    verdict = regression_verdict(
        sums.sums["z"],
        sums.sums["z_squared"],
        sums.count,
        pit_histogram(sums.pit, level=REGRESSION_BAND_LEVEL).outside,
        None if clustered else spread_by_sd(sample["sd"], scores, SD_BINS),
        (sums.bias, sums.spread) if clustered else None,
    )
    histogram = pit_histogram(sums.pit)
    coverage = coverage_curve(sums.central, LEVELS, sums.count)
    variance = sums.mean("aleatoric") + sums.mean("epistemic")
    scattered = np.sort(np.argsort(sample["priority"])[:SCATTER_ROWS])
    return {
        "name": name,
        "draws": statistics.draws,
        "verdict": {
            "label": verdict.label,
            "z": verdict.z,
            "p_value": verdict.p_value,
            "spread_outside": verdict.spread_outside,
            "clustered": verdict.clustered,
        },
        "invalid": {"count": len(statistics.invalid), "examples": statistics.invalid[:20]},
        "scalars": {
            "rmse": math.sqrt(sums.mean("squared_error")),
            "nll": sums.mean("nll"),
            "crps": sums.mean("crps"),
            "coverage_90": float(coverage.observed[np.flatnonzero(LEVELS == 0.9)[0]]),
            "sharpness": sums.mean("sd"),
            "epistemic_share": sums.mean("epistemic") / variance if variance > 0 else math.nan,
            "bias": sums.mean("error"),
            "mean_score": sums.mean("z"),
            "widening_90": widening(scores),
        },
        "pit": {
            "edges": histogram.edges,
            "count": histogram.count,
            "lower": histogram.lower,
            "upper": histogram.upper,
        },
        "coverage": {
            "nominal": coverage.nominal,
            "observed": coverage.observed,
            "lower": coverage.lower,
            "upper": coverage.upper,
        },
        "error_sd": error_by_sd(
            sample["sd"], error, SD_BINS, rate=sample["aleatoric"] if statistics.counts else None
        ),
        "uncertainty": _by_sd(sample),
        "scatter": {"sd": sample["sd"][scattered], "error": error[scattered]},
        "fit": _fit(statistics.fit),
        "shift": shift_numbers(statistics, outside),
    }


def _by_sd(sample: Sample) -> dict[str, Any]:
    """Mean variances in bins of the predicted standard deviation, each with as many rows."""
    sd = sample["sd"]
    index = np.unique(bin_index(sd, mass_edges(sd, SD_BINS)), return_inverse=True)[1]
    count = np.bincount(index)
    columns = {"sd": sd, "aleatoric": sample["aleatoric"], "epistemic": sample["epistemic"]}
    means = {name: np.bincount(index, column) / count for name, column in columns.items()}
    return {**means, "count": count}


def _fit(fit: Sample) -> dict[str, Any] | None:
    if not len(fit):
        return None
    order = np.argsort(fit["x"], kind="stable")
    names = ("x", "y", "mean", "lower", "upper", "epistemic_lower", "epistemic_upper")
    return {name: fit[name][order] for name in names} | {"level": FIT_LEVEL}
