"""Calibration errors against torchmetrics and plain loops."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_calibration_error

from lightning_bnn.calibration.bins import BinSums, bin_sums, mass_edges, width_edges
from lightning_bnn.calibration.error import (
    expected_calibration_error,
    expected_calibration_errors,
)


def looped(stated, observed, edges) -> float:
    """The expected error, bin by bin from the rows themselves."""
    expected = 0.0
    for index, (low, high) in enumerate(pairwise(edges)):
        last = index == len(edges) - 2
        inside = [i for i, p in enumerate(stated) if low <= p and (p < high or last)]
        if inside:
            gap = abs(np.mean([stated[i] for i in inside]) - np.mean([observed[i] for i in inside]))
            expected += gap * len(inside) / len(stated)
    return expected


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.2, 0.5, 1.0]) | st.floats(0, 1), st.booleans()),
        min_size=1,
        max_size=60,
    ),
    st.integers(1, 20),
    st.booleans(),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_against_a_loop(rows, bins, by_mass):
    stated, observed = np.array([p for p, _ in rows]), np.array([y for _, y in rows], dtype=float)
    edges = mass_edges(stated, bins) if by_mass else width_edges(bins)
    sums = bin_sums(stated, observed, edges)
    expected = looped(stated, observed, edges)
    assert expected_calibration_error(sums) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("bins", [2, 15])
def test_against_torchmetrics(bins):
    generator = torch.Generator().manual_seed(bins)
    p = torch.rand(400, generator=generator, dtype=torch.float64)
    y = (torch.rand(400, generator=generator) < p**2).long()
    sums = bin_sums(p.numpy(), y.numpy(), width_edges(bins))
    theirs = binary_calibration_error(p, y, n_bins=bins, norm="l1").item()
    assert expected_calibration_error(sums) == pytest.approx(theirs, rel=1e-9)


def test_classwise_is_the_mean_of_each_class():
    generator = np.random.default_rng(1)
    p, y = generator.dirichlet(np.ones(5), size=200), generator.integers(4, size=200)
    sums = BinSums(width_edges(15), groups=5)
    sums.add_classes(p, y)
    each = [looped(p[:, k], y == k, width_edges(15)) for k in range(5)]  # class 4 never comes
    assert expected_calibration_error(sums) == pytest.approx(np.mean(each), rel=1e-12)


def test_nothing_stated_has_no_error():
    assert np.isnan(expected_calibration_error(BinSums(width_edges(3), groups=2)))


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
def test_replicates_against_rows_that_are_repeated(dtype, tolerance):
    generator = np.random.default_rng(2)
    stated, observed = generator.random(80), generator.integers(2, size=80)
    stated[:3] = 1.0
    weights = generator.multinomial(80, np.full(80, 1 / 80), size=30).astype(dtype)
    edges = width_edges(10)
    values = expected_calibration_errors(stated, observed, edges, weights)
    assert values.dtype == np.float64
    for value, drawn in zip(values, weights, strict=True):
        rows = np.repeat(np.arange(80), drawn.astype(int))
        assert value == pytest.approx(looped(stated[rows], observed[rows], edges), rel=tolerance)
