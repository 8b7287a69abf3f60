"""The sample: bounded, uniform, and the same however the rows were split and ordered."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lightning_bnn.report.sample import Sample, priorities


def filled(order, batch, keep):
    sample = Sample(keep)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        sample.add(
            rows, np.zeros(len(rows), np.int64), {"x": rows * 2.0, "m": np.stack([rows] * 3, 1)}
        )
    return sample


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 300),
    keep=st.integers(1, 120),
    batch=st.integers(1, 90),
    parts=st.integers(1, 4),
    seed=st.integers(0, 10_000),
)
def test_any_split_in_any_order_keeps_the_same(count, keep, batch, parts, seed):
    order = np.random.default_rng(seed).permutation(count)
    whole = filled(np.arange(count), count, keep)
    merged = Sample(keep)
    for part in np.array_split(order, parts):
        merged.merge(pickle.loads(pickle.dumps(filled(part, batch, keep))))
    smallest = np.sort(np.argsort(priorities(np.arange(count), np.zeros(count, int)))[:keep])
    for sample in (whole, merged):
        assert len(sample) == min(count, keep)
        np.testing.assert_array_equal(sample.example, smallest)
        np.testing.assert_array_equal(sample["x"], smallest * 2.0)
        np.testing.assert_array_equal(sample["m"][:, 2], smallest)


def test_it_is_uniform_over_rows_of_long_examples_too():
    """Chi-square over examples of 100 rows, false alarm 1e-4 for the fixed hash."""
    example = np.repeat(np.arange(50), 100)
    sample = Sample(1000)
    sample.add(example, np.tile(np.arange(100), 50), {})
    counts = np.bincount(sample.example, minlength=50)
    assert counts.sum() == 1000
    assert stats.chisquare(counts).pvalue > 1e-4
    assert counts.max() < 50  # no example has its rows kept as a block


def test_memory_is_bounded_and_what_cannot_be_kept_is_refused():
    sample = Sample(100)
    for start in range(0, 20_000, 250):
        rows = np.arange(start, start + 250)
        sample.add(rows, np.zeros(250, np.int64), {"x": rows})
        assert sum(len(part["x"]) for part in sample._parts) <= 200
    admitted = sample.admits(np.arange(20_000, 40_000), np.zeros(20_000, np.int64))
    assert admitted.mean() == pytest.approx(100 / 20_000, abs=0.01)
