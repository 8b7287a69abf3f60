"""Data that is already in memory, served a whole batch at a time.

``torch.utils.data.TensorDataset`` hands out one example after another and leaves it to the
collate function to stack them again, which for small images costs more than the network does.
:class:`TensorRows` answers ``__getitems__`` instead: the loader gives it the indices of a batch,
and it gathers them with one indexing operation per tensor. The loader stays an ordinary
``DataLoader``, so samplers, distributed samplers and workers all work as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

__all__ = ["GatheredRows", "TensorRows", "collate_rows"]


def collate_rows(batch: Any) -> Any:
    """Pass on a batch that :class:`TensorRows` has gathered; stack anything else as torch does.

    Args:
        batch: What the dataset returned for the indices of one batch.

    Example:
        >>> import torch
        >>> rows = TensorRows(torch.arange(4.0), torch.arange(4))
        >>> collate_rows(rows.__getitems__([3, 0]))
        (tensor([3., 0.]), tensor([3, 0]))
        >>> collate_rows([rows[3], rows[0]])
        [tensor([3., 0.]), tensor([3, 0])]
    """
    return batch.tensors if isinstance(batch, GatheredRows) else default_collate(batch)


@dataclass(frozen=True)
class GatheredRows:
    """The tensors of one batch, on the way from the dataset to :func:`collate_rows`.

    Not a tuple, because torch's default collate function would take a tuple of two tensors for
    two examples and silently stack inputs on targets. With this type it stops with an error.

    Attributes:
        tensors: One tensor per column of the dataset, each with the batch as first axis.

    Example:
        >>> import torch
        >>> GatheredRows((torch.zeros(2, 3), torch.zeros(2))).tensors[0].shape
        torch.Size([2, 3])
    """

    tensors: tuple[Tensor, ...]


class TensorRows(TensorDataset):
    """A ``TensorDataset`` that gathers a batch at once.

    Give the loader ``collate_fn=collate_rows``.

    Args:
        *tensors: Inputs first, then targets; all of the same length.
        transform: A function of a batch of inputs, applied when the batch is gathered
            (augmentation, conversion to float).

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader
        >>> rows = TensorRows(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 2]))
        >>> loader = DataLoader(rows, batch_size=2, collate_fn=collate_rows)
        >>> [(tuple(inputs.shape), targets.tolist()) for inputs, targets in loader]
        [((2, 2), [0, 1]), ((1, 2), [2])]
    """

    def __init__(
        self, *tensors: Tensor, transform: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__(*tensors)
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[0] for tensor in self.__getitems__([index]).tensors)

    def __getitems__(self, indices: Sequence[int]) -> GatheredRows:
        """Gather the rows of a batch; the ``DataLoader`` looks for this method."""
        chosen = torch.as_tensor(indices, dtype=torch.long)
        inputs, *others = (tensor[chosen] for tensor in self.tensors)
        if self.transform is not None:
            inputs = self.transform(inputs)
        return GatheredRows((inputs, *others))
