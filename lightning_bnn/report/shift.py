"""How far each uncertainty score tells data from elsewhere from the model's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_bnn.calibration.separation import separation
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.report.outside import Outside
from lightning_bnn.report.rows import Array
from lightning_bnn.report.statistics import Statistics

__all__ = ["foreignness", "shift_numbers"]

HISTOGRAM_BINS = 30


def foreignness(score: str, values: Array) -> Array:
    """A score turned so that larger is more foreign: a large maximum probability is not."""
    return 1.0 - values if score == "maximum_probability" else values


def _edges(score: str, classes: int | None, inside: Array, outside: Array) -> Array:
    if score == "entropy":
        return np.linspace(0.0, math.log(classes or 2), HISTOGRAM_BINS + 1)
    if score == "maximum_probability":
        return np.linspace(1.0 / (classes or 2), 1.0, HISTOGRAM_BINS + 1)
    # Few very large values would press all others into one bar: they go into the last one.
    highest = max(float(np.quantile(side, 0.99)) for side in (inside, outside) if len(side))
    return np.linspace(0.0, max(highest, 1e-12), HISTOGRAM_BINS + 1)


def _shares(values: Array, edges: Array) -> Array:
    counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
    return counts / max(1, len(values))


def shift_numbers(statistics: Statistics, outside: Mapping[str, Outside]) -> dict[str, Any]:
    """The shift part of a model's block.

    Args:
        statistics: The model on its own data.
        outside: The model on each loader.

    Raises:
        ConfigurationError: A loader was predicted as another task or number of classes.
    """
    numbers: dict[str, Any] = {}
    for loader, foreign in outside.items():
        if (foreign.task, foreign.classes) != (statistics.task, statistics.classes):
            raise ConfigurationError(
                f"the out-of-distribution loader {loader!r} was predicted as {foreign.task} "
                f"(classes: {foreign.classes}), the data as {statistics.task} (classes: "
                f"{statistics.classes}). Predict both with the same posterior; a loader without "
                "batches cannot be used."
            )
        scores = {}
        for score, inside in foreign.inside_scores(statistics.sample).items():
            if not foreign.has_scores(score, statistics.draws):
                continue
            values = foreign.scores(score)
            edges = _edges(score, statistics.classes, inside, values)
            scores[score] = {
                **separation(foreignness(score, inside), foreignness(score, values)),
                "edges": edges,
                "inside": _shares(inside, edges),
                "outside": _shares(values, edges),
            }
        numbers[loader] = {
            "examples": foreign.examples,
            "invalid": foreign.invalid,
            "by": scores,
        }
    return numbers
