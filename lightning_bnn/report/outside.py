"""The uncertainty of one model on data from elsewhere, gathered batch by batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.calibration.rounding import rounded, rounded_probability
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.predictive import Predictive
from lightning_bnn.report.rows import (
    Array,
    class_log_probabilities,
    in_double,
    task_of,
)
from lightning_bnn.report.sample import Sample

__all__ = ["EPISTEMIC_SCORES", "KEEP_ROWS", "Outside"]

EPISTEMIC_SCORES = ("mutual_information", "epistemic_sd")

# Rows that a sample keeps: statistics that need ranks or single rows are made from it.
KEEP_ROWS = 200_000


class Outside:
    """The scores of one model on one out-of-distribution loader; targets are not needed.

    Args:
        keep: The largest number of rows held; of more, a uniform sample.

    Attributes:
        task: "classes" or "numbers", known after the first batch.
        classes: Number of classes, None for numbers.
        draws: The fewest draws of the posterior in a batch, None before the first.
        examples: Number of examples seen, the invalid ones included.
        invalid: Number of examples whose prediction is not finite.
        sample: Columns "entropy", "mutual_information" and "maximum_probability" for classes,
            "sd" and "epistemic_sd" for numbers.

    Example:
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> outside = Outside()
        >>> outside.update(CategoricalPredictive(torch.zeros(1, 5, 2)))
        >>> outside.examples, outside.sample["maximum_probability"]
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
        if self.task not in (None, task):
            raise ConfigurationError(
                f"this loader's batches so far were a task of {self.task}, this one is of {task}. "
                "Use one posterior for all batches."
            )
        self.task = task
        self.draws = min(predictive.draws, self.draws or predictive.draws)
        start = self.examples
        count = len(predictive)
        index = np.arange(start, start + count) if example is None else example.cpu().numpy()
        with torch.no_grad():
            wide = in_double(predictive)
            if task == "classes":
                log_p = class_log_probabilities(wide).numpy()
                self.classes = log_p.shape[1]
                entropy, within = wide.entropy.reshape(-1).numpy(), wide.aleatoric.reshape(-1)
                columns = {
                    "entropy": rounded(entropy),
                    "mutual_information": rounded(entropy - within.numpy()),
                    "maximum_probability": _largest(log_p, predictive.outputs.dtype),
                }
            else:
                parts = wide.aleatoric.reshape(-1).numpy(), wide.epistemic.reshape(-1).numpy()
                columns = {"sd": np.sqrt(parts[0] + parts[1]), "epistemic_sd": np.sqrt(parts[1])}
        self.examples += count
        self._keep(columns, index)

    def _keep(self, columns: dict[str, Array], index: Array) -> None:
        finite = np.logical_and.reduce([np.isfinite(column) for column in columns.values()])
        each = len(finite) // max(1, len(index))
        whole = finite.reshape(len(index), each).all(1)
        self.invalid += int((~whole).sum())
        valid = np.repeat(whole, each)
        example = np.repeat(index, each)[valid]
        position = np.tile(np.arange(each), len(index))[valid]
        self.sample.add(example, position, {name: c[valid] for name, c in columns.items()})

    def merge(self, other: Outside) -> None:
        """Add what another process gathered on other examples of the loader."""
        if other.task is None:
            return
        if self.task not in (None, other.task):
            raise ConfigurationError(
                f"cannot merge scores of a task of {self.task} with those of {other.task}. "
                "Use one posterior in all processes."
            )
        self.task, self.classes = other.task, other.classes
        self.draws = min(n for n in (self.draws, other.draws) if n is not None)
        self.examples += other.examples
        self.invalid += other.invalid
        self.sample.merge(other.sample)

    def scores(self, name: str) -> Array:
        """A score of the rows kept; none if no prediction was finite."""
        return self.sample[name] if len(self.sample) else np.zeros(0)

    def inside_scores(self, sample: Sample) -> dict[str, Array]:
        """The same scores of the rows of a model's own data."""
        if self.task == "classes":
            return {
                "entropy": sample["entropy"],
                "mutual_information": sample["epistemic"],
                "maximum_probability": sample["confidence"],
            }
        return {"sd": sample["sd"], "epistemic_sd": np.sqrt(sample["epistemic"])}

    def has_scores(self, score: str, draws: int | None) -> bool:
        """Whether a score says something: of one draw, here or inside, nothing is epistemic."""
        return score not in EPISTEMIC_SCORES or 1 not in (self.draws, draws)


def _largest(log_p: Array, dtype: torch.dtype) -> Array:
    probabilities = np.exp(log_p)
    index, place = np.arange(len(log_p)), log_p.argmax(1)
    top = probabilities[index, place]
    probabilities[index, place] = 0.0
    return rounded_probability(top, probabilities.sum(1), dtype != torch.float64)
