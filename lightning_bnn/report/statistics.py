"""Everything that a report needs of one model on one data set, gathered batch by batch.

Sums in fixed bins are exact however many examples there are. What needs ranks or single rows is
made from a uniform sample of at most 200,000 rows (:mod:`lightning_bnn.report.sample`). So memory
is bounded, and what several processes gathered is merged into what one would have gathered.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.predictive import Predictive
from lightning_bnn.report.classification import Classification
from lightning_bnn.report.regression import Regression
from lightning_bnn.report.rows import Array, Rows, make_rows
from lightning_bnn.report.sample import Sample
from lightning_bnn.report.sections import Section, default_sections

__all__ = ["Collection", "Statistics", "check_same_task"]

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
        draws: Number of draws of the posterior; the fewest in a batch.
        labels: Whether the classes are the two values of a yes-or-no label.
        counts: Whether the targets are counts.
        examples: Number of examples seen, the invalid ones included.
        invalid: The indices of the examples whose prediction is not finite, in ascending order.
        sums: Exact sums over all rows (Classification or Regression).
        sample: The rows kept; of data without targets the columns of the scores.
        kept: The rows of which everything is kept; for a classification those with
            their column "log_probabilities".
        sections: The parts of the page that the task has.
        ood: Those of out-of-distribution data, without targets, by the name of the data.
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
        self.invalid: Array = np.zeros(0, np.int64)
        self.sums: Any = None
        self.sample = self.kept = Sample(keep)
        self.sections: list[Section] = [copy.deepcopy(section) for section in sections]
        self.ood: dict[str, Statistics] = {}
        self.validation: Statistics | None = None

    @property
    def rows(self) -> int:
        """Number of rows: statements about valid examples."""
        return 0 if self.sums is None else int(self.sums.count)

    def update(
        self,
        predictive: Predictive,
        targets: Tensor | None,
        example: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> None:
        """Add a batch.

        Args:
            predictive: Of B examples.
            targets: The observed targets; None for out-of-distribution data, of which only the
                scores of uncertainty are kept.
            example: The examples' indices in the data set, (B,); None counts on.
            inputs: What the network was given. Pictures are shown for the most uncertain
                examples, one-dimensional inputs give the fit; others are not looked at.

        Raises:
            ConfigurationError: The predictive is of another task or number of classes than before.
            DataError: The targets do not fit the predictive.
        """
        if example is None:
            index = np.arange(self.examples, self.examples + len(predictive))
        else:
            index = example.detach().cpu().long().numpy()
        rows = make_rows(predictive, targets, index, inputs)
        self._expect(rows)
        self.draws = min(predictive.draws, self.draws or predictive.draws)
        self.labels = rows.classes == 2 and rows.predictive.mean.ndim == rows.predictive.mode.ndim
        self.counts = getattr(predictive, "discrete", False)
        self.examples += len(predictive)
        self.invalid = np.union1d(self.invalid, rows.invalid)
        samples = [(self.sample, self.sums.ood.values() if targets is None else self.sums.columns)]
        if self.kept is not self.sample and targets is not None:
            samples.append((self.kept, ("target", "log_probabilities")))
        for sample, names in samples:
            sample.add(rows.example, rows.position, {name: rows.columns[name] for name in names})
        if targets is not None:
            self.sums.add(rows)
            for section in self.sections:
                section.add(rows)

    def _expect(self, part: Statistics | Rows) -> None:
        """Begin with the first batch, and raise if another one does not go with it."""
        task, classes = part.task, part.classes
        if self.task is not None or task is None:
            check_same_task({"the batches so far": self, "this one": part})
            return
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

    def merge(self, other: Statistics) -> None:
        """Add what another process gathered on other examples of the same data.

        Raises:
            ConfigurationError: The two are of different tasks or numbers of classes.
        """
        for name, scores in other.ood.items():
            self.ood.setdefault(name, Statistics(scores.bins, scores.keep)).merge(scores)
        if self.validation is not None and other.validation is not None:
            self.validation.merge(other.validation)
        if other.task is None:
            return
        self._expect(other)
        self.draws = min(each for each in (self.draws, other.draws) if each is not None)
        self.labels, self.counts = other.labels, other.counts
        self.examples += other.examples
        self.invalid = np.union1d(self.invalid, other.invalid)
        self.sums.merge(other.sums)
        self.sample.merge(other.sample)
        if self.kept is not self.sample:
            self.kept.merge(other.kept)
        for section, more in zip(self.sections, other.sections, strict=True):
            section.merge(more)

    def scores(self, name: str) -> Array:
        """A score that may tell out-of-distribution data, of the rows kept."""
        return self.sample[self.sums.ood[name]]

    def has(self, score: str, draws: int | None) -> bool:
        """Whether a score says something: of one draw, here or there, nothing is epistemic."""
        return score not in EPISTEMIC_SCORES or 1 not in (self.draws, draws)


def check_same_task(parts: Mapping[str, Any]) -> None:
    """Raise a ConfigurationError unless all are of one task and number of classes.

    Args:
        parts: What has a ``task`` and ``classes``, by its name in the error.
    """
    (first, one), *others = parts.items()
    for name, other in others:
        if (one.task, one.classes) != (other.task, other.classes):
            raise ConfigurationError(
                f"a report is of one task: {first} is {one.task} (classes: {one.classes}), {name} "
                f"is {other.task} (classes: {other.classes}). Make a report of each by itself."
            )


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
