"""Everything that a report needs of one model on one data set, gathered batch by batch.

Sums in fixed bins are exact however many examples there are. What needs ranks or single rows is
made from a uniform sample of at most 200,000 rows (:mod:`lightning_bnn.report.sample`). So memory
is bounded, and what several processes gathered is merged into what one would have gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.predictive import Predictive
from lightning_bnn.report.classification import Classification
from lightning_bnn.report.regression import Regression
from lightning_bnn.report.rows import Array, Rows, make_rows, task_of
from lightning_bnn.report.sample import Sample
from lightning_bnn.report.sections import Section, default_sections

__all__ = ["EPISTEMIC_SCORES", "Collection", "OodScores", "Statistics"]

# Rows that a sample keeps, and numbers that the sample of probability vectors keeps: 80 MB, and
# twice that before it is cut.
KEEP_ROWS = 200_000
KEEP_NUMBERS = 10_000_000
EPISTEMIC_SCORES = ("mutual_information", "epistemic_sd")
TASKS: dict[str, Any] = {"classification": Classification, "regression": Regression}


class Statistics:
    """What one model predicted and what was observed.

    Args:
        bins: Number of bins of the reliability diagram, of the PIT and of the calibration errors.
        keep: The largest number of rows held.
        sections: Further parts of the page, of which copies are made.

    Attributes:
        task: "classification" or "regression"; None before the first batch, as are the others.
        classes: Number of classes, None for a regression.
        draws: Number of draws of the posterior.
        labels: Whether the classes are the two values of a yes-or-no label.
        counts: Whether the targets are counts.
        examples: Number of examples seen, the invalid ones included.
        sums: Exact sums over all rows (Classification or Regression).
        sample: The rows kept.
        kept: The rows of which everything is kept; for a classification those with
            their column "log_probabilities".
        sections: The parts of the page that the task has.
        ood: The scores on each out-of-distribution data set, by its name.
        validation: Predictions of other data, which the temperature is fitted on.

    Example:
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> statistics = Statistics(bins=5)
        >>> logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]])  # one draw, two examples
        >>> statistics.update(CategoricalPredictive(logits), torch.tensor([0, 0]))
        >>> statistics.task, statistics.rows, statistics.sums.mean("correct")
        ('classification', 2, 0.5)
    """

    def __init__(
        self, bins: int = 15, keep: int = KEEP_ROWS, sections: Sequence[Section] = ()
    ) -> None:
        if bins < 2:
            raise ConfigurationError(f"expected bins >= 2, got {bins}. The usual number is 15.")
        self.bins = bins
        self.keep = keep
        self.task: str | None = None
        self.classes: int | None = None
        self.draws: int | None = None
        self.labels = False
        self.counts = False
        self.examples = 0
        self._invalid: list[Array] = []
        self.sums: Any = None
        self.sample = self.kept = Sample(keep)
        self.sections: list[Section] = [copy.deepcopy(section) for section in sections]
        self.ood: dict[str, OodScores] = {}
        self.validation: Statistics | None = None

    @property
    def rows(self) -> int:
        """Number of rows: statements about valid examples."""
        return 0 if self.sums is None else int(self.sums.count)

    @property
    def invalid(self) -> Array:
        """The indices of the examples whose prediction is not finite, in ascending order."""
        return np.sort(np.concatenate([np.zeros(0, np.int64), *self._invalid]))

    def update(
        self,
        predictive: Predictive,
        targets: Tensor,
        example: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> None:
        """Add a batch.

        Args:
            predictive: Of B examples.
            targets: The observed targets.
            example: The examples' indices in the data set, (B,); None counts on.
            inputs: What the network was given. Pictures are shown for the most uncertain
                examples, one-dimensional inputs give the fit; others are not looked at.

        Raises:
            ConfigurationError: The predictive is of another task or number of classes than before.
            DataError: The targets do not fit the predictive.
        """
        rows = make_rows(predictive, targets, _indices(example, self, len(predictive)), inputs)
        classes = None if rows.log_probabilities is None else rows.log_probabilities.shape[1]
        if self.task is None:
            self._begin(rows.task, classes)
        if (self.task, self.classes) != (rows.task, classes):
            raise ConfigurationError(
                f"the batches so far were {_name(self.task, self.classes)}, this one is "
                f"{_name(rows.task, classes)}. Gather each model's predictions by themselves."
            )
        self.draws = predictive.draws
        self.labels = classes == 2 and rows.predictive.mean.ndim == rows.predictive.mode.ndim
        self.counts = getattr(predictive, "discrete", False)
        self.examples += len(predictive)
        self._add(rows)

    def _begin(self, task: str, classes: int | None) -> None:
        if classes is not None and classes < 2:
            raise ConfigurationError(
                f"a report of classes needs at least 2 of them, got {classes}. For one logit per "
                "example use the likelihood Bernoulli()."
            )
        self.task, self.classes = task, classes
        self.sums = TASKS[task](self.bins, *([] if classes is None else [classes]))
        if classes is not None:
            self.kept = Sample(max(1, min(self.keep, KEEP_NUMBERS // classes)))
        own = [section for section in self.sections if section.task in (None, task)]
        self.sections = sorted([*default_sections(task), *own], key=lambda each: each.order)

    def _add(self, rows: Rows) -> None:
        if len(rows.invalid):
            self._invalid.append(rows.invalid)
        self.sums.add(rows)
        columns = {name: rows.columns[name] for name in self.sums.columns}
        self.sample.add(rows.example, rows.position, columns)
        if rows.log_probabilities is not None:
            columns = {name: rows.columns[name] for name in ("target",)}
            columns["log_probabilities"] = rows.log_probabilities
            self.kept.add(rows.example, rows.position, columns)
        for section in self.sections:
            section.add(rows)

    def merge(self, other: Statistics) -> None:
        """Add what another process gathered on other examples of the same data.

        Raises:
            ConfigurationError: The two are of different tasks, classes or bins.
        """
        for name, scores in other.ood.items():
            self.ood.setdefault(name, OodScores(scores.sample.keep)).merge(scores)
        if self.validation is not None and other.validation is not None:
            self.validation.merge(other.validation)
        if other.task is None:
            return
        if self.task is None:
            self._begin(other.task, other.classes)
        mine = (self.task, self.classes, self.bins)
        if mine != (other.task, other.classes, other.bins):
            raise ConfigurationError(
                f"cannot merge statistics of {_name(self.task, self.classes)} in {self.bins} bins "
                f"with those of {_name(other.task, other.classes)} in {other.bins} bins."
            )
        self.draws, self.labels, self.counts = other.draws, other.labels, other.counts
        self.examples += other.examples
        self._invalid.extend(other._invalid)
        self.sums.merge(other.sums)
        self.sample.merge(other.sample)
        if self.kept is not self.sample:
            self.kept.merge(other.kept)
        for section, more in zip(self.sections, other.sections, strict=True):
            section.merge(more)


def _name(task: str | None, classes: int | None) -> str:
    return "a regression" if classes is None else f"a {task} of {classes} classes"


def _indices(example: Tensor | None, into: Statistics | OodScores, count: int) -> Array:
    if example is None:
        return np.arange(into.examples, into.examples + count)
    index: Array = example.detach().cpu().numpy().astype(np.int64).reshape(-1)
    if len(index) != count:
        raise DataError(
            f"expected one index for each of the {count} examples, got {len(index)}. "
            "Pass example= of shape (B,), or None to count on."
        )
    return index


class OodScores:
    """The scores of one model on one out-of-distribution data set; targets are not needed.

    Args:
        keep: The largest number of rows held; of more, a uniform sample.

    Attributes:
        task: "classification" or "regression", known after the first batch.
        classes: Number of classes, None for a regression.
        draws: The fewest draws of the posterior in a batch, None before the first.
        examples: Number of examples seen, the invalid ones included.
        invalid: Number of examples whose prediction is not finite.
        sample: Columns "entropy", "mutual_information" and "maximum_probability" for
            a classification, "sd" and "epistemic_sd" for a regression.

    Example:
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> scores = OodScores()
        >>> scores.update(CategoricalPredictive(torch.zeros(1, 5, 2)))
        >>> scores.examples, scores.sample["maximum_probability"]
        (5, array([0.5, 0.5, 0.5, 0.5, 0.5]))
    """

    def __init__(self, keep: int = KEEP_ROWS) -> None:
        self.task: str | None = None
        self.classes: int | None = None
        self.draws: int | None = None
        self.examples = 0
        self.invalid = 0
        self.sample = Sample(keep)

    def update(self, predictive: Predictive, example: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            predictive: Of B examples.
            example: Their indices, (B,) int64; None counts on.

        Raises:
            ConfigurationError: The predictive is of another task than the batches before.
        """
        task = task_of(predictive)
        self._check(task)
        index = _indices(example, self, len(predictive))
        with torch.no_grad():
            wide: Any = predictive.to("cpu", torch.float64)
            columns = TASKS[task].scores_of(wide, predictive.outputs.dtype)
            if task == "classification":
                self.classes = wide.log_probabilities.shape[1]
        self.draws = min(predictive.draws, self.draws or predictive.draws)
        self.examples += len(predictive)
        finite = np.logical_and.reduce([np.isfinite(column) for column in columns.values()])
        each = len(finite) // max(1, len(index))
        whole = finite.reshape(len(index), each).all(1)
        self.invalid += int((~whole).sum())
        valid = np.repeat(whole, each)
        position = np.tile(np.arange(each), len(index))[valid]
        kept = {name: column[valid] for name, column in columns.items()}
        self.sample.add(np.repeat(index, each)[valid], position, kept)

    def _check(self, task: str) -> None:
        if self.task not in (None, task):
            raise ConfigurationError(
                f"the out-of-distribution data so far were a {self.task}, these are a {task}. Use "
                "one posterior for all batches and in all processes."
            )
        self.task = task

    def merge(self, other: OodScores) -> None:
        """Add what another process gathered on other examples."""
        if other.task is None:
            return
        self._check(other.task)
        self.classes = other.classes
        self.draws = min(n for n in (self.draws, other.draws) if n is not None)
        self.examples += other.examples
        self.invalid += other.invalid
        self.sample.merge(other.sample)

    def scores(self, name: str) -> Array:
        """A score of the rows kept; none if no prediction was finite."""
        return self.sample[name] if len(self.sample) else np.zeros(0)

    def has(self, score: str, draws: int | None) -> bool:
        """Whether a score says something: of one draw, here or inside, nothing is epistemic."""
        return score not in EPISTEMIC_SCORES or 1 not in (self.draws, draws)


class Collection:
    """What a run gathers for one page: statistics of several models on one data set.

    Args:
        names: The models.
        bins: Bins of the reliability diagram.
        sections: Further parts of the page.

    Attributes:
        models: Statistics by model.
        failure: Why no page can be made of it; None if nothing went wrong.
        fewest: The fewest examples that one of the processes saw; once gathered.

    Example:
        >>> Collection(["net", "ensemble"]).examples
        0
    """

    def __init__(
        self, names: Sequence[str], bins: int = 15, sections: Sequence[Section] = ()
    ) -> None:
        self.models = {name: Statistics(bins=bins, sections=sections) for name in names}
        for statistics in self.models.values():
            statistics.validation = Statistics(bins=bins)
        self.failure: str | None = None
        self.fewest: int | None = None

    @property
    def validation(self) -> dict[str, Statistics]:
        """What the temperature is fitted on, by model."""
        return {name: model.validation for name, model in self.models.items() if model.validation}

    @property
    def examples(self) -> int:
        """How many examples were seen."""
        return next(iter(self.models.values())).examples

    @property
    def rows(self) -> int:
        """How many valid predictions every model has at least."""
        return min(statistics.rows for statistics in self.models.values())

    def gathered(self, world_size: int) -> Collection:
        """What all processes gathered, the same in each; every one of them has to ask."""
        if world_size == 1:
            return self
        parts: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(parts, self)
        whole: Collection = parts[0]
        whole.fewest = min(part.examples for part in parts)
        for part in parts[1:]:
            whole.failure = whole.failure or part.failure
            for name, statistics in whole.models.items():
                statistics.merge(part.models[name])
        return whole
