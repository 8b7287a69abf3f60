from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset

from lightning_bnn.diagnostics.examples import choose_examples
from lightning_bnn.errors import DataError

INPUTS = torch.arange(20.0)[:, None]
TARGETS = torch.arange(20)
DATA = TensorDataset(INPUTS, TARGETS)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(INPUTS, TARGETS, strict=True)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_gives_the_same_examples_each_time(shuffle: bool) -> None:
    loader = DataLoader(DATA, batch_size=3, shuffle=shuffle)
    before = torch.get_rng_state()
    for _ in range(2):
        chosen = choose_examples(loader, 5)
        assert chosen.indices == (0, 5, 10, 14, 19)
        assert chosen.targets.tolist() == list(chosen.indices)
        assert torch.equal(chosen.inputs, INPUTS[list(chosen.indices)])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), batch_size=3),
        [(INPUTS[:4], TARGETS[:4]), (INPUTS[4:8], TARGETS[4:8])],
    ],
    ids=["stream", "list"],
)
def test_other_loaders_give_their_first_examples(loader: Any) -> None:
    before = torch.get_rng_state()
    chosen = choose_examples(loader, 5)
    assert chosen.targets.tolist() == [0, 1, 2, 3, 4]
    assert chosen.inputs.shape == (5, 1)
    assert torch.equal(torch.get_rng_state(), before)
    everything = choose_examples(loader, 50).inputs  # fewer than asked for
    assert torch.equal(everything, INPUTS[: len(everything)])


def test_a_sampler_that_keeps_to_a_part_is_obeyed() -> None:
    loader = DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler([3, 4, 5]))
    assert set(choose_examples(loader, 20).targets.tolist()) == {3, 4, 5}


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: [x]])
def test_inputs_alone(wrap: Any) -> None:
    chosen = choose_examples(wrap(INPUTS), 2)
    assert chosen.inputs.tolist() == [[0.0], [19.0]]
    assert chosen.targets is None
    loader = DataLoader(TensorDataset(INPUTS), batch_size=4)
    assert choose_examples(loader, 2).targets is None


def test_inputs_of_several_tensors() -> None:
    named = choose_examples({"a": INPUTS, "b": INPUTS + 1}, 2)
    assert named.inputs["b"].tolist() == [[1.0], [20.0]]
    pair = choose_examples(((INPUTS, INPUTS + 1), TARGETS), 2)
    assert pair.inputs[1].tolist() == [[1.0], [20.0]]
    assert pair.targets.tolist() == [0, 19]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "gave no batch"),
        ((INPUTS, TARGETS, TARGETS), "pair"),
    ],
)
def test_what_cannot_be_watched(source: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        choose_examples(source, 4)
