"""Everything that a report needs of one model on one data set, gathered batch by batch.

Sums in fixed bins are exact however many examples there are. What needs ranks or single rows is
made from a uniform sample of at most 200,000 rows (:mod:`lightning_bnn.report.sample`). So memory
is bounded, and what several processes gathered is merged into what one would have gathered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.predictive import BernoulliPredictive, PoissonPredictive, Predictive
from lightning_bnn.report.class_sums import ClassSums
from lightning_bnn.report.number_sums import NumberSums
from lightning_bnn.report.outside import KEEP_ROWS
from lightning_bnn.report.pictures import MostUncertain
from lightning_bnn.report.rows import Array, Rows, in_double, make_rows
from lightning_bnn.report.sample import Sample

__all__ = ["FIT_LEVEL", "Statistics"]

# Numbers that the sample of probability vectors keeps: 80 MB, and twice that before it is cut.
KEEP_NUMBERS = 10_000_000
# Examples of a one-dimensional input whose fit is drawn, and the level of its interval.
KEEP_FIT = 400
FIT_LEVEL = 0.9

CLASS_COLUMNS = (
    "target",
    "predicted",
    "confidence",
    "correct",
    "nll",
    "brier",
    "entropy",
    "epistemic",
)
NUMBER_COLUMNS = ("target", "mean", "sd", "aleatoric", "epistemic", "pit", "nll", "crps")


class Statistics:
    """What one model said and what came.

    Args:
        bins: Number of bins of the reliability diagram, of the PIT and of the calibration errors.
        keep: The largest number of rows held.

    Attributes:
        task: "classes" or "numbers"; None before the first batch, as are the others.
        classes: Number of classes, None for numbers.
        draws: Number of draws of the posterior.
        yes_no: Whether the classes are the two values of a yes-or-no label.
        counts: Whether the numbers are counts (Poisson).
        examples: Number of examples seen, the invalid ones included.
        rows: Number of rows: statements about valid examples.
        sums: Exact sums over all rows (ClassSums or NumberSums).
        sample: The rows kept.
        matrix: The log-probabilities kept, column "log_probabilities" (and "target").
        uncertain: The most uncertain rows of a classification.
        fit: Columns of the fit, where the input is one-dimensional.

    Example:
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> statistics = Statistics(bins=5)
        >>> logits = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]])  # one draw, two examples
        >>> statistics.update(CategoricalPredictive(logits), torch.tensor([0, 0]))
        >>> statistics.task, statistics.rows, statistics.sums.mean("correct")
        ('classes', 2, 0.5)
    """

    def __init__(self, bins: int = 15, keep: int = KEEP_ROWS) -> None:
        if bins < 2:
            raise ConfigurationError(f"expected bins >= 2, got {bins}. The usual number is 15.")
        self.bins = bins
        self.keep = keep
        self.task: str | None = None
        self.classes: int | None = None
        self.draws: int | None = None
        self.yes_no = False
        self.counts = False
        self.examples = 0
        self._invalid: list[Array] = []
        self.sums: Any = None
        self.sample = Sample(keep)
        self.matrix: Sample | None = None
        self.uncertain = MostUncertain()
        self.fit = Sample(KEEP_FIT)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return 0 if self.sums is None else int(self.sums.count)

    @property
    def kept(self) -> Sample:
        """The rows of which everything is kept: of classes, those with their probabilities."""
        return self.sample if self.matrix is None else self.matrix

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
            targets: What came.
            example: The examples' indices in the data set, (B,); None counts on.
            inputs: What the network was given. Pictures are shown for the most uncertain
                examples, one-dimensional inputs give the fit; others are not looked at.

        Raises:
            ConfigurationError: The predictive is of another task or number of classes than before.
            DataError: The targets do not fit the predictive.
        """
        count = len(predictive)
        if example is None:
            index = np.arange(self.examples, self.examples + count)
        else:
            index = example.detach().cpu().numpy().astype(np.int64).reshape(-1)
        if len(index) != count:
            raise DataError(
                f"expected one index for each of the {count} examples, got {len(index)}. "
                "Pass example= of shape (B,), or None to count on."
            )
        rows = make_rows(predictive, targets, index)
        self._start(rows, predictive)
        self.examples += count
        if len(rows.invalid):
            self._invalid.append(rows.invalid)
        self.sums.add(rows)
        names = CLASS_COLUMNS if self.task == "classes" else NUMBER_COLUMNS
        kept = {name: rows.columns[name] for name in names}
        self.sample.add(rows.example, rows.position, kept)
        if self.matrix is not None and rows.log_probabilities is not None:
            kept = {"log_probabilities": rows.log_probabilities, "target": rows.columns["target"]}
            self.matrix.add(rows.example, rows.position, kept)
            self.uncertain.add(rows, index, inputs)
        elif _is_line(inputs, count) and len(rows) + len(rows.invalid) == count:
            self._add_fit(predictive, rows, index, inputs)

    def _start(self, rows: Rows, predictive: Predictive) -> None:
        classes = None if rows.log_probabilities is None else rows.log_probabilities.shape[1]
        if self.task is None:
            self._begin(rows.task, classes)
        if (self.task, self.classes) != (rows.task, classes):
            raise ConfigurationError(
                f"the batches so far were {_name(self.task, self.classes)}, this one is "
                f"{_name(rows.task, classes)}. Gather each model's predictions by themselves."
            )
        self.draws = predictive.draws
        self.yes_no = isinstance(predictive, BernoulliPredictive)
        self.counts = isinstance(predictive, PoissonPredictive)

    def _begin(self, task: str, classes: int | None) -> None:
        if classes is not None and classes < 2:
            raise ConfigurationError(
                f"a report of classes needs at least 2 of them, got {classes}. For one logit per "
                "example use the likelihood Bernoulli()."
            )
        self.task, self.classes = task, classes
        if classes is None:
            self.sums = NumberSums(self.bins)
        else:
            self.sums = ClassSums(classes, self.bins)
            self.matrix = Sample(max(1, min(self.keep, KEEP_NUMBERS // classes)))

    def _add_fit(self, predictive: Any, rows: Rows, index: Array, inputs: Tensor | None) -> None:
        chosen = self.fit.admits(rows.example, rows.position)
        if not chosen.any() or inputs is None:
            return
        sorter = np.argsort(index)
        places = sorter[np.searchsorted(index[sorter], rows.example[chosen])]
        part = in_double(predictive._map(lambda tensor: tensor[:, torch.from_numpy(places)]))
        lower, upper = part.interval(FIT_LEVEL)
        centres = part.rates if isinstance(part, PoissonPredictive) else part.means
        tails = torch.tensor([(1 - FIT_LEVEL) / 2, (1 + FIT_LEVEL) / 2], dtype=torch.float64)
        within = centres.quantile(tails, dim=0)
        x = inputs.detach().cpu().double().reshape(-1)[torch.from_numpy(places)]
        columns = {
            "x": x,
            "mean": part.mean,
            "lower": lower,
            "upper": upper,
            "epistemic_lower": within[0],
            "epistemic_upper": within[1],
        }
        kept = {name: values.reshape(-1).numpy() for name, values in columns.items()}
        kept["y"] = rows.columns["target"][chosen]
        self.fit.add(rows.example[chosen], rows.position[chosen], kept)

    def merge(self, other: Statistics) -> None:
        """Add what another process gathered on other examples of the same data.

        Raises:
            ConfigurationError: The two are of different tasks, classes or bins.
        """
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
        self.draws, self.yes_no, self.counts = other.draws, other.yes_no, other.counts
        self.examples += other.examples
        self._invalid.extend(other._invalid)
        self.sums.merge(other.sums)
        self.sample.merge(other.sample)
        if self.matrix is not None and other.matrix is not None:
            self.matrix.merge(other.matrix)
        self.uncertain.merge(other.uncertain)
        self.fit.merge(other.fit)


def _is_line(inputs: Tensor | None, count: int) -> bool:
    return isinstance(inputs, Tensor) and tuple(inputs.shape) in ((count,), (count, 1))


def _name(task: str | None, classes: int | None) -> str:
    return f"{classes} classes" if task == "classes" else "numbers"
