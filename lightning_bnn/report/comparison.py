"""Several models side by side, with bootstrap intervals and the best of each row.

All models are judged on the same examples, and a replicate of the bootstrap draws the same examples
for all of them. So a difference between two models is judged by its own replicates, which vary far
less than each number by itself: a model is *tied* with the best one where the 95 percent interval
of their difference holds 0. Which one is the best is seen from the same data, so that with m models
any of the m (m - 1) / 2 pairs may be compared: each interval has the level 1 - 0.1 / (m (m - 1)),
and all of them hold together (Bonferroni).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lightning_bnn.calibration.bootstrap import (
    basic_interval,
    paired_difference_is_clear,
    paired_distance_is_clear,
    percentile_interval,
    replicates,
    resample_weights,
)
from lightning_bnn.calibration.separation import auroc_replicates
from lightning_bnn.report.common_rows import chosen_rows, common_rows
from lightning_bnn.report.outside import Outside
from lightning_bnn.report.replicated import replicated
from lightning_bnn.report.rows import Array
from lightning_bnn.report.shift import foreignness
from lightning_bnn.report.statistics import Statistics

__all__ = ["LEVEL", "comparison"]

LEVEL = 0.95
# Rows that the bootstrap draws from: of more, a uniform sample, with intervals wider accordingly.
MOST_ROWS = 50_000
# Key, label, which is better, aim.
CLASS_ROWS = (
    ("accuracy", "Accuracy", "higher", None),
    ("nll", "NLL", "lower", None),
    ("brier", "Brier score", "lower", None),
    ("ece", "ECE", "lower", None),
    ("adaptive_ece", "Adaptive ECE", "lower", None),
    ("classwise_ece", "Classwise ECE", "lower", None),
    ("aurc", "AURC", "lower", None),
    ("scaled_nll", "NLL after temperature scaling", "lower", None),
    ("scaled_ece", "ECE after temperature scaling", "lower", None),
)
NUMBER_ROWS = (
    ("rmse", "RMSE", "lower", None),
    ("nll", "NLL", "lower", None),
    ("crps", "CRPS", "lower", None),
    ("coverage_90", "Coverage of the 90% interval", "near", 0.9),
    ("sharpness", "Sharpness (mean sd)", None, None),
)
SHIFT_SCORES = {
    "classes": {"entropy": "entropy", "mutual_information": "mutual information"},
    "numbers": {"sd": "sd", "epistemic_sd": "epistemic sd"},
}


def comparison(
    models: Mapping[str, Statistics],
    blocks: Sequence[Mapping[str, Any]],
    outside: Mapping[str, Mapping[str, Outside]],
) -> dict[str, Any]:
    """The table of the document.

    Args:
        models: The models' statistics, on the same examples.
        blocks: Their blocks, in the same order, with the values over all rows.
        outside: By model and loader, the scores on foreign data.

    Raises:
        DataError: The models were not judged on the same examples and targets.
    """
    statistics = list(models.values())
    rows = common_rows(models, MOST_ROWS)
    task = str(statistics[0].task)
    count = replicates(len(rows.example))
    # The first row of weights is the data as they are, so that all numbers come with an estimate.
    weights = np.ones((count + 1, len(rows.example)), np.float32)
    weights[1:] = resample_weights(rows.example, count)
    found = [
        replicated(model, block, rows, weights)
        for model, block in zip(statistics, blocks, strict=True)
    ]
    exact = [_exact(block) if rows.complete else {} for block in blocks]
    table = CLASS_ROWS if task == "classes" else NUMBER_ROWS
    listed = [
        _row(key, label, better, aim, [f[key] for f in found], [e.get(key) for e in exact])
        for key, label, better, aim in table
    ]
    loaders = list(dict.fromkeys(loader for scores in outside.values() for loader in scores))
    for loader in loaders:
        for score, label in SHIFT_SCORES[task].items():
            areas = [
                _areas(model, outside.get(name, {}).get(loader), score, rows, weights)
                for name, model in models.items()
            ]
            title = f"{loader}: AUROC by {label}"
            known = [
                _known_area(block, loader, score) if rows.complete else None for block in blocks
            ]
            listed.append(_row(f"auroc_{score}:{loader}", title, "higher", None, areas, known))
    return {
        "level": LEVEL,
        "replicates": count,
        "examples": len(np.unique(rows.example)),
        "complete": rows.complete,
        "columns": list(models),
        "rows": listed,
    }


def _exact(block: Mapping[str, Any]) -> dict[str, float]:
    """What is known over all rows, and not only over those of the bootstrap."""
    values = dict(block["scalars"])
    if "temperature" in block:
        values |= {f"scaled_{name}": v for name, v in block["temperature"]["after"].items()}
    return values


def _known_area(block: Mapping[str, Any], loader: str, score: str) -> float | None:
    found = block["shift"].get(loader)
    return float(found["by"][score]["auroc"]) if found and score in found["by"] else None


def _areas(
    model: Statistics, foreign: Outside | None, score: str, rows: Any, weights: Array
) -> Array:
    if foreign is None or not foreign.has_scores(score, model.draws):
        return np.full(len(weights), np.nan)
    inside = foreign.inside_scores(model.sample)[score][chosen_rows(model.sample, rows.priority)]
    kept = np.sort(np.argsort(foreign.scores("priority"))[:MOST_ROWS])
    other = np.ones((len(weights), len(kept)), np.float32)
    if len(kept):
        other[1:] = resample_weights(foreign.sample.example[kept], len(weights) - 1, seed=1)
    values = foreign.scores(score)[kept]
    return auroc_replicates(foreignness(score, inside), foreignness(score, values), weights, other)


def _row(
    key: str,
    label: str,
    better: str | None,
    aim: float | None,
    found: Sequence[Array],
    exact: Sequence[float | None],
) -> dict[str, Any]:
    values, samples = [], []
    for repeated, known in zip(found, exact, strict=True):
        estimate = float(repeated[0])
        value = estimate if known is None else float(known)
        # Moved to the value over all rows, where the bootstrap had only some of them.
        offset = value - estimate if np.isfinite(value - estimate) else 0.0
        samples.append(repeated[1:] + offset)
        interval = basic_interval if key.endswith("ece") else _percentiles
        lower, upper = interval(value, samples[-1], LEVEL)
        values.append(
            {"value": value, "lower": lower, "upper": upper, "best": False, "tied": False}
        )
    _mark(values, samples, better, aim, key.endswith("ece"))
    return {"key": key, "label": label, "better": better, "aim": aim, "values": values}


def _percentiles(value: float, samples: Array, level: float) -> tuple[float, float]:
    return percentile_interval(samples, level)


def _mark(
    values: list[dict[str, Any]],
    samples: Sequence[Array],
    better: str | None,
    aim: float | None,
    distance: bool,
) -> None:
    """Mark the best values, all that equal the smallest loss, and those not clearly worse."""
    if better is None:
        return

    def loss(value: Any) -> Any:
        return np.abs(value - aim) if aim is not None else -value if better == "higher" else value

    losses = np.array([loss(entry["value"]) for entry in values], np.float64)
    judged = np.flatnonzero(~np.isnan(losses))
    if len(judged) < 2:
        return
    best = int(judged[np.argmin(losses[judged])])
    # Any pair may turn out as that of the best and another: all of them are right with LEVEL.
    level = 1 - (1 - LEVEL) / (len(judged) * (len(judged) - 1) / 2)
    for other in judged.tolist():
        equal = bool(np.isclose(losses[other], losses[best], rtol=1e-9, atol=0.0))
        values[other]["best"] = equal
        if equal or np.isinf(losses[other]):  # a target of probability 0 is no accident of the draw
            continue
        first, second = loss(samples[best]), loss(samples[other])
        if distance:
            estimates = float(losses[best]), float(losses[other])
            clear = paired_distance_is_clear(*estimates, first, second, level)
        else:
            clear = paired_difference_is_clear(first, second, level)
        values[other]["tied"] = not clear
