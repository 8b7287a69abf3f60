"""The histogram of ratios, against counts made one by one in plain Python."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bnn.pruning import histogram
from lightning_bnn.pruning.histogram import SNRHistogram, snr_histogram

RATIOS = st.one_of(
    st.sampled_from([0.0, 1.0, 10.0, 0.1, math.inf, 1e-40, 1e30]),
    st.floats(1e-12, 1e12, allow_nan=False),
)


def count_by_hand(made: SNRHistogram, values: list[float]) -> tuple[list[int], int, int, int]:
    """Counts of each bin, below, above, and at zero."""
    counts, below, above, zero = [0] * (len(made.log10_edges) - 1), 0, 0, 0
    for value in values:
        if value == 0:
            zero += 1
            continue
        place = math.log10(value) if value < math.inf else math.inf
        if place < made.log10_edges[0]:
            below += 1
        elif place > made.log10_edges[-1]:
            above += 1
        else:
            fitting = [i for i in range(len(counts)) if made.log10_edges[i] <= place]
            counts[fitting[-1]] += 1
    return counts, below, above, zero


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(RATIOS, min_size=1, max_size=30), min_size=1, max_size=4),
    st.sampled_from([2, 3, 7, 60]),
)
def test_counts_are_exact(layers: list[list[float]], bins: int) -> None:
    snr = {str(i): torch.tensor(values, dtype=torch.float64) for i, values in enumerate(layers)}
    made = snr_histogram(snr, bins)
    flat = [value for values in layers for value in values]
    assert (list(made.counts), made.below, made.above, made.zero) == count_by_hand(made, flat)
    assert sum(layer.total for layer in made.layers) == len(flat)
    assert 1 <= len(made.counts) <= bins
    assert list(made.log10_edges) == sorted(set(made.log10_edges))
    for layer, values in zip(made.layers, layers, strict=True):
        assert list(layer.counts) == count_by_hand(made, values)[0]
        assert layer.total == len(values)
        median = statistics.median(values)
        assert layer.median == (pytest.approx(median) if median < math.inf else None)


def test_edges_are_round_and_cover_the_middle() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200_000, generator=generator).mul(0.7).sub(0.4)  # log10 of the ratios
    made = snr_histogram({"w": (10**values).view(400, 500)})
    low, high = torch.quantile(values.double(), torch.tensor([0.001, 0.999]).double()).tolist()
    step = made.log10_edges[1] - made.log10_edges[0]
    assert step == pytest.approx(0.1)  # 4.3 powers of ten: 0.05 would need 87 bins
    assert all(math.isclose(edge * 10, round(edge * 10), abs_tol=1e-9) for edge in made.log10_edges)
    assert low - step - 1e-4 <= made.log10_edges[0] <= low + 1e-4
    assert high - 1e-4 <= made.log10_edges[-1] <= high + step + 1e-4
    # beyond both ends lie no more than the two tails of 0.1 %, and a little rounding of them
    assert 0 < made.below <= 201
    assert 0 < made.above <= 201


def test_many_ratios_take_edges_from_some(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    snr = {name: torch.rand(501, generator=generator).mul(6).sub(3).exp() for name in "ab"}
    whole = snr_histogram(snr)
    monkeypatch.setattr(histogram, "_MOST_FOR_EDGES", 100)
    sparse = snr_histogram(snr)
    assert abs(sparse.log10_edges[0] - whole.log10_edges[0]) < 0.1
    flat = torch.cat([*snr.values()]).double().tolist()
    assert (list(sparse.counts), sparse.below, sparse.above, 0) == count_by_hand(sparse, flat)


def test_odd_ratios() -> None:
    same = snr_histogram({"w": torch.full((7,), 2.0)})
    assert sum(same.counts) == 7
    assert same.log10_edges[-1] - same.log10_edges[0] == pytest.approx(1.0, abs=0.05)
    nothing = snr_histogram({"w": torch.tensor([0.0, math.inf, 0.0])})
    assert (sum(nothing.counts), nothing.zero, nothing.above, nothing.below) == (0, 2, 1, 0)
    tiny = snr_histogram({"w": torch.tensor([1e-300, 1.0], dtype=torch.float64)})
    assert tiny.zero == 0  # not rounded to zero on the way
    half = snr_histogram({"w": torch.tensor([0.5, 2.0], dtype=torch.float16)})
    assert sum(half.counts) == 2


def test_weights_that_are_all_but_zero_leave_room_for_the_others() -> None:
    """Those of pixels that are always black decay to 1e-35 and less."""
    dead, alive = torch.full((300,), 1e-35), torch.logspace(-2, 1, 700)
    made = snr_histogram({"weight": torch.cat([dead, alive])}, bins=40)
    assert made.log10_edges[-1] - made.log10_edges[0] <= 6
    assert (made.below, made.zero, sum(made.counts)) == (300, 0, 700)
