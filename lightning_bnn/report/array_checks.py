r"""Plain arrays as predictive mixtures, with everything that can be wrong with them said.

Probabilities :math:`p` become logits :math:`\log p`, of which softmax gives them back; a yes-or-no
probability becomes :math:`\log p - \log(1 - p)`. Rows that are not finite stay in: the report
counts and names them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.errors import DataError
from lightning_bnn.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    ClassPredictive,
    GaussianPredictive,
)

__all__ = ["as_tensor", "check_classes", "class_predictive", "number_predictive"]

# What rounding in half precision leaves of a sum of ten classes.
TOLERANCE = 1e-3
_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = "(N, K) with a column per class, (N,) for yes or no, or (S, N, K) with an axis of draws"


def as_tensor(values: Any, what: str) -> Tensor:
    """Any array as a tensor on the CPU, without gradient.

    Args:
        values: A NumPy array, a tensor of any device, or a list.
        what: Its name, for the error.

    Example:
        >>> as_tensor([0.5, 0.25], "targets")
        tensor([0.5000, 0.2500], dtype=torch.float64)
    """
    if isinstance(values, Tensor):
        return values.detach().cpu()
    try:
        # copied where a tensor could not share the memory: read-only, or of negative strides
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{what} is expected to be an array of numbers (NumPy, torch, or a list); got "
            f"{type(values).__name__}, which is none: {error}."
        ) from error


def class_predictive(probabilities: Any, what: str) -> ClassPredictive:
    """The predictive of class probabilities ``(N, K)``, ``(N,)`` or ``(S, N, K)``.

    Args:
        probabilities: The array.
        what: Its name, for errors.

    Raises:
        DataError: The array holds no probabilities, or has another shape.

    Example:
        >>> predictive = class_predictive([[0.8, 0.2], [0.5, 0.5]], "predictions")
        >>> predictive.mean
        tensor([[0.8000, 0.2000],
                [0.5000, 0.5000]], dtype=torch.float64)
    """
    values = as_tensor(probabilities, what)
    # float32 stays float32: it needs half of the memory, and tells how many digits are meant
    values = values.to(torch.float32 if values.dtype in _SINGLE else torch.float64)
    if values.ndim not in (1, 2, 3) or values.numel() == 0:
        raise DataError(
            f"{what} is expected to hold probabilities of shape {SHAPES}; got shape "
            f"{tuple(values.shape)}."
        )
    if values.ndim == 1:
        _check_range(values, what)
        values = values.clamp(0, 1)  # of rounding
        return BernoulliPredictive((values.log() - (-values).log1p())[None])
    if values.shape[-1] == 1:
        raise DataError(
            f"{what} has one column (shape {tuple(values.shape)}), and classes need two or more. "
            "For the probability of a yes pass the column itself, of shape (N,); for draws of it "
            "stack 1 - p and p on the last axis."
        )
    stacked = values[None] if values.ndim == 2 else values
    _check_range(stacked, what)
    _check_sums(stacked, what)
    return CategoricalPredictive(stacked.log())


def _check_range(values: Tensor, what: str) -> None:
    """Raise unless everything finite lies in [0, 1]; infinity is no probability either."""
    wrong = (values < 0) | (values > 1 + TOLERANCE)
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        where = place[1:] if values.ndim == 3 and values.shape[0] == 1 else place
        fix = (
            "They look like logits: pass 1 / (1 + exp(-logits))."
            if values.ndim == 1
            else "They look like logits: pass softmax(logits) over the classes."
        )
        raise DataError(
            f"{what} is expected to hold probabilities between 0 and 1; it has "
            f"{values[place].item():.4g} at {list(where)}. {fix}"
        )


def _check_sums(values: Tensor, what: str) -> None:
    sums = values.sum(-1, dtype=torch.float64)
    wrong = (sums - 1).abs() > TOLERANCE  # NaN is not wrong here: it is counted later
    if bool(wrong.any()):
        draw, row = wrong.nonzero()[0].tolist()
        of_draw = f" of draw {draw}" if values.shape[0] > 1 else ""
        raise DataError(
            f"{what} is expected to hold probabilities that sum to 1 over the classes; row {row}"
            f"{of_draw} sums to {sums[draw, row].item():.6g} ({int(wrong.sum())} of "
            f"{wrong.numel()} rows do not). Divide each row by its sum if they are weights; pass "
            "the softmax if they are logits; for labels that do not exclude each other make a "
            "report of each."
        )


def check_classes(targets: Any, predictive: ClassPredictive, what: str) -> Tensor:
    """Targets as class indices that fit the predictive.

    Args:
        targets: Class indices, one for each example.
        predictive: What was predicted.
        what: Their name, for errors.

    Raises:
        DataError: They have another shape, dtype or range.

    Example:
        >>> check_classes([1, 0], class_predictive([[0.8, 0.2], [0.5, 0.5]], "p"), "targets")
        tensor([1, 0])
    """
    found = as_tensor(targets, what)
    yes_no = isinstance(predictive, BernoulliPredictive)
    shape = tuple(predictive.mode.shape)
    classes = 2 if yes_no else predictive.outputs.shape[2]
    if tuple(found.shape) == (*shape[:1], classes, *shape[1:]):
        raise DataError(
            f"{what} is expected to hold one class index per example, shape {shape}; got "
            f"{tuple(found.shape)}, which looks one-hot. Pass {what}.argmax(1)."
        )
    if tuple(found.shape) != shape:
        raise DataError(
            f"{what} is expected to hold one class index per prediction, shape {shape}; got "
            f"{tuple(found.shape)}. Predictions and targets are of the same examples, in the same "
            "order."
        )
    if found.dtype == torch.bool:
        found = found.long()
    if found.is_floating_point() or found.is_complex():
        raise DataError(
            f"{what} is expected to hold class indices of an integer type; got {found.dtype}. "
            "Convert them with .astype(int) or .long(); numbers to predict need scales=."
        )
    outside = (found < 0) | (found >= classes)
    if bool(outside.any()):
        place = outside.nonzero()[0].tolist()
        raise DataError(
            f"{what} is expected to hold classes from 0 to {classes - 1}, as there are {classes} "
            f"of them; example {place[0]} has {int(found[tuple(place)])}. Number the classes "
            "from 0."
        )
    return found.long()


def number_predictive(
    means: Any, scales: Any, shape: tuple[int, ...] | None, draws: bool, what: str
) -> GaussianPredictive:
    """The predictive of Gaussians.

    Args:
        means: Means, of the shape of the targets, or with an axis of draws before it.
        scales: Standard deviations: a number, or an array that broadcasts to the means.
        shape: The shape of the targets; None where there are none.
        draws: Where there are no targets, whether the first axis is that of draws.
        what: The name of the means, for errors.

    Raises:
        DataError: Shapes that do not go together, or scales that are not positive.

    Example:
        >>> number_predictive([0.0, 1.0], 0.5, (2,), False, "predictions").scales
        tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    values = as_tensor(means, what).to(torch.float64)
    if shape is not None:
        if tuple(values.shape) not in (shape, (*values.shape[:1], *shape)):
            raise DataError(
                f"{what} is expected to hold means of the shape of the targets, {shape}, or with "
                f"an axis of draws before it, {('S', *shape)}; got {tuple(values.shape)}."
            )
        draws = tuple(values.shape) != shape
    if values.numel() == 0 or values.ndim < 1 + draws:
        raise DataError(f"{what} holds no means: its shape is {tuple(values.shape)}.")
    spread = as_tensor(scales, "scales").to(torch.float64)
    try:
        spread = spread.expand_as(values)
    except RuntimeError as error:
        raise DataError(
            f"scales is expected to be a number or to have the shape of {what}, "
            f"{tuple(values.shape)}; got {tuple(spread.shape)}."
        ) from error
    if bool((spread <= 0).any()):
        raise DataError(
            "scales is expected to hold positive standard deviations; the smallest is "
            f"{float(spread.nan_to_num(1.0).min()):.4g}. Variances need a square root, "
            "log-variances an exp(x / 2)."
        )
    return GaussianPredictive(*((values, spread) if draws else (values[None], spread[None])))
