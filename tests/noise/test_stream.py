"""The stream of normal numbers: both generators, their statistics and their states."""

from __future__ import annotations

import copy
import ctypes
import io
import math
import subprocess
from pathlib import Path

import pytest
import torch

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.noise import NormalStream, compiled
from lightning_bnn.noise.stream import lane_words

needs_compiler = pytest.mark.skipif(compiled.load() is None, reason="needs a C compiler")


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "load", lambda: None)


def fill(stream: NormalStream, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return stream.fill_(torch.empty(*shape, dtype=dtype))


@needs_compiler
def test_moments_of_the_compiled_numbers():
    """Moments 1 to 6, and products at lags that the lanes and the pairs could tie together.

    Every figure has its exact standard error under independence; 5 of them in 30 figures is a
    false alarm in 60,000.
    """
    n = 1 << 22
    numbers = fill(NormalStream(11), n).double()
    moments = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96), 5: (0, 945), 6: (15, 10170)}
    for power, (mean, variance) in moments.items():
        score = ((numbers**power).mean() - mean) / math.sqrt(variance / n)
        assert abs(score) < 5, f"moment {power}: {score:.1f} standard errors"
    squares = (numbers**2 - 1) / math.sqrt(2)
    for lag in (1, 2, 8, 15, 16, 17, 31, 32, 33, 64, 512, 4096):
        for kind, values in (("values", numbers), ("squares", squares)):
            score = (values[:-lag] * values[lag:]).mean() * math.sqrt(n - lag)
            assert abs(score) < 5, f"{kind} at lag {lag}: {score:.1f} standard errors"


@needs_compiler
def test_distribution_of_the_compiled_numbers():
    """Kolmogorov's distance to the normal law, and the counts in the tails.

    The distance exceeds 2.5/√n with probability 2·exp(−12.5) = 7e-6; each tail count is
    within 5 standard errors.
    """
    n = 1 << 22
    numbers = fill(NormalStream(12), n).double().sort().values
    ideal = torch.special.ndtr(numbers)
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    distance = torch.maximum((steps - ideal).abs(), (steps - 1 / n - ideal).abs()).max()
    assert distance < 2.5 / math.sqrt(n)
    for bound in (3.0, 3.5, 4.0, 4.5):
        expected = n * math.erfc(bound / math.sqrt(2)) / 2
        for count in ((numbers > bound).sum(), (numbers < -bound).sum()):
            assert abs(count - expected) < 5 * math.sqrt(expected) + 1


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


@needs_compiler
def test_every_build_gives_the_same_bits(tmp_path: Path):
    source = Path(compiled.__file__).with_name("normal.c")
    expected = fill(NormalStream(5), 10_007)
    for index, flags in enumerate((["-O0"], ["-O2"], ["-O3", "-march=native"])):
        library = tmp_path / f"{index}.so"
        command = ["cc", *compiled._FLAGS, *flags, str(source), "-o", str(library), "-lm"]
        subprocess.run(command, check=True, capture_output=True)
        function = ctypes.CDLL(str(library)).lightning_bnn_fill_normal
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        numbers, state = torch.empty(10_007), lane_words(5)
        function(numbers.data_ptr(), numbers.numel(), state.data_ptr())
        assert torch.equal(numbers, expected), flags


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


def test_autograd_hears_of_the_change():
    tensor = torch.ones(5)
    version = tensor._version
    NormalStream(1).fill_(tensor)
    assert tensor._version > version


def states_of_both_dtypes(stream: NormalStream) -> tuple[torch.Tensor, torch.Tensor, int]:
    return fill(stream, 50), fill(stream, 7, dtype=torch.float64), stream.integer()


def test_the_state_goes_on_for_every_kind_of_number():
    stream = NormalStream(3)
    states_of_both_dtypes(stream)
    file = io.BytesIO()
    torch.save(stream.state_dict(), file)
    file.seek(0)
    other = NormalStream(4)
    other.load_state_dict(torch.load(file, weights_only=True))
    clone = copy.deepcopy(stream)
    expected = states_of_both_dtypes(stream)
    for again in (other, clone):
        numbers, doubles, integer = states_of_both_dtypes(again)
        assert torch.equal(numbers, expected[0])
        assert torch.equal(doubles, expected[1])
        assert integer == expected[2]


def test_streams_of_neighbouring_seeds_are_not_alike():
    rows = torch.stack([fill(NormalStream(seed), 4096) for seed in range(40)]).double()
    correlations = torch.corrcoef(rows) - torch.eye(40, dtype=torch.float64)
    # 780 pairs, 6 standard errors: a false alarm in 600,000
    assert correlations.abs().max() < 6 / 64


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_torch_serves():
    expected = torch.empty(100).normal_(generator=torch.Generator().manual_seed(9))
    assert torch.equal(fill(NormalStream(9), 100), expected)


@needs_compiler
def test_a_compiled_stream_needs_its_compiler_to_go_on(monkeypatch: pytest.MonkeyPatch):
    stream = NormalStream(3)
    fill(stream, 5)
    monkeypatch.setattr(compiled, "load", lambda: None)
    with pytest.raises(ConfigurationError, match="Install a C compiler, or set LIGHTNING_BNN"):
        fill(stream, 5)
    monkeypatch.setenv("LIGHTNING_BNN_COMPILE", "0")
    with pytest.warns(UserWarning, match="goes on from PyTorch's generator"):
        fill(stream, 5)
    fill(stream, 5)


def test_a_stream_begun_without_the_compiler_stays_so(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr(compiled, "load", lambda: None)
        stream = NormalStream(3)
        fill(stream, 5)
        state = stream.state_dict()
        expected = fill(stream, 50)
    other = NormalStream(8)
    other.load_state_dict(state)
    assert torch.equal(fill(other, 50), expected)
