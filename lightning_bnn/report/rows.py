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
from lightning_bnn.predictive import Predictive
from lightning_bnn.report.sample import uniforms

__all__ = ["Array", "Rows", "largest_probability", "make_rows", "task_of"]

Array = NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """The rows of a batch.

    Attributes:
        task: "classification" or "regression".
        example: The index of each row's example, int64.
        position: The row's number within its example, int64.
        place: The place of each row's example in the batch, int64.
        columns: Named columns of the same length.
        invalid: The indices of the examples that have no rows, because a prediction is not finite.
        predictive: The whole batch, on the CPU in float64.
        inputs: What the network was given, if known.
        log_probabilities: Logarithms of the mean probabilities, (n, K); None for a regression.
    """

    task: str
    example: Array
    position: Array
    place: Array
    columns: Mapping[str, Array]
    invalid: Array
    predictive: Any
    inputs: Any = None
    log_probabilities: Array | None = None

    def __len__(self) -> int:
        return len(self.example)


def task_of(predictive: Any) -> str:
    """What a predictive says that it is of: "classification" or "regression".

    Example:
        >>> from lightning_bnn.predictive import BernoulliPredictive
        >>> task_of(BernoulliPredictive(torch.zeros(1, 3)))
        'classification'
    """
    task = getattr(predictive, "task", None)
    if task not in ("classification", "regression"):
        raise ConfigurationError(
            "a report needs a predictive with a task, as ClassPredictive and OrderedPredictive "
            f"have it; got {type(predictive).__name__}. From plain arrays use "
            "lightning_bnn.report.report()."
        )
    return str(task)


def make_rows(predictive: Predictive, targets: Tensor, example: Array, inputs: Any = None) -> Rows:
    """The rows of a batch.

    Args:
        predictive: Of B examples.
        targets: The observed targets, as the likelihood takes them.
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
    task = task_of(predictive)
    with torch.no_grad():
        # in float64, so that sums and decompositions add up
        wide: Any = predictive.to("cpu", torch.float64)
        targets, log_p = targets.detach().cpu(), None
        if task == "classification":
            single = predictive.outputs.dtype != torch.float64
            columns, log_p = _class_columns(wide, targets, single)
            finite = np.asarray(~np.isnan(log_p).any(axis=1))
        else:
            columns = _regression_columns(wide, targets, example)
            finite = np.logical_and.reduce([np.isfinite(column) for column in columns.values()])
    each = len(finite) // max(1, len(example))
    whole = finite.reshape(len(example), each).all(1)  # an example stays whole or goes whole
    valid = np.repeat(whole, each)
    return Rows(
        task,
        np.repeat(example, each)[valid],
        np.tile(np.arange(each), len(example))[valid],
        np.repeat(np.arange(len(example)), each)[valid],
        {name: column[valid] for name, column in columns.items()},
        example[~whole],
        wide,
        inputs,
        None if log_p is None else log_p[valid],
    )


def _class_columns(
    predictive: Any, targets: Tensor, single: bool
) -> tuple[dict[str, Array], Array]:
    log_p: Array = predictive.log_probabilities.numpy()
    predictive.hits(targets)  # checks the shape
    target = _class_indices(targets, log_p.shape[1])
    index = np.arange(len(target))
    with np.errstate(invalid="ignore"):
        predicted = log_p.argmax(1)
        top, others = _top_and_rest(log_p)
        score, variance, third = score_moments(log_p, np.exp(log_p), target)
    correct = predicted == target
    log_target = log_p[index, target]
    with np.errstate(divide="ignore", invalid="ignore"):
        which = np.where(correct | np.isneginf(log_target), 0.0, np.log(others) - log_target)
    entropy = predictive.entropy.reshape(-1).numpy()
    aleatoric = predictive.aleatoric.reshape(-1).numpy()
    return {
        "target": target,
        "predicted": predicted,
        "confidence": rounded_probability(top, others, single),
        "correct": correct.astype(np.float64),
        "nll": -log_target + 0.0,
        "brier": predictive.brier(targets).reshape(-1).numpy(),
        "entropy": rounded(entropy),
        "aleatoric": aleatoric,
        "epistemic": rounded(entropy - aleatoric),
        "score": score,
        "score_variance": variance,
        "score_third": third,
        "which_class": which,
    }, log_p


def _top_and_rest(log_p: Array) -> tuple[Array, Array]:
    """The largest probability, and the sum of the others: 1 - it, without rounding it away."""
    probabilities = np.exp(log_p)
    index, place = np.arange(len(log_p)), log_p.argmax(1)
    top = probabilities[index, place]
    probabilities[index, place] = 0.0
    return top, probabilities.sum(1)


def largest_probability(log_p: Array, single: bool) -> Array:
    """The confidence of each row.

    Args:
        log_p: Log probabilities, (n, K).
        single: Whether they were computed in single precision or less.
    """
    return rounded_probability(*_top_and_rest(log_p), single)


def _class_indices(targets: Tensor, classes: int) -> Array:
    flat: Array = targets.reshape(-1).numpy()
    wrong = ~np.isin(flat, np.arange(classes))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        raise DataError(
            f"expected targets that are class indices from 0 to {classes - 1}; target {first} of "
            f"this batch is {flat[first].item()}. Leave out examples without a label, and count "
            "classes from 0."
        )
    return flat.astype(np.int64)


def _regression_columns(predictive: Any, targets: Tensor, example: Array) -> dict[str, Array]:
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
    pit = predictive.cdf(targets).reshape(-1).numpy()
    if predictive.discrete:
        below = predictive.cdf(targets - 1).reshape(-1).numpy()
        position = np.tile(np.arange(each), len(example))
        pit = below + uniforms(np.repeat(example, each), position) * (pit - below)
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
    return columns
