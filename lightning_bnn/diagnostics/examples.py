"""A few examples to watch a network's predictions at.

The same examples serve every draw, so they are chosen once: evenly over the data set where it can
be indexed (data are often sorted by class), else the first ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from lightning_bnn.checks import check_whole
from lightning_bnn.errors import DataError
from lightning_bnn.random import isolated_random_state
from lightning_bnn.strategies.base import batch_size
from lightning_bnn.target import split_batch

__all__ = [
    "Examples",
    "choose_examples",
    "choose_from_batch",
    "evenly_spaced",
    "inputs_and_targets",
]

# samplers that only reorder the data set, so that it may be indexed instead
_WHOLE = (SequentialSampler, RandomSampler, DistributedSampler)


@dataclass(frozen=True)
class Examples:
    """Inputs to watch, with their targets if they are known.

    Attributes:
        inputs: A tensor, a tuple of positional or a mapping of keyword arguments.
        targets: What the data loader gave for them, or None.
        indices: The place of each example in the data set or in the given batch.
    """

    inputs: Any
    targets: Any
    indices: tuple[int, ...]

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Examples:
        """The same examples on a device, floating inputs as ``dtype`` if it is given."""

        def moved(leaf: Tensor) -> Tensor:
            return leaf.to(device, dtype if leaf.is_floating_point() else None)

        inputs = tree_map_only(Tensor, moved, self.inputs)
        targets = tree_map_only(Tensor, lambda leaf: leaf.to(device), self.targets)
        return Examples(inputs, targets, self.indices)


def evenly_spaced(total: int, count: int) -> list[int]:
    """At most ``count`` numbers below ``total``, evenly spread from the first to the last.

    Example:
        >>> evenly_spaced(10, 4), evenly_spaced(3, 8)
        ([0, 3, 6, 9], [0, 1, 2])
    """
    if total <= count:
        return list(range(total))
    return [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]


def choose_examples(source: Any, count: int) -> Examples:
    """At most ``count`` examples of a loader, of a batch or of a tensor of inputs.

    Args:
        source: A loader of (inputs, targets) pairs or of inputs; one such pair; or inputs alone:
            a tensor, a mapping of keyword arguments, or a tuple that holds only them.
        count: How many.

    Example:
        >>> inputs, targets = torch.arange(10.0)[:, None], torch.arange(10)
        >>> choose_examples((inputs, targets), 4).targets
        tensor([0, 3, 6, 9])
    """
    check_whole("examples", count, 1)
    if isinstance(source, (Tensor, Mapping)) or _is_batch(source):
        inputs, targets = inputs_and_targets(source)
        return choose_from_batch(inputs, targets, count)
    if not isinstance(source, Iterable):
        raise DataError(
            f"The inputs to watch are a loader, or one batch; got {type(source).__name__}."
        )
    with isolated_random_state():  # loaders draw a seed, data sets may augment
        if _can_be_indexed(source):
            loader: Any = source
            chosen = evenly_spaced(len(loader.dataset), count)
            batch = loader.collate_fn([loader.dataset[index] for index in chosen])
            inputs, targets = inputs_and_targets(batch)
            return Examples(inputs, targets, tuple(chosen))
        batches, total = [], 0
        for batch in source:
            batches.append(inputs_and_targets(batch))
            total += batch_size(batches[-1][0]) or 0
            if total >= count:
                break
    if not batches:
        raise DataError("The loader of inputs to watch gave no batch.")
    return _take(tree_map(lambda *leaves: torch.cat(leaves), *batches), range(min(count, total)))


def choose_from_batch(inputs: Any, targets: Any, count: int) -> Examples:
    """At most ``count`` examples of a batch, evenly chosen."""
    return _take((inputs, targets), evenly_spaced(batch_size(inputs) or 0, count))


def _take(batch: tuple[Any, Any], chosen: Sequence[int]) -> Examples:
    if not chosen:
        raise DataError("The inputs to watch hold no example: no tensor with an axis of examples.")
    inputs, targets = tree_map_only(Tensor, lambda leaf: leaf[list(chosen)], batch)
    return Examples(inputs, targets, tuple(chosen))


def inputs_and_targets(batch: Any) -> tuple[Any, Any]:
    """The two parts of a batch; the targets are None where it holds inputs alone."""
    if isinstance(batch, (Tensor, Mapping)):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0], None  # as DataLoader(TensorDataset(x)) gives it
    return split_batch(batch)


def _is_batch(source: Any) -> bool:
    """Whether a sequence is one batch: a tuple, or a list such as a data loader gives.

    A list of pairs is a loader of batches.
    """
    if isinstance(source, list) and len(source) in (1, 2):
        return not all(isinstance(part, (tuple, list)) for part in source)
    return isinstance(source, tuple)


def _can_be_indexed(loader: Any) -> bool:
    whole = isinstance(getattr(loader, "sampler", None), _WHOLE)
    return whole and loader.batch_size is not None and hasattr(loader.dataset, "__getitem__")
