"""Bins against plain loops, scikit-learn's curve and SciPy's binomial distribution."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.calibration import calibration_curve

from lightning_bnn.calibration.bins import (
    BinSums,
    bin_index,
    bin_sums,
    mass_edges,
    outside_band,
    reliability_curve,
    width_edges,
)

NAMES = ("count", "stated", "observed", "stated_squared", "stated_observed")


def statements(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    stated = generator.beta(2, 0.7, size=count)
    return stated, (generator.random(count) < stated).astype(float)


def place_of(value: float, edges: np.ndarray) -> int:
    """Find the bin by looking at one after the other."""
    bins = len(edges) - 1
    for index in range(bins):
        if value < edges[index + 1]:
            return index
    return bins - 1


# ------------------------------------------------------------------ edges


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]) | st.floats(0, 1), min_size=1, max_size=40),
    st.integers(1, 20),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_equal_mass_edges_increase_and_hold_all_values(values, bins):
    values = np.array(values)
    edges = mass_edges(values, bins)
    if len(edges) == bins + 1 and len(values) % bins == 0 and len(set(values)) == len(values):
        assert set(np.bincount(bin_index(values, edges))) == {len(values) // bins}
    assert 2 <= len(edges) <= min(bins, len(values)) + 1
    assert (np.diff(edges) > 0).all()
    assert edges[0] <= values.min()
    assert values.max() <= edges[-1]


@pytest.mark.parametrize("only", [0.0, 0.3, 1.0])
def test_equal_values_share_one_bin_inside_of_the_unit_interval(only):
    edges = mass_edges(np.full(7, only), 5)
    assert len(edges) == 2
    assert 0 <= edges[0] <= only <= edges[1] <= 1
    assert bin_sums(np.full(7, only), np.ones(7), edges).count.tolist() == [[7]]


@given(st.lists(st.floats(-0.5, 1.5), max_size=30), st.integers(1, 30))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_index_against_a_walk(values, bins):
    edges = width_edges(bins)
    slack = 1e-5 / bins  # below an edge by less than that is on it
    values = [*values, *edges, *(edges - 1.01 * slack), *np.nextafter(edges, 2)]
    expected = [place_of(value + slack, edges) for value in values]
    assert bin_index(np.array(values), edges).tolist() == expected
    rounded = [*np.nextafter(edges, -1), *edges.astype(np.float32).astype(float)]
    assert bin_index(np.array(rounded), edges).tolist() == 2 * [*range(bins), bins - 1]


# ------------------------------------------------------------------ sums


def looped(stated, observed, group, edges, groups):
    sums = {name: np.zeros((groups, len(edges) - 1)) for name in NAMES}
    for p, y, g in zip(stated, observed, group, strict=True):
        place = g, place_of(p, edges)
        for name, term in zip(NAMES, (1, p, y, p * p, p * y), strict=True):
            sums[name][place] += term
    return sums


@pytest.mark.parametrize("bins", [1, 6, 15])
def test_sums_against_a_loop(bins):
    stated, observed = statements(300)
    stated[:5], stated[5:9] = 1.0, 0.0
    group = np.random.default_rng(1).integers(3, size=300)
    sums = BinSums(width_edges(bins), groups=3)
    for part in np.array_split(np.arange(300), 4):  # in batches
        sums.add(stated[part], observed[part], group[part])
    expected = looped(stated, observed, group, sums.edges, 3)
    for name in NAMES:
        np.testing.assert_allclose(getattr(sums, name), expected[name], rtol=1e-12)
    assert sums.count.dtype == np.int64


def test_classes_are_groups():
    generator = np.random.default_rng(2)
    probabilities = generator.dirichlet(np.full(4, 0.3), size=120)
    probabilities[0] = [1, 0, 0, 0]
    targets = generator.integers(4, size=120)
    sums, expected = BinSums(width_edges(7), groups=4), BinSums(width_edges(7), groups=4)
    sums.add_classes(probabilities, targets)
    for label in range(4):
        expected.add(probabilities[:, label], targets == label, group=label)
    for name in NAMES:
        np.testing.assert_allclose(getattr(sums, name), getattr(expected, name), rtol=1e-12)


def test_merged_parts_are_the_whole_even_after_a_journey():
    stated, observed = statements(200)
    whole = bin_sums(stated, observed, width_edges(15))
    first = bin_sums(stated[:70], observed[:70], width_edges(15))
    second = bin_sums(stated[70:], observed[70:], width_edges(15))
    first += pickle.loads(pickle.dumps(second))
    first += BinSums(width_edges(15))  # a process without data
    for name in NAMES:
        np.testing.assert_allclose(getattr(first, name), getattr(whole, name), rtol=1e-12)


# ------------------------------------------------------------------ the curve


@pytest.mark.parametrize("bins", [1, 5, 15])
@pytest.mark.parametrize("strategy", ["uniform", "quantile"])
def test_curve_against_scikit_learn(bins, strategy):
    stated, observed = statements(500, seed=3)
    edges = width_edges(bins) if strategy == "uniform" else mass_edges(stated, bins)
    curve = reliability_curve(bin_sums(stated, observed, edges))
    theirs = calibration_curve(observed, stated, n_bins=bins, strategy=strategy)
    full = curve["count"] > 0
    np.testing.assert_allclose(curve["observed"][full], theirs[0], rtol=1e-12)
    np.testing.assert_allclose(curve["stated"][full], theirs[1], rtol=1e-12)
    assert np.isnan(curve["observed"][~full]).all()


def test_band_is_shared_by_the_bins_that_are_not_empty():
    stated = np.repeat([0.1, 0.5, 0.9], 100)
    curve = reliability_curve(bin_sums(stated, stated > 2, width_edges(15)), level=0.97)
    full = curve["count"] > 0
    low, high = np.round(100 * curve["lower"][full]), np.round(100 * curve["upper"][full])
    binomial, tail = stats.binom(100, [0.1, 0.5, 0.9]), 0.005
    # no more than the tail lies outside of the band, and one step further in is too far
    assert (binomial.cdf(low - 1) <= tail).all()
    assert (binomial.cdf(low) > tail).all()
    assert (binomial.sf(high) <= tail).all()
    assert (binomial.sf(high - 1) > tail).all()
    assert np.isnan(curve["upper"][~full]).all()


def leaves(sums, level=0.99):
    curve = reliability_curve(sums, level)
    return outside_band(curve["observed"], curve["lower"], curve["upper"]).any()


def test_the_ends_of_the_band_are_inside():
    sums = BinSums(width_edges(1))
    sums.count[:], sums.stated[:] = 100, 50
    for hits, outside in ((37, False), (36, True), (63, False), (64, True)):  # ppf(0.005) = 37
        sums.observed[:] = hits
        assert leaves(sums) == outside


@pytest.mark.parametrize("certain", [0.0, 1.0])
def test_certain_statements_have_a_band_of_no_width(certain):
    curve = reliability_curve(bin_sums(np.full(9, certain), np.ones(9), width_edges(1)))
    assert curve["lower"].item() == curve["upper"].item() == certain


def test_band_holds_jointly_for_true_statements():
    """At most 5 % leave a 95 % band: 2000 draws, 140 or more has probability < 1e-4 if so."""
    generator = np.random.default_rng(4)
    left = 0
    for _ in range(2000):
        stated = generator.beta(3, 1, size=150)
        observed = generator.random(150) < stated
        left += leaves(bin_sums(stated, observed, width_edges(10)), 0.95)
    assert stats.binom.sf(139, 2000, 0.05) < 1e-4
    assert left < 140
