"""Batches into statistics: shares of processes, random numbers left alone."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from pytorch_lightning.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lightning_bnn.predictive import CategoricalPredictive
from lightning_bnn.report.gather import (
    ExampleNumbers,
    add,
    distributed_sampler,
    numbered_batches,
    progress,
    undisturbed,
)
from lightning_bnn.report.statistics import Statistics
from lightning_bnn.strategies.resume import ResumableLoader


@settings(max_examples=30)
@given(
    examples=st.integers(1, 25), size=st.integers(1, 6), world=st.integers(1, 4), limit=st.just(3)
)
def test_processes_share_batches(examples: int, size: int, world: int, limit: int) -> None:
    data = torch.arange(examples)
    for most in (float("inf"), limit):
        found = [
            pair
            for rank in range(world)
            for batch, number in numbered_batches(DataLoader(data, size), rank, world, most)
            for pair in zip(batch.tolist(), number(len(batch)).tolist(), strict=True)
        ]
        seen = min(examples, size * limit) if most == limit else examples
        assert sorted(found) == [(value, value) for value in range(seen)]


def test_nobodys_random_numbers_move() -> None:
    generator, inner = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    data = TensorDataset(torch.arange(20))
    sampler = RandomSampler(data, generator=inner)
    loader = DataLoader(data, 4, sampler=sampler, generator=generator)
    states = [torch.get_rng_state(), generator.get_state(), inner.get_state()]
    numpy, python = np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    orders = []
    for _ in range(2):
        with undisturbed(loader):
            orders.append(torch.cat([batch[0] for batch in loader]))
            np.random.rand(), random.random(), torch.rand(1)  # noqa: NPY002
    assert torch.equal(*orders)  # the same each time
    for before, after in zip(
        states, [torch.get_rng_state(), generator.get_state(), inner.get_state()], strict=True
    ):
        assert torch.equal(before, after)
    assert np.random.get_state()[1].tolist() == numpy  # noqa: NPY002
    assert random.getstate() == python


def test_repeats_are_left_out() -> None:
    logits = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(6) % 3
    numbers = torch.tensor([4, -1, 0, 9, -1, 2])
    kept = numbers >= 0
    whole, part = Statistics(bins=2), Statistics(bins=2)
    add(whole, CategoricalPredictive(logits), numbers, targets, torch.zeros(6, 1, 4, 4))
    add(part, CategoricalPredictive(logits[:, kept]), numbers[kept], targets[kept])
    assert whole.examples == part.examples == 4
    assert whole.sums.mean("nll") == pytest.approx(part.sums.mean("nll"), abs=1e-12)
    add(whole, CategoricalPredictive(logits), torch.full((6,), -1), targets)
    assert whole.examples == 4  # nothing but repeats

    outside, other = Statistics(), Statistics()
    add(outside, CategoricalPredictive(logits), numbers)
    add(outside, CategoricalPredictive(logits), torch.full((6,), -1))
    add(other, CategoricalPredictive(logits[:, kept]), numbers[kept])
    assert outside.examples == other.examples == 4


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


@settings(max_examples=30)
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_shows_long_work_on_a_terminal(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)

    def slow() -> Iterator[int]:
        for index in range(3):
            time.sleep(0.6)
            yield index

    assert list(progress(slow(), "report: test data", 3)) == [0, 1, 2]
    assert ("report: test data" in shown.getvalue()) == terminal
    assert shown.getvalue() == "" or "2/3" in shown.getvalue()
    quick = Terminal()
    monkeypatch.setattr("sys.stderr", quick)
    assert list(progress([1, 2], "report: test data", 2)) == [1, 2]
    assert quick.getvalue().strip() == ""
