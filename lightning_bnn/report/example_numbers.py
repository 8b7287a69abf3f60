"""Which example is which: the numbers of a batch's examples, also when processes share the data.

A ``DistributedSampler`` orders the data, pads the list with repeats until every process has as
many, and gives process r the places r, r + W, r + 2W, ... of W processes. So example j of process r
is number jW + r of the list, and the numbers at or beyond the length of the data are repeats,
which must not count twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

__all__ = ["ExampleNumbers", "distributed_sampler"]


def distributed_sampler(loader: Any) -> DistributedSampler | None:
    """The sampler that shares a loader's data among processes, if there is one.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> sampler = DistributedSampler(range(5), num_replicas=2, rank=1)
        >>> distributed_sampler(DataLoader(range(5), sampler=sampler)) is sampler
        True
        >>> distributed_sampler(DataLoader(range(5))) is None
        True
    """
    batches = getattr(loader, "batch_sampler", None)
    # A batch sampler of the user's own has the sampler; the loader then holds one without use.
    for owner in (batches, loader):
        sampler = getattr(owner, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


class ExampleNumbers:
    """Numbers the examples of a loader in the order in which they come.

    Where no ``DistributedSampler`` shares the data (an ``IterableDataset``, or sampling of the
    user's own), every process counts on by itself, its numbers set apart from those of the others:
    whether an example comes twice cannot be known then.

    Args:
        loader: The loader, as Lightning has prepared it.
        rank: The rank of this process.
        world_size: The number of processes.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> sampler = DistributedSampler(range(5), num_replicas=2, rank=1, shuffle=False)
        >>> numbers = ExampleNumbers(DataLoader(range(5), sampler=sampler), rank=1, world_size=2)
        >>> numbers.take(2), numbers.take(1)  # the sixth of five is a repeat
        (tensor([1, 3]), tensor([-1]))
    """

    def __init__(self, loader: Any, rank: int = 0, world_size: int = 1) -> None:
        sampler = distributed_sampler(loader)
        self._rank, self._stride = rank, world_size
        self._end: int | None = None
        # without batches of its own, an item is a batch, and repeats cannot be told
        if sampler is not None and getattr(loader, "batch_sampler", None) is not None:
            self._rank, self._stride = sampler.rank, sampler.num_replicas
            self._end = len(sampler.dataset)  # type: ignore[arg-type]
        self._seen = 0

    def take(self, count: int) -> Tensor:
        """The numbers of the next ``count`` examples; -1 for repeats."""
        places = torch.arange(self._seen, self._seen + count)
        self._seen += count
        numbers = places * self._stride + self._rank
        if self._end is not None:
            numbers[numbers >= self._end] = -1
        return numbers
