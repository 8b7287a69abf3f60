"""The rows on which several models can be compared: valid in all of them, and the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.report.rows import Array
from lightning_bnn.report.sample import Sample
from lightning_bnn.report.statistics import Statistics

__all__ = ["CommonRows", "check_same_task", "chosen_rows", "common_rows"]


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


def check_same_task(models: Mapping[str, Statistics]) -> None:
    """Raise a ConfigurationError unless all models are of one task, classes and bins."""
    (first, one), *others = models.items()
    for name, other in others:
        kinds = [(m.task, m.classes, m.bins) for m in (one, other)]
        if kinds[0] != kinds[1]:
            said = [f"{task} (classes: {classes}, bins: {bins})" for task, classes, bins in kinds]
            raise ConfigurationError(
                f"a report compares models of one task: {first!r} predicts {said[0]}, "
                f"{name!r} {said[1]}. Make a report of each by itself."
            )


def chosen_rows(sample: Sample, priority: Array) -> Array:
    """Which rows of a sample are the named ones."""
    if np.array_equal(sample["priority"], priority):
        return np.ones(len(priority), bool)
    return np.isin(sample["priority"], priority)


def common_rows(models: Mapping[str, Statistics], most: int) -> CommonRows:
    """The rows valid in all models, at most ``most`` of them.

    Raises:
        DataError: The models did not see the same examples and targets, or have no row in common.
    """
    (first, one), *others = models.items()
    complete = True
    common = one.kept["priority"]
    for name, other in others:
        if not _same_examples(one, other):
            raise DataError(
                f"models are compared on the same examples: {first!r} was given {one.examples} "
                f"examples with {one.rows} valid rows, {name!r} {other.examples} with "
                f"{other.rows}, or others. Predict the same data with each."
            )
        if not np.array_equal(one.invalid, other.invalid):
            complete = False
        if not np.array_equal(common, other.kept["priority"]):
            common = common[np.isin(common, other.kept["priority"])]
    if not len(common):
        raise DataError(
            f"no example has a finite prediction of every model ({', '.join(models)}). Leave out "
            "the model whose predictions are not finite."
        )
    if len(common) > most:
        common = common[np.sort(np.argpartition(common, most)[:most])]
    targets = [m.kept["target"][chosen_rows(m.kept, common)] for m in models.values()]
    for name, target in zip(models, targets, strict=True):
        if not np.array_equal(target, targets[0]):
            row = int(np.flatnonzero(target != targets[0])[0])
            raise DataError(
                f"models are compared on the same targets: in a row {first!r} was given "
                f"{targets[0][row]} and {name!r} {target[row]}. Predict the same data with each, "
                "in the same order (shuffle=False)."
            )
    example = one.kept.example[chosen_rows(one.kept, common)]
    return CommonRows(common, example, complete)


def _same_examples(one: Statistics, other: Statistics) -> bool:
    if one.examples != other.examples:
        return False
    if np.array_equal(one.kept["priority"], other.kept["priority"]):
        return True
    if max(one.rows, other.rows) > min(len(one.kept), len(other.kept)):
        return True  # only a sample of each is known, and invalid examples change it
    seen = [np.union1d(m.kept.example, m.invalid) for m in (one, other)]
    return np.array_equal(seen[0], seen[1])
