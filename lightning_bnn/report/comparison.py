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
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_bnn.calibration.bootstrap import (
    basic_interval,
    paired_difference_is_clear,
    percentile_interval,
    replicates,
    resample_weights,
)
from lightning_bnn.calibration.separation import auroc_replicates
from lightning_bnn.errors import DataError
from lightning_bnn.report.sample import Array, Sample
from lightning_bnn.report.sections.shift import as_ood_score
from lightning_bnn.report.statistics import Statistics

__all__ = ["LEVEL", "CommonRows", "common_rows", "comparison"]

LEVEL = 0.95
# Rows that the bootstrap draws from: of more, a uniform sample, with intervals wider accordingly.
MOST_ROWS = 50_000


@dataclass(frozen=True)
class CommonRows:
    """The rows of a comparison.

    Attributes:
        priority: Their priorities, which name them, in the order of the examples.
        example: Their examples.
        complete: Whether no row is missing because a model's prediction of it was not finite, so
            that values over all rows are values over the same rows.
    """

    priority: Array
    example: Array
    complete: bool

    def chosen(self, sample: Sample) -> Array:
        """Which rows of a sample are these."""
        return np.isin(sample["priority"], self.priority)


def common_rows(models: Mapping[str, Statistics], most: int) -> CommonRows:
    """The rows valid in all models, at most ``most`` of them.

    Raises:
        DataError: The models did not see the same examples and targets, or have no row in common.
    """
    (first, one), *others = models.items()
    common = one.kept["priority"]
    for name, other in others:
        if one.examples != other.examples:
            raise DataError(
                f"models are compared on the same examples: {first!r} was given {one.examples} "
                f"examples and {name!r} {other.examples}. Predict the same data with each."
            )
        common = common[np.isin(common, other.kept["priority"])]
    if not len(common):
        raise DataError(
            f"no example has a finite prediction of every model ({', '.join(models)}). Leave out "
            "the model whose predictions are not finite."
        )
    common = common[np.sort(np.argsort(common)[:most])]
    chosen = np.isin(one.kept["priority"], common)
    complete = all(np.array_equal(one.invalid, other.invalid) for _, other in others)
    rows = CommonRows(common, one.kept.example[chosen], complete)
    expected = one.kept["target"][chosen]
    for name, other in others:
        target = other.kept["target"][rows.chosen(other.kept)]
        if not np.array_equal(target, expected):
            row = int(np.flatnonzero(target != expected)[0])
            raise DataError(
                f"models are compared on the same targets: in a row {first!r} was given "
                f"{expected[row]} and {name!r} {target[row]}. Predict the same data with each, in "
                "the same order (shuffle=False)."
            )
    return rows


def comparison(
    models: Mapping[str, Statistics], blocks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The table of the document.

    Args:
        models: The models' statistics, on the same examples.
        blocks: Their blocks, in the same order, with the values over all rows.

    Raises:
        DataError: The models were not judged on the same examples and targets.
    """
    rows = common_rows(models, MOST_ROWS)
    number = replicates(len(rows.example))
    # The first row of weights is the data as they are, so that all numbers come with an estimate.
    weights = np.ones((number + 1, len(rows.example)), np.float32)
    weights[1:] = resample_weights(rows.example, number)
    found = [
        model.sums.replicated(model, block, rows, weights)
        for model, block in zip(models.values(), blocks, strict=True)
    ]
    exact = [_exact(block) if rows.complete else {} for block in blocks]
    sums = next(iter(models.values())).sums
    scores = list(sums.scores)
    for loader in dict.fromkeys(loader for model in models.values() for loader in model.ood):
        for score in sums.ood:
            if score == "maximum_probability":  # ranks nearly as the entropy does
                continue
            key, label = f"auroc_{score}:{loader}", score.replace("_", " ")
            scores.append((key, f"{loader}: AUROC by {label}", "higher", None))
            for model, values in zip(models.values(), found, strict=True):
                values[key] = _areas(model, loader, score, rows, weights)
    return {
        "level": LEVEL,
        "replicates": number,
        "examples": len(np.unique(rows.example)),
        "complete": rows.complete,
        "columns": list(models),
        "rows": [
            _row(key, label, better, aim, [f[key] for f in found], [e.get(key) for e in exact])
            for key, label, better, aim in scores
        ],
    }


def _exact(block: Mapping[str, Any]) -> dict[str, float]:
    """What is known over all rows, and not only over those of the bootstrap."""
    values = dict(block["scalars"])
    if "temperature" in block:
        values |= {f"scaled_{name}": v for name, v in block["temperature"]["after"].items()}
    for loader, shift in block["shift"].items():
        values |= {f"auroc_{score}:{loader}": by["auroc"] for score, by in shift["by"].items()}
    return values


def _areas(model: Statistics, loader: str, score: str, rows: CommonRows, weights: Array) -> Array:
    ood = model.ood.get(loader)
    if ood is None or not len(ood.sample) or not ood.has(score, model.draws):
        return np.full(len(weights), np.nan)
    kept = np.sort(np.argsort(ood.sample["priority"])[:MOST_ROWS])
    other = np.ones((len(weights), len(kept)), np.float32)
    other[1:] = resample_weights(ood.sample.example[kept], len(weights) - 1, seed=1)
    inside = as_ood_score(score, model.scores(score)[rows.chosen(model.sample)])
    return auroc_replicates(inside, as_ood_score(score, ood.scores(score)[kept]), weights, other)


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
        sample = repeated[1:] + offset
        if key.endswith("ece"):
            lower, upper = basic_interval(value, sample, LEVEL)
        else:
            lower, upper = percentile_interval(sample, LEVEL)
        samples.append(sample)
        values.append(
            {"value": value, "lower": lower, "upper": upper, "best": False, "tied": False}
        )
    if better is not None:
        sign = -1.0 if better == "higher" else 1.0
        losses = [
            sign * each if aim is None else np.abs(each - aim)
            for each in (np.array([entry["value"] for entry in values]), *samples)
        ]
        _mark(values, losses[0], losses[1:], key.endswith("ece"))
    return {"key": key, "label": label, "better": better, "aim": aim, "values": values}


def _mark(
    values: list[dict[str, Any]], losses: Array, samples: Sequence[Array], distance: bool
) -> None:
    """Mark the best values, all that equal the smallest loss, and those not clearly worse."""
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
        distances = (losses[best], losses[other]) if distance else None
        clear = paired_difference_is_clear(samples[best], samples[other], level, distances)
        values[other]["tied"] = not clear
