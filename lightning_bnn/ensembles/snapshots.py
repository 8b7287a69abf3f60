r"""Snapshot ensembles: the weights at the end of each cycle of the learning rate.

Training of T steps is cut into C cycles, as equal as whole steps allow. In step t = 0, 1, ... of a
cycle of L steps the learning rate is

.. math:: \eta_t = \frac{\eta_0}{2}\left[\cos\frac{\pi t}{L} + 1\right],

so that each cycle begins with large steps, which leave the last minimum, and ends near another
one, whose weights are kept. (Huang et al., 2017, *Snapshot Ensembles: Train 1, Get M for Free*.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_bnn.checks import check_whole
from lightning_bnn.errors import ConfigurationError

__all__ = ["SnapshotStore", "cycle_ends", "cycle_factor"]


def cycle_ends(total: float, cycles: int) -> list[int]:
    """After how many steps each cycle ends; the last ends with the training.

    Example:
        >>> cycle_ends(10, 3)
        [3, 6, 10]
    """
    if not math.isfinite(total) or total < 0:
        raise ConfigurationError(
            "snapshots= cuts the whole training into cycles of the learning rate, and its length "
            "is not known. Pass max_epochs= or max_steps= to the trainer; where the training data "
            "have no length, max_steps=."
        )
    if cycles > total:
        raise ConfigurationError(
            f"snapshots={cycles} needs a cycle of at least one step for each, and the training has "
            f"{int(total)} steps. Train longer or take fewer snapshots."
        )
    return [(cycle + 1) * int(total) // cycles for cycle in range(cycles)]


def cycle_factor(step: int, ends: Sequence[int]) -> float:
    """The share of the learning rate in a step, counted from 0.

    Example:
        >>> [round(cycle_factor(step, [2, 4]), 3) for step in range(4)]
        [1.0, 0.5, 1.0, 0.5]
    """
    cycle = bisect_right(ends, step)
    if cycle == len(ends):  # after the last step
        return 0.0
    start = ends[cycle - 1] if cycle else 0
    return (math.cos(math.pi * (step - start) / (ends[cycle] - start)) + 1) / 2


class SnapshotStore(nn.Module):
    """Copies of named tensors, one for each cycle, as buffers: a checkpoint holds them.

    Args:
        cycles: C, the number of snapshots there will be.
        tensors: Tensors as they will be kept.

    Example:
        >>> store = SnapshotStore(2, {"weights": torch.zeros(3)})
        >>> store.keep({"weights": torch.ones(3)})
        >>> len(store), store.snapshots()[0]["weights"]
        (1, tensor([1., 1., 1.]))
    """

    taken: Tensor

    same_on_all_ranks = True

    def __init__(self, cycles: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.cycles = check_whole("snapshots", cycles, 1)
        self._names = list(tensors)
        for index, tensor in enumerate(tensors.values()):
            room = tensor.new_zeros(cycles, *tensor.shape)
            self.register_buffer(f"kept_{index}", room)
        self.register_buffer("taken", torch.zeros((), dtype=torch.int64))

    def __len__(self) -> int:
        return int(self.taken)

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors into the next free place."""
        for index, name in enumerate(self._names):
            self.get_buffer(f"kept_{index}")[len(self)] = tensors[name].detach()
        self.taken += 1

    def clear(self) -> None:
        """Begin anew."""
        self.taken.zero_()

    def snapshots(self) -> list[dict[str, Tensor]]:
        """The snapshots taken so far; they are views."""
        return [
            {name: self.get_buffer(f"kept_{i}")[cycle] for i, name in enumerate(self._names)}
            for cycle in range(len(self))
        ]
