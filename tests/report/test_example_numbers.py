"""Numbers of examples: every one once, whatever the sampler does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
)

from lightning_bnn.report.example_numbers import ExampleNumbers, distributed_sampler
from lightning_bnn.strategies.resume import ResumableLoader


def collected(loaders: list[Any]) -> tuple[list[int], list[int]]:
    """The numbers and the values of what counts, over all processes."""
    numbers, values = [], []
    for rank, loader in enumerate(loaders):
        count = ExampleNumbers(loader, rank, len(loaders))
        for batch in loader:
            found = count.take(len(batch))
            numbers += found[found >= 0].tolist()
            values += batch[found >= 0].tolist()
    return numbers, values


@given(
    examples=st.integers(1, 30),
    world=st.integers(1, 5),
    batch=st.integers(1, 7),
    shuffle=st.booleans(),
    own_batches=st.booleans(),
    resumable=st.booleans(),
)
def test_every_example_counts_once(
    examples: int, world: int, batch: int, shuffle: bool, own_batches: bool, resumable: bool
) -> None:
    data = torch.arange(examples)
    loaders: list[Any] = []
    for rank in range(world):
        sampler = DistributedSampler(data, world, rank, shuffle=shuffle, seed=3)
        if own_batches:
            loader: Any = DataLoader(data, batch_sampler=BatchSampler(sampler, batch, False))
        else:
            loader = DataLoader(data, batch_size=batch, sampler=sampler)
        loaders.append(ResumableLoader(loader, seed=1) if resumable else loader)
    numbers, values = collected(loaders)
    assert sorted(numbers) == list(range(examples))
    if shuffle:
        assert sorted(values) == list(range(examples))
    else:
        assert numbers == values  # the place in the data


@pytest.mark.parametrize("drop_last", [False, True])
def test_dropping_the_last(drop_last: bool) -> None:
    """A sampler that drops has no repeats; batches that are dropped were never seen."""
    data = torch.arange(11)
    samplers = [DistributedSampler(data, 2, r, shuffle=False, drop_last=True) for r in (0, 1)]
    loaders = [DataLoader(data, 2, sampler=s, drop_last=drop_last) for s in samplers]
    numbers, values = collected(loaders)
    assert numbers == values
    assert sorted(values) == list(range(8 if drop_last else 10))


def test_lightnings_own_samplers() -> None:
    data = torch.arange(11)
    unrepeated = [
        DataLoader(data, 2, sampler=UnrepeatedDistributedSampler(data, 2, r, shuffle=False))
        for r in (0, 1)
    ]
    assert sorted(collected(unrepeated)[1]) == list(range(11))
    wrapped = []
    for rank in (0, 1):
        torch.manual_seed(0)  # a random sampler draws anew in each process
        inner = SubsetRandomSampler(range(7), generator=torch.Generator().manual_seed(1))
        sampler = DistributedSamplerWrapper(inner, num_replicas=2, rank=rank, shuffle=False)
        wrapped.append(DataLoader(data, 2, sampler=sampler))
    numbers, values = collected(wrapped)
    assert sorted(numbers) == sorted(values) == list(range(7))


class _Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(5))


def test_others_count_on() -> None:
    loaders = [DataLoader(_Stream(), 2), DataLoader(_Stream(), 2)]
    assert distributed_sampler(loaders[0]) is None
    numbers, _ = collected(loaders)
    assert sorted(numbers) == list(range(10))  # ten different ones
    assert collected([DataLoader(_Stream(), 2)])[0] == list(range(5))
