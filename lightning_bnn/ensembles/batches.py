"""What members see of the data: batches of their own, and the indices of the examples.

An ordinary training loader gives ``(inputs, targets)``, which all members share. Where members see
orders of their own, or where numbers belong to examples (bootstrap weights, noise of targets), the
loader's batches come as :class:`MemberBatch`. The indices are those that the loader's batch sampler
gave out, noted in the process that trains: batches come back in the order in which they were
asked for, so this holds with workers and prefetching too.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
)

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.random import isolated_random_state, mix_seeds

__all__ = [
    "MemberBatch",
    "MemberBatches",
    "as_member_batch",
    "has_indices",
    "subset_indices",
    "tensors_of",
]


class MemberBatch(NamedTuple):
    """A batch, with the places of its examples in the data set.

    A loader of your own may yield it, for example to give each member other data; that needs
    ``independent_batches=True``.

    Attributes:
        batch: What the loader gives. With batches of the members' own every tensor in it has a
            leading axis of members.
        indices: The indices of the examples in the data set, int64: ``(B,)``, or ``(M, B)`` with
            batches of their own; None where no option needs them.

    Example:
        >>> MemberBatch((torch.zeros(5, 2), torch.zeros(5)), torch.arange(5)).indices
        tensor([0, 1, 2, 3, 4])
    """

    batch: Any
    indices: Tensor | None = None


def has_indices(loader: Any) -> bool:
    """Whether a loader is a ``DataLoader`` that makes batches from indices of a data set.

    Example:
        >>> has_indices(DataLoader(range(4))), has_indices(DataLoader(range(4), batch_size=None))
        (True, False)
    """
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def subset_indices(loader: Any) -> Tensor | None:
    """The indices of all examples, over all ranks, where the sampler keeps to a part of the data.

    Example:
        >>> subset_indices(DataLoader(range(9), sampler=SubsetRandomSampler([3, 5])))
        tensor([3, 5])
        >>> subset_indices(DataLoader(range(9)))
    """
    sampler = getattr(loader.batch_sampler, "sampler", None)
    # under DDP Lightning puts the user's sampler inside a distributed one
    sampler = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
    if not isinstance(sampler, SubsetRandomSampler):
        return None
    return torch.tensor([int(index) for index in sampler.indices])


def as_member_batch(batch: Any, members: int, own: bool, indexed: str | None) -> MemberBatch:
    """A batch of the training loader as a MemberBatch, checked.

    Args:
        batch: What the loader gave.
        members: M.
        own: Whether members see batches of their own.
        indexed: The option that needs indices, if one does.

    Example:
        >>> as_member_batch((torch.zeros(5, 2), torch.zeros(5)), 3, own=False, indexed=None).indices
        >>> as_member_batch((torch.zeros(5, 2), torch.zeros(5)), 3, True, None)
        Traceback (most recent call last):
        lightning_bnn.errors.DataError: independent_batches=True needs a DataLoader that makes ...
    """
    known = isinstance(batch, MemberBatch)
    if (own and not known) or (indexed and (not known or batch.indices is None)):
        option = "independent_batches=True" if own and not known else indexed
        raise DataError(
            f"{option} needs a DataLoader that makes batches from indices of a data set (not an "
            "IterableDataset, not batch_size=None), or a loader that yields "
            f"lightning_bnn.ensembles.MemberBatch{' with indices' if indexed else ''}; got a batch "
            f"of type {type(batch).__name__}."
        )
    if not known:
        return MemberBatch(batch)
    if not own and batch.indices is None:
        raise DataError(
            "A MemberBatch without indices holds batches of the members' own, which needs "
            "independent_batches=True. Pass it, or let the loader yield the batch itself."
        )
    leading = {tuple(leaf.shape[:1]) for leaf in tensors_of(batch.batch)} if own else {(members,)}
    if leading != {(members,)}:
        raise DataError(
            f"With independent_batches=True every tensor of a batch has a leading axis of "
            f"{members} members; got leading axes {sorted(leading)}."
        )
    if batch.indices is not None and batch.indices.dim() != (2 if own else 1):
        raise DataError(
            f"The indices of a MemberBatch are of shape {'(M, B)' if own else '(B,)'} with "
            f"independent_batches={own}; got {tuple(batch.indices.shape)}."
        )
    return batch


class MemberBatches:
    """Opens a loader for an epoch: its batches as MemberBatch, in an order of each member's own.

    The order of a member is a function of its seed, the epoch and the rank, so that it is the same
    whichever other members run beside it. One set of worker processes serves all: the indices of
    all members' batches are fetched and collated as one large batch, which then is cut up. (A
    sampler that neither has a ``generator`` nor is distributed should draw what it draws
    when its iteration begins.)

    Args:
        loader: A ``DataLoader`` for which :func:`has_indices` holds.
        seeds: Gives the members' seeds; with None all members share the loader's own batches.

    Example:
        >>> loader = DataLoader(range(6), batch_size=2, shuffle=True)
        >>> batches = MemberBatches(loader, lambda: [7, 8, 9])
        >>> for batch, indices in batches(epoch=0, rank=0):
        ...     print(tuple(batch.shape), torch.equal(batch, indices))
        (3, 2) True
        (3, 2) True
        (3, 2) True
    """

    def __init__(self, loader: DataLoader, seeds: Callable[[], Sequence[int]] | None) -> None:
        if loader.num_workers and not loader.in_order:
            raise ConfigurationError(
                "The indices of a batch are known by the order in which batches come, and the "
                "DataLoader has in_order=False. Leave it out."
            )
        self._seeds = seeds
        self._plan = _Plan(loader.batch_sampler, len(loader.dataset))  # type: ignore[arg-type]
        # A loader forbids to set its batch sampler; a copy with another one is what is needed: the
        # same data set, workers and options.
        self._loader = copy.copy(loader)
        vars(self._loader).update(batch_sampler=self._plan, _iterator=None)

    def __call__(self, epoch: int, rank: int) -> Iterator[MemberBatch]:
        """The batches of an epoch on a rank."""
        self._plan.orders = None
        if self._seeds is not None:
            self._plan.orders = [
                (mix_seeds(seed, epoch, rank), mix_seeds(seed, epoch)) for seed in self._seeds()
            ]
        batches = iter(self._loader)
        asked = self._plan.asked
        for batch in batches:
            indices = _as_tensor(asked.popleft())
            if indices.dim() == 2:
                batch = _cut_up(batch, *indices.shape)
            yield MemberBatch(batch, indices)


class _Plan:
    """A batch sampler that notes what it gives out, for one order or for that of each member.

    Attributes:
        orders: A pair of seeds for each member: of this rank, and common to all ranks.
        asked: The indices that were given out and whose batch has not come yet.
    """

    def __init__(self, batches: Any, examples: int) -> None:
        self._batches, self._examples = batches, examples
        self.orders: list[tuple[int, int]] | None = None
        self.asked: deque[list[Any]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        asked = self.asked = deque()  # of this pass: an earlier one may have been left half way
        return self._shared(asked) if self.orders is None else self._own(asked, self.orders)

    def _shared(self, asked: deque[list[Any]]) -> Iterator[list[int]]:
        for indices in self._batches:
            indices = list(indices)
            asked.append(indices)
            yield indices

    def _own(self, asked: deque[list[Any]], orders: list[tuple[int, int]]) -> Iterator[list[int]]:
        passes = [_in_own_order(self._batches, own, common) for own, common in orders]
        for step, lists in enumerate(zip(*passes, strict=False)):
            if len({len(one) for one in lists}) > 1:
                raise ConfigurationError(
                    "independent_batches=True stacks the members' batches, which must be of one "
                    f"size; the batch sampler gave {[len(one) for one in lists]}."
                )
            if step == 0:
                self._check_orders(lists)
            asked.append(list(lists))
            yield [index for one in lists for index in one]

    def _check_orders(self, lists: Sequence[Sequence[Any]]) -> None:
        if len(lists) == 1 or any(one != lists[0] for one in lists):
            return
        chance = 1.0  # how likely a shuffle gives the same batch twice
        for place in range(len(lists[0])):
            chance /= max(1, self._examples - place)
        if chance < 1e-6:
            raise ConfigurationError(
                "independent_batches=True gives each member an order of its own, but the training "
                "loader does not shuffle: all members' batches are the same. Pass shuffle=True to "
                "the DataLoader, or leave independent_batches out."
            )


def _in_own_order(batches: Any, seed: int, common: int) -> Iterator[list[Any]]:
    """One pass over a batch sampler, in an order that a seed decides."""
    with isolated_random_state(seed):  # for samplers that draw from the global generators
        lists = iter(_reseeded(batches, seed, common))
        first = next(lists, None)
    if first is not None:
        yield list(first)
        yield from map(list, lists)


def _reseeded(sampler: Any, seed: int, common: int) -> Any:
    """A copy of a sampler, and of those in it, that draws from a generator of its own."""
    sampler = copy.copy(sampler)
    if isinstance(sampler, DistributedSampler):
        # all ranks take their shares of one order
        sampler.seed, sampler.epoch, seed = common, 0, common
        if hasattr(sampler.dataset, "_sampler"):  # Lightning's wrapper of a user's sampler
            wrapped: Any = copy.copy(sampler.dataset)
            wrapped._sampler = _reseeded(wrapped._sampler, common, common)
            sampler.dataset = wrapped
    elif hasattr(sampler, "generator"):
        sampler.generator = torch.Generator().manual_seed(seed)
    if isinstance(getattr(sampler, "sampler", None), Iterable):
        sampler.sampler = _reseeded(sampler.sampler, seed, common)
    return sampler


def _as_tensor(indices: list[Any]) -> Tensor:
    try:
        tensor = torch.tensor(indices)
    except (TypeError, ValueError) as error:
        tensor, reason = None, error
    if tensor is None or tensor.dtype != torch.int64:
        raise DataError(
            "The examples of the training data must have whole numbers as indices; the sampler "
            f"gave {indices!r:.80}."
        ) from (reason if tensor is None else None)
    return tensor


def _cut_up(batch: Any, members: int, size: int) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.shape[:1] != (members * size,):
            raise DataError(
                f"independent_batches=True collates the {members} members' batches of {size} as "
                f"one and cuts it up, so every tensor needs a leading axis of {members * size}; "
                f"got {tuple(leaf.shape)}. Check the collate function."
            )
        return leaf.unflatten(0, (members, size))

    return tree_map(one, batch)


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors in a batch; it may hold other things.

    Example:
        >>> tensors_of({"x": torch.ones(2), "note": None})
        [tensor([1., 1.])]
    """
    found: list[Tensor] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, batch)
    return found
