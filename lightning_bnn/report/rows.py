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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_bnn.calibration.rounding import rounded, rounded_probability
from lightning_bnn.calibration.verdict import score_moments
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.mixtures import reshape_targets
from lightning_bnn.predictive import (
    ClassPredictive,
    Predictive,
)
from lightning_bnn.report.sample import uniforms

__all__ = [
    "Array",
    "Rows",
    "class_log_probabilities",
    "in_double",
    "make_rows",
    "task_of",
]

Array = NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """The rows of a batch.

    Attributes:
        task: "classes" or "numbers".
        example: The index of each row's example, int64.
        position: The row's number within its example, int64.
        columns: Named columns of the same length.
        invalid: The indices of the examples that have no rows, because a prediction is not finite.
        log_probabilities: Logarithms of the mean probabilities, (n, K); None for numbers.
    """

    task: str
    example: Array
    position: Array
    columns: Mapping[str, Array]
    invalid: Array
    log_probabilities: Array | None = None

    def __len__(self) -> int:
        return len(self.example)


def in_double(predictive: Predictive) -> Any:
    """The same predictive on the CPU in float64, so that sums and decompositions add up."""
    return predictive.map(lambda tensor: tensor.detach().to("cpu", torch.float64))


def task_of(predictive: object) -> str:
    """Tell "classes" from "numbers".

    Example:
        >>> from lightning_bnn.predictive import BernoulliPredictive
        >>> task_of(BernoulliPredictive(torch.zeros(1, 3)))
        'classes'
    """
    if not isinstance(predictive, Predictive):
        raise ConfigurationError(
            "a report needs a predictive of classes or of numbers (CategoricalPredictive, "
            "BernoulliPredictive, GaussianPredictive or PoissonPredictive); got "
            f"{type(predictive).__name__}. From plain arrays use lightning_bnn.report.report()."
        )
    return {"classification": "classes", "regression": "numbers"}[predictive.task]


def make_rows(predictive: Predictive, targets: Tensor, example: Array) -> Rows:
    """The rows of a batch.

    Args:
        predictive: Of B examples.
        targets: What came, as the likelihood takes it.
        example: The examples' indices, int64 of shape (B,).

    Raises:
        ConfigurationError: The predictive is of a kind without rows.
        DataError: The targets do not fit the predictive.

    Example:
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> predictive = CategoricalPredictive(torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]))
        >>> rows = make_rows(predictive, torch.tensor([0, 0]), np.array([7, 8]))
        >>> rows.example, rows.columns["correct"]
        (array([7, 8]), array([1., 0.]))
    """
    task = task_of(predictive)
    with torch.no_grad():
        wide = in_double(predictive)
        targets = targets.detach().cpu()
        if task == "classes":
            single = predictive.outputs.dtype != torch.float64
            return _class_rows(wide, targets, example, single)
        return _number_rows(wide, targets, example)


def class_log_probabilities(predictive: ClassPredictive) -> Tensor:
    """Logarithms of the mean probabilities, (rows, K): example after example."""
    return predictive.log_probabilities


def _class_targets(predictive: ClassPredictive, targets: Tensor, classes: int) -> Array:
    flat = predictive.align(targets).reshape(-1).numpy()
    wrong = ~np.isin(flat, np.arange(classes))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise DataError(
            f"expected targets that are class indices from 0 to {classes - 1}; target {first} of "
            f"this batch is {flat[first].item()}. Leave out examples without a label, and count "
            "classes from 0."
        )
    return flat.astype(np.int64)


def _class_rows(predictive: ClassPredictive, targets: Tensor, example: Array, single: bool) -> Rows:
    log_p = class_log_probabilities(predictive).numpy()
    count, classes = log_p.shape
    each = count // max(1, len(predictive))
    target = _class_targets(predictive, targets, classes)
    valid, invalid = _valid(~np.isnan(log_p).any(1), example, each)
    flat = {
        "entropy": predictive.entropy,
        "aleatoric": predictive.aleatoric,
        "brier": predictive.brier(targets),
    }
    columns = {name: values.reshape(-1).numpy()[valid] for name, values in flat.items()}
    log_p, target = log_p[valid], target[valid]
    index = np.arange(len(target))
    predicted = log_p.argmax(1)
    probabilities = np.exp(log_p)
    score, variance, third = score_moments(log_p, probabilities, target)
    top = probabilities[index, predicted]
    probabilities[index, predicted] = 0.0
    others = probabilities.sum(1)  # 1 - confidence, without rounding it away
    correct = predicted == target
    log_target = log_p[index, target]
    with np.errstate(divide="ignore", invalid="ignore"):
        which = np.where(correct | np.isneginf(log_target), 0.0, np.log(others) - log_target)
    columns |= {
        "target": target,
        "predicted": predicted,
        "confidence": rounded_probability(top, others, single),
        "correct": correct.astype(np.float64),
        "nll": -log_target + 0.0,
        "entropy": rounded(columns["entropy"]),
        "epistemic": rounded(columns["entropy"] - columns["aleatoric"]),
        "score": score,
        "score_variance": variance,
        "score_third": third,
        "which_class": which,
    }
    row_example, position = np.repeat(example, each), np.tile(np.arange(each), len(example))
    return Rows("classes", row_example[valid], position[valid], columns, invalid, log_p)


def _valid(row_valid: Array, example: Array, each: int) -> tuple[Array, Array]:
    """Which rows stay, and the examples left out: an example stays whole or goes whole."""
    whole = row_valid.reshape(len(example), each).all(1)
    return np.repeat(whole, each), example[~whole]


def _number_rows(predictive: Any, targets: Tensor, example: Array) -> Rows:
    mean = predictive.mean
    targets = reshape_targets(targets, mean.shape).double()
    target = targets.reshape(-1).numpy()
    if not np.isfinite(target).all():
        first = int(np.flatnonzero(~np.isfinite(target))[0])
        raise DataError(
            f"expected finite targets; number {first} of this batch is {target[first]}. Leave such "
            "examples out of the data."
        )
    each = len(target) // max(1, len(predictive))
    row_example, position = np.repeat(example, each), np.tile(np.arange(each), len(example))
    pit = predictive.cdf(targets).reshape(-1).numpy()
    if predictive.discrete:
        below = predictive.cdf(targets - 1).reshape(-1).numpy()
        pit = below + uniforms(row_example, position) * (pit - below)
    flat = {
        "mean": mean,
        "aleatoric": predictive.aleatoric,
        "epistemic": predictive.epistemic,
        "crps": predictive.crps(targets),
        "nll": -predictive.log_prob(targets).repeat_interleave(each),
    }
    columns = {name: values.reshape(-1).numpy() for name, values in flat.items()}
    columns |= {"target": target, "pit": pit}
    columns["sd"] = np.sqrt(columns["aleatoric"] + columns["epistemic"])
    finite = np.logical_and.reduce([np.isfinite(column) for column in columns.values()])
    valid, invalid = _valid(finite, example, each)
    kept = {name: column[valid] for name, column in columns.items()}
    return Rows("numbers", row_example[valid], position[valid], kept, invalid)
