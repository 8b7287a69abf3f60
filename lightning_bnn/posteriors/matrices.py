"""Weights of any shape as matrices, and what remains of rows and columns when they shrink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_bnn.storage.stream import Change

__all__ = ["as_matrix", "factor_sides", "matrix_shape", "places_left", "scaled"]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """The first axis of a tensor by all others together; a vector is one column.

    Example:
        >>> matrix_shape((8, 3, 5, 5)), matrix_shape((8,)), matrix_shape(())
        ((8, 75), (8, 1), (1, 1))
    """
    size = torch.Size(shape)
    return (size[0], size[1:].numel()) if size else (1, 1)


def as_matrix(tensor: Tensor) -> Tensor:
    """A view of a tensor as a matrix.

    Example:
        >>> as_matrix(torch.zeros(8, 3, 5, 5)).shape
        torch.Size([8, 75])
    """
    return tensor.view(matrix_shape(tensor.shape))


def places_left(change: Change, name: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Which rows and which columns of a weight a change leaves, in order, and -1 for zeros.

    A change that makes tensors smaller takes whole rows and columns, and may set weights to zero.

    Args:
        change: From the name of a tensor and its values to new values.
        name: The name of the weight.
        shape: Its shape.

    Example:
        >>> places_left(lambda name, tensor: tensor[[0, 2]], "w", (3, 2))
        (tensor([0, 2]), tensor([0, 1]))
    """
    rows, columns = matrix_shape(shape)
    # counted from 1: a zero is nobody's place
    by_row = torch.arange(1.0, rows + 1, dtype=torch.float64)[:, None].expand(rows, columns)
    by_column = torch.arange(1.0, columns + 1, dtype=torch.float64).expand(rows, columns)
    left = [as_matrix(change(name, by.reshape(shape)).contiguous()) for by in (by_row, by_column)]
    return left[0].amax(1).long() - 1, left[1].amax(0).long() - 1


def factor_sides(name: str, shape: Sequence[int]) -> list[tuple[str, int]]:
    """What the factors of a weight are called, and how long they are; a vector has one.

    Example:
        >>> factor_sides("0.weight", (8, 3)), factor_sides("0.bias", (8,))
        ([('0.weight.rows', 8), ('0.weight.columns', 3)], [('0.bias.rows', 8)])
    """
    sides = zip(("rows", "columns"), matrix_shape(shape), strict=True)
    return [(f"{name}.{side}", length) for side, length in sides][: max(1, min(len(shape), 2))]


def scaled(name: str, weight: Tensor, factors: Mapping[str, Tensor]) -> Tensor:
    """A weight times the factors of its rows and of its columns, whose leading axes stay in front.

    Example:
        >>> factors = {"w.rows": torch.tensor([1.0, 2.0]), "w.columns": torch.ones(2)}
        >>> scaled("w", torch.ones(2, 2), factors)
        tensor([[1., 1.],
                [2., 2.]])
    """
    rows, columns = factors[f"{name}.rows"], factors.get(f"{name}.columns")
    matrix = as_matrix(weight) * rows[..., None]
    matrix = matrix if columns is None else matrix * columns[..., None, :]
    return matrix.view(rows.shape[:-1] + weight.shape)
