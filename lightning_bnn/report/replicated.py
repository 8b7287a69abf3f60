"""Each number of the comparison in every replicate of the bootstrap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.sparse import csr_array

from lightning_bnn.calibration.bins import bin_index, mass_edges, width_edges
from lightning_bnn.calibration.bootstrap import mean_replicates
from lightning_bnn.calibration.error import expected_calibration_errors
from lightning_bnn.calibration.selective import aurc_replicates
from lightning_bnn.calibration.temperature import apply_temperature, cross_fitted
from lightning_bnn.report.common_rows import CommonRows, chosen_rows
from lightning_bnn.report.rows import Array
from lightning_bnn.report.statistics import Statistics

__all__ = ["classwise_replicates", "replicated"]

# Multiplications that the classwise error of all replicates may take, and its fewest replicates.
CLASSWISE_WORK = 400_000_000
CLASSWISE_REPLICATES = 100


def replicated(
    statistics: Statistics, block: Mapping[str, Any], rows: CommonRows, weights: Array
) -> dict[str, Array]:
    """Each number in every replicate.

    Args:
        statistics: Of the model.
        block: The model's numbers, of which the temperature is used.
        rows: The rows of the comparison.
        weights: How often each row was drawn, (R, n).

    Returns:
        Arrays of shape (R,) by the comparison's keys.
    """
    if statistics.task == "classes":
        return _classes(statistics, block, rows, weights)
    return _numbers(statistics, rows, weights)


def _classes(
    statistics: Statistics, block: Mapping[str, Any], rows: CommonRows, weights: Array
) -> dict[str, Array]:
    sample, matrix = statistics.sample, statistics.matrix
    assert matrix is not None
    chosen = chosen_rows(sample, rows.priority)
    names = ("correct", "nll", "brier", "confidence")
    correct, nll, brier, confidence = (sample[name][chosen] for name in names)
    chosen = chosen_rows(matrix, rows.priority)
    log_p, target = matrix["log_probabilities"][chosen], matrix["target"][chosen]
    temperature = block["temperature"]
    if temperature["fitted_on"] == "validation":
        each: Array = np.full(len(target), temperature["value"])
    else:
        each = cross_fitted(log_p, target, rows.example)
    if np.isfinite(each).all():
        cooled = apply_temperature(log_p, each)
        scaled_nll = -np.take_along_axis(cooled, target[:, None], 1)[:, 0]
        scaled_confidence = np.exp(cooled.max(1))
    else:  # nothing to fit a temperature on
        scaled_nll = scaled_confidence = np.full(len(target), np.nan)
    means = mean_replicates(np.stack([correct, brier], 1), weights)
    edges = width_edges(statistics.bins)
    by_mass = mass_edges(confidence, statistics.bins)
    return {
        "accuracy": means[:, 0],
        "nll": _means_with_infinity(nll, weights),
        "brier": means[:, 1],
        "ece": expected_calibration_errors(confidence, correct, edges, weights),
        "adaptive_ece": expected_calibration_errors(confidence, correct, by_mass, weights),
        "classwise_ece": classwise_replicates(np.exp(log_p), target, edges, weights),
        "aurc": aurc_replicates(confidence, 1.0 - correct, weights),
        "scaled_nll": _means_with_infinity(scaled_nll, weights),
        "scaled_ece": expected_calibration_errors(scaled_confidence, correct, edges, weights),
    }


def _means_with_infinity(column: Array, weights: Array) -> Array:
    """Means in which a row that was not drawn counts 0 even if it is infinite."""
    endless = np.isinf(column)
    means = mean_replicates(np.where(endless, 0.0, column), weights)
    if endless.any():
        means = np.where((weights[:, endless] > 0).any(1), np.inf, means)
    return means


def classwise_replicates(
    probabilities: Array, target: Array, edges: Array, weights: Array
) -> Array:
    """The mean over the classes of each one's calibration error, in every replicate.

    With many classes only the first replicates are computed and the others are NaN, so that the
    work is bounded.

    Example:
        >>> probabilities = np.array([[0.8, 0.2], [0.6, 0.4]])
        >>> weights = np.ones((1, 2))
        >>> classwise_replicates(probabilities, np.array([0, 1]), np.array([0.0, 1.0]), weights)
        array([0.2])
    """
    count, classes = probabilities.shape
    most = max(CLASSWISE_REPLICATES, CLASSWISE_WORK // probabilities.size)
    used = weights[:most]
    bins = len(edges) - 1
    gaps = probabilities.copy()
    gaps[np.arange(count), target] -= 1.0
    column = bin_index(probabilities, edges) + np.arange(classes) * bins
    # One row of the sparse matrix a row of data: its gap in one bin of every class.
    start = np.arange(0, probabilities.size + 1, classes)
    sparse = csr_array((gaps.ravel(), column.ravel(), start), shape=(count, classes * bins))
    totals = np.abs(sparse.T @ used.T.astype(np.float64)).sum(0)
    errors = np.full(len(weights), np.nan)
    errors[: len(used)] = totals / used.sum(1, dtype=np.float64) / classes
    return errors


def _numbers(statistics: Statistics, rows: CommonRows, weights: Array) -> dict[str, Array]:
    sample = statistics.sample
    chosen = chosen_rows(sample, rows.priority)
    names = ("mean", "target", "nll", "crps", "pit", "sd")
    mean, target, nll, crps, pit, sd = (sample[name][chosen] for name in names)
    covered = np.abs(2 * pit - 1) <= 0.9
    means = mean_replicates(np.stack([(mean - target) ** 2, nll, crps, covered, sd], 1), weights)
    return {
        "rmse": np.sqrt(means[:, 0]),
        "nll": means[:, 1],
        "crps": means[:, 2],
        "coverage_90": means[:, 3],
        "sharpness": means[:, 4],
    }
