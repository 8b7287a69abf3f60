"""Numbers by hashing: the generator they are made of, and their distribution.

The seeds are fixed. A statistic is called wrong where it lies more than 4.5 standard errors off,
which happens by chance in about 7 of a million cases; some tens of them are looked at here.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from lightning_bnn.random.hashing import exponentials, normals, stream_seeds, uniforms

SEEDS = torch.tensor([11, 12, 2**62 + 5, 0])
COUNT = 20_000
NOT_BY_CHANCE = 4.5


def split_mix(seed: int, place: int) -> int:
    """SplitMix64 in Python's own integers: the output after ``place + 1`` steps from a seed."""
    word = 2**64 - 1
    z = (seed + (place + 1) * 0x9E3779B97F4A7C15) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    return z ^ (z >> 31)


def test_it_is_split_mix() -> None:
    """The known first outputs from the seed 1234567, and ours made of two rounds of it."""
    assert split_mix(1234567, 0) == 6457827717110365317
    assert split_mix(1234567, 1) == 3203168211198807973
    numbers = uniforms(SEEDS, torch.tensor([0, 7, 123456]), 2)
    for m, seed in enumerate(SEEDS.tolist()):
        for b, index in enumerate([0, 7, 123456]):
            for c in range(2):
                word = split_mix(split_mix(seed, index), c)
                assert numbers[m, b, c].item() == ((word >> 11) + 0.5) / 2**53


@pytest.mark.parametrize(
    ("numbers", "distribution"),
    [
        (lambda: uniforms(SEEDS, torch.arange(COUNT)).squeeze(-1), "uniform"),
        (lambda: exponentials(SEEDS, torch.arange(COUNT)), "expon"),
        (lambda: normals(SEEDS, torch.arange(COUNT)).squeeze(-1), "norm"),
        (lambda: normals(SEEDS, torch.arange(COUNT), 3)[..., 1], "norm"),
        (lambda: normals(SEEDS, torch.arange(COUNT), 3)[..., 2], "norm"),
    ],
)
def test_distribution(numbers: object, distribution: str) -> None:
    for row in numbers():  # type: ignore[operator]
        assert stats.kstest(row.numpy(), distribution).pvalue > 7e-6


def correlation(one: Tensor, other: Tensor) -> float:
    return torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].item()


def test_no_correlation_between_members_neighbours_columns_and_streams() -> None:
    numbers = normals(SEEDS, torch.arange(COUNT), 3)
    other = normals(stream_seeds(SEEDS, 4), torch.arange(COUNT), 3)
    pairs = [(numbers[m], numbers[m + 1]) for m in range(3)]
    pairs += [(numbers[:, :-1], numbers[:, 1:]), (numbers, other)]
    pairs += [(numbers[..., c], numbers[..., (c + 1) % 3]) for c in range(3)]
    pairs += [(one.abs(), two.abs()) for one, two in pairs]
    for one, two in pairs:
        assert abs(correlation(one, two)) < NOT_BY_CHANCE / math.sqrt(one.numel())


def test_numbers_belong_to_member_and_example() -> None:
    whole = normals(SEEDS, torch.arange(100), 3)
    order = torch.randperm(100)
    assert torch.equal(normals(SEEDS, order, 3), whole[:, order])
    assert torch.equal(normals(SEEDS[2:3], torch.tensor([42]), 3), whole[2:3, 42:43])
    own = torch.stack([torch.randperm(100) for _ in SEEDS])
    expected = torch.stack([whole[m, own[m]] for m in range(len(SEEDS))])
    assert torch.equal(normals(SEEDS, own, 3), expected)
