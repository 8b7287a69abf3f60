"""The stream of normal numbers: both generators, their statistics and their states."""

from __future__ import annotations

import copy
import math
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.native import library
from lightning_bnn.random import NormalStream
from tests.native.compiler import needs_compiler
from tests.random.normal_checks import check_distribution, check_moments


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "load", lambda: None)


def fill(stream: NormalStream, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return stream.fill_(torch.empty(*shape, dtype=dtype))


@needs_compiler
def test_the_compiled_numbers_are_standard_normal():
    numbers = fill(NormalStream(11), 1 << 22)
    check_moments(numbers, lags=(1, 2, 8, 15, 16, 17, 31, 32, 33, 64, 512, 4096))
    check_distribution(numbers)


@needs_compiler
def test_the_sphere_of_pairs_and_of_neighbours():
    """Directions of (z_i, z_{i+16}) and (z_i, z_{i+1}) are uniform: χ² of 64 sectors.

    A χ² of 63 degrees above 130 has probability 1e-6.
    """
    numbers = fill(NormalStream(13), 1 << 21).view(-1, 2, 16)
    pairs = {
        "of one transform": (numbers[:, 0], numbers[:, 1]),
        "of neighbouring lanes": (numbers[:, :, 0::2], numbers[:, :, 1::2]),
    }
    for name, (first, second) in pairs.items():
        angles = torch.atan2(first.double(), second.double()).flatten()
        counts = torch.histc(angles, 64, -math.pi, math.pi)
        expected = len(angles) / 64
        assert float(((counts - expected) ** 2 / expected).sum()) < 130, name


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 100])
def test_fills_any_number_and_nothing_else(count: int):
    room = torch.full((count + 64,), 7.0)
    NormalStream(1).fill_(room[32 : 32 + count])
    assert torch.equal(room[:32], torch.full((32,), 7.0))
    assert torch.equal(room[32 + count :], torch.full((32,), 7.0))
    assert not (room[32 : 32 + count] == 7.0).any()


def test_a_tensor_with_gaps_is_filled_as_a_whole_one():
    wide = torch.zeros(6, 10)
    NormalStream(2).fill_(wide[:, :5])
    assert torch.equal(wide[:, :5], fill(NormalStream(2), 6, 5))
    assert torch.equal(wide[:, 5:], torch.zeros(6, 5))


def test_streams_of_neighbouring_seeds_are_not_alike():
    rows = torch.stack([fill(NormalStream(seed), 4096) for seed in range(40)]).double()
    correlations = torch.corrcoef(rows) - torch.eye(40, dtype=torch.float64)
    # 780 pairs, 6 standard errors: a false alarm in 600,000
    assert correlations.abs().max() < 6 / 64


@needs_compiler
def test_keys_are_new_each_time_and_decided_by_the_seed():
    stream = NormalStream(3)
    keys = [stream.key() for _ in range(20)]
    numbers = [number for key in keys for number in key]
    assert len(set(numbers)) == 40
    assert all(0 <= number < 2**63 for number in numbers)
    assert NormalStream(3).key() == keys[0] != NormalStream(4).key()


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_torch_serves():
    assert NormalStream(9).key() is None
    expected = torch.empty(100).normal_(generator=torch.Generator().manual_seed(9))
    assert torch.equal(fill(NormalStream(9), 100), expected)


@needs_compiler
def test_a_compiled_stream_needs_its_compiler_to_go_on(monkeypatch: pytest.MonkeyPatch):
    stream = NormalStream(3)
    fill(stream, 5)
    monkeypatch.setattr(library, "load", lambda: None)
    for use in (lambda: fill(stream, 5), stream.key):
        with pytest.raises(ConfigurationError, match="Install a C compiler, or set LIGHTNING_BNN"):
            use()
    monkeypatch.setenv("LIGHTNING_BNN_COMPILE", "0")
    with pytest.warns(UserWarning, match="continues from PyTorch's generator"):
        fill(stream, 5)
    fill(stream, 5)
    assert stream.key() is None


def test_a_stream_begun_without_the_compiler_stays_so(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(library, "load", lambda: None)
        stream = NormalStream(3)
        fill(stream, 5)
        state = stream.state_dict()
        expected = fill(stream, 50)
    other = NormalStream(8)
    other.load_state_dict(state)
    assert other.key() is None
    assert torch.equal(fill(other, 50), expected)


def test_a_copy_continues_where_the_stream_was():
    """Also one for a spawned process, where a Generator is lost and memory of tensors is shared."""
    stream = NormalStream(seed=3)
    stream.fill_(torch.empty(5))
    stream.fill_(torch.empty(5, dtype=torch.float64))
    sent = ForkingPickler.dumps(stream)
    assert b"Generator" not in bytes(sent)
    copies = [ForkingPickler.loads(sent), copy.deepcopy(stream)]
    for dtype in (torch.float32, torch.float64):
        expected = stream.fill_(torch.empty(7, dtype=dtype))
        for other in copies:
            assert torch.equal(other.fill_(torch.empty(7, dtype=dtype)), expected)
