r"""One row for each statement that a predictive makes, as columns in float64.

A classification of B examples has a row for each example, or for each of its positions or labels;
a yes-or-no label is a statement about two classes. A regression has a row for each output. With
:math:`p` the probabilities of a row and :math:`y` its target, the less usual columns are

* score: :math:`\log p_y - \sum_k p_k \log p_k`, the derivative of the log-likelihood in the inverse
  temperature at 1. Where :math:`p` is true its mean is 0 and its variance
  :math:`\sum_k p_k (\log p_k + H)^2` with the entropy :math:`H`, the third moment alike;
* which_class: :math:`-\log \frac{p_y}{1 - \max_k p_k}` where the top class is wrong, else 0: what
  naming the right one among the others costs;
* pit: the distribution function at the target. For counts, :math:`F(y-1) + v\,(F(y) - F(y-1))` with
  :math:`v` a fixed function of the example, so that it is uniform if the predictive is true (Czado
  et al., 2009, *Predictive Model Assessment for Count Data*).

What is ranked (confidence, entropy, epistemic) is without the digits that rounding made
(:mod:`lightning_bnn.calibration.rounding`); scores and sums are not rounded. Examples whose
prediction is not finite have no rows; their indices are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import iadd
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from lightning_bnn.calibration.rounding import rounded, rounded_probability
from lightning_bnn.calibration.verdict import score_moments
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.mixtures import known_classes, reshape_targets
from lightning_bnn.predictive import Predictive
from lightning_bnn.report.sample import Array, priorities

__all__ = ["Array", "Rows", "Sums", "make_rows"]


@dataclass(frozen=True)
class Rows:
    """The rows of a batch.

    Attributes:
        task: "classification" or "regression".
        example: The index of each row's example, int64.
        position: The row's number within its example, int64.
        place: The place of each row's example in the batch, int64.
        columns: Named columns of the same length; "log_probabilities" of classes is (n, K).
        invalid: The indices of the examples that have no rows, because a prediction is not finite.
        predictive: The whole batch, on the CPU in float64.
        inputs: What the network was given, if known.
    """

    task: str
    example: Array
    position: Array
    place: Array
    columns: Mapping[str, Array]
    invalid: Array
    predictive: Any
    inputs: Any = None

    @property
    def log_probabilities(self) -> Array:
        """Logarithms of the mean probabilities of a classification, (n, K)."""
        return self.columns["log_probabilities"]

    @property
    def classes(self) -> int | None:
        """Number of classes; None for a regression."""
        return self.log_probabilities.shape[1] if self.task == "classification" else None

    def __len__(self) -> int:
        return len(self.example)


class Sums:
    """Exact sums over the rows of a model; those of two processes are added.

    Everything that an instance holds can be added to the same of another one.

    Attributes:
        means: The columns whose means are known.
        columns: The columns that a sample of the rows keeps.
        scores: Of the comparison: key, label, which is better ("lower", "higher", "near" or None)
            and its aim.
        ood: What may tell out-of-distribution data, and the column that has it.
        count: Number of rows.
        impossible: Number of rows whose target had probability 0.
        totals: The sum of each of the columns in ``means``.
    """

    means: ClassVar[tuple[str, ...]]
    columns: ClassVar[tuple[str, ...]]
    scores: ClassVar[tuple[tuple[str, str, str | None, float | None], ...]]
    ood: ClassVar[Mapping[str, str]]

    def __init__(self) -> None:
        self.count = self.impossible = 0
        self.totals = np.zeros(len(self.means))

    def add_columns(self, columns: Mapping[str, Array]) -> None:
        """Add the columns of a batch to ``count``, ``impossible`` and ``totals``."""
        self.count += len(columns["target"])
        self.impossible += int(np.isinf(columns["nll"]).sum())
        self.totals += [columns[name].sum() for name in self.means]

    def merge(self, other: Self) -> None:
        """Add the sums of other rows."""
        for name, value in vars(other).items():
            setattr(self, name, iadd(getattr(self, name), value))

    def total(self, name: str) -> float:
        """The sum of a column over all rows."""
        return float(self.totals[self.means.index(name)])

    def mean(self, name: str) -> float:
        """The mean of a column over all rows."""
        return self.total(name) / self.count

    def shows_grave_faults(self) -> bool:
        """Whether another test than the band of calibration would show what is grave."""
        return False


def make_rows(
    predictive: Predictive, targets: Tensor | None, example: Array, inputs: Any = None
) -> Rows:
    """The rows of a batch.

    Args:
        predictive: Of B examples.
        targets: The observed targets, as the likelihood takes them; None where there are none, and
            no column that needs them.
        example: The examples' indices, int64 of shape (B,).
        inputs: What the network was given.

    Raises:
        ConfigurationError: The predictive has no task.
        DataError: The targets do not fit the predictive.

    Example:
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> predictive = CategoricalPredictive(torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]))
        >>> rows = make_rows(predictive, torch.tensor([0, 0]), np.array([7, 8]))
        >>> rows.example, rows.columns["correct"]
        (array([7, 8]), array([1., 0.]))
    """
    task = getattr(predictive, "task", None)
    if task not in ("classification", "regression"):
        raise ConfigurationError(
            "a report needs a predictive with a task, as ClassPredictive and OrderedPredictive "
            f"have it; got {type(predictive).__name__}. From plain arrays use report()."
        )
    targets = None if targets is None else targets.detach().cpu()
    with torch.no_grad():
        # in float64, so that sums and decompositions add up
        wide: Any = predictive.to("cpu", torch.float64)
        labelled: Array | bool = True
        if task == "classification":
            if targets is not None and wide.ignore_index is not None:
                labelled = (wide.align(targets).long() != wide.ignore_index).reshape(-1).numpy()
                targets, wide.ignore_index = known_classes(targets, wide.ignore_index), None
            columns = _class_columns(wide, targets, predictive.outputs.dtype != torch.float64)
            finite = np.asarray(~np.isnan(columns["log_probabilities"]).any(axis=1))
        else:
            columns = _regression_columns(wide, targets, example)
            finite = np.isfinite(np.stack(list(columns.values()))).all(0)
    each = len(finite) // max(1, len(example))
    whole = finite.reshape(len(example), each).all(1)  # an example stays whole or goes whole
    valid = np.repeat(whole, each) & labelled
    return Rows(
        task,
        np.repeat(example, each)[valid],
        np.tile(np.arange(each), len(example))[valid],
        np.repeat(np.arange(len(example)), each)[valid],
        {name: column[valid] for name, column in columns.items()},
        example[~whole],
        wide,
        inputs,
    )


def _class_columns(predictive: Any, targets: Tensor | None, single: bool) -> dict[str, Array]:
    log_p: Array = predictive.log_probabilities.numpy()
    index = np.arange(len(log_p))
    with np.errstate(invalid="ignore"):
        predicted = log_p.argmax(1)
        probabilities = np.exp(log_p)
    others = probabilities.copy()  # 1 - the largest one, without rounding it away
    others[index, predicted] = 0.0
    others = others.sum(1)
    entropy = predictive.entropy.reshape(-1).numpy()
    aleatoric = predictive.aleatoric.reshape(-1).numpy()
    columns = {
        "log_probabilities": log_p,
        "predicted": predicted,
        "confidence": rounded_probability(probabilities[index, predicted], others, single),
        "entropy": rounded(entropy),
        "aleatoric": aleatoric,
        "epistemic": rounded(entropy - aleatoric),
    }
    if targets is None:
        return columns
    predictive.hits(targets)  # checks the shape
    target = _class_indices(targets, log_p.shape[1])
    correct, log_target = predicted == target, log_p[index, target]
    with np.errstate(divide="ignore", invalid="ignore"):
        score, variance, third = score_moments(log_p, probabilities, target)
        which = np.where(correct | np.isneginf(log_target), 0.0, np.log(others) - log_target)
    return columns | {
        "target": target,
        "correct": correct.astype(np.float64),
        "nll": -log_target + 0.0,
        "brier": predictive.brier(targets).reshape(-1).numpy(),
        "score": score,
        "score_variance": variance,
        "score_third": third,
        "which_class": which,
    }


def _class_indices(targets: Tensor, classes: int) -> Array:
    flat: Array = targets.reshape(-1).numpy()
    wrong = np.flatnonzero(~np.isin(flat, np.arange(classes)))
    if len(wrong):
        raise DataError(
            f"expected targets that are class indices from 0 to {classes - 1}; target {wrong[0]} "
            f"of this batch is {flat[wrong[0]].item()}. Leave out examples without a label, and "
            "count classes from 0."
        )
    return flat.astype(np.int64)


def _regression_columns(
    predictive: Any, targets: Tensor | None, example: Array
) -> dict[str, Array]:
    def flat(values: Tensor) -> Array:
        return values.reshape(-1).numpy()

    mean, epistemic = flat(predictive.mean), flat(predictive.epistemic)
    aleatoric = flat(predictive.aleatoric)
    columns = {
        "mean": mean,
        "aleatoric": aleatoric,
        "epistemic": epistemic,
        "sd": np.sqrt(aleatoric + epistemic),
        "epistemic_sd": np.sqrt(epistemic),
    }
    if targets is None:
        return columns
    targets = reshape_targets(targets, predictive.mean.shape).double()
    target = flat(targets)
    wrong = np.flatnonzero(~np.isfinite(target))
    if len(wrong):
        raise DataError(
            f"expected finite targets; number {wrong[0]} of this batch is {target[wrong[0]]}. "
            "Leave such examples out of the data."
        )
    each = len(target) // max(1, len(predictive))
    pit = flat(predictive.cdf(targets))
    if predictive.discrete:
        below = flat(predictive.cdf(targets - 1))
        position = np.tile(np.arange(each), len(example))
        pit = below + priorities(np.repeat(example, each), position, stream=1) * (pit - below)
    return columns | {
        "target": target,
        "pit": pit,
        "crps": flat(predictive.crps(targets)),
        "nll": flat(-predictive.log_prob(targets).repeat_interleave(each)),
    }
