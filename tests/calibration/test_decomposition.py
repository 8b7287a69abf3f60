"""Decompositions: their sums are the scores, their parts those of the papers' formulas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lightning_bnn.calibration.bins import BinSums, bin_sums, width_edges
from lightning_bnn.calibration.decomposition import brier_decomposition, nll_decomposition

SEEDS = st.integers(0, 10_000)


def classes(seed: int, count: int, labels: int, sharpness: float):
    generator = np.random.default_rng(seed)
    p = generator.dirichlet(np.full(labels, sharpness), size=count)
    # Not below 1e-4, so that 1 − p keeps its digits in the plain formulas of these tests.
    p = np.clip(p, 1e-4, None)
    p /= p.sum(axis=1, keepdims=True)
    return p, generator.integers(labels, size=count)


def brier_parts(p: np.ndarray, y: np.ndarray, edges: np.ndarray) -> dict[str, float]:
    """Sum the five parts of Stephenson et al. (2008) over classes, from the rows."""
    parts = dict.fromkeys(("rel", "res", "unc", "variance", "covariance"), 0.0)
    for k in range(p.shape[1]):
        stated, observed = p[:, k], (y == k).astype(float)
        parts["unc"] += observed.mean() * (1 - observed.mean())
        place = np.searchsorted(edges[1:-1], stated, side="right")
        for b in set(place.tolist()):
            f, o = stated[place == b], observed[place == b]
            share = len(f) / len(stated)
            parts["rel"] += share * (f.mean() - o.mean()) ** 2
            parts["res"] += share * (o.mean() - observed.mean()) ** 2
            parts["variance"] += ((f - f.mean()) ** 2).sum() / len(stated)
            parts["covariance"] += 2 * ((f - f.mean()) * (o - o.mean())).sum() / len(stated)
    return parts


@given(
    SEEDS,
    st.integers(1, 60),
    st.integers(2, 6),
    st.sampled_from([0.01, 0.3, 3]),
    st.integers(1, 20),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_brier(seed, count, labels, sharpness, bins):
    p, y = classes(seed, count, labels, sharpness)
    sums = BinSums(width_edges(bins), groups=labels)
    sums.add_classes(p, y)
    parts = brier_decomposition(sums)
    score = ((p - np.eye(labels)[y]) ** 2).sum(axis=1).mean()
    total = parts["reliability"] - parts["resolution"] + parts["uncertainty"]
    assert total == pytest.approx(score, abs=1e-12)
    theirs = brier_parts(p, y, width_edges(bins))
    assert parts["reliability"] == pytest.approx(theirs["rel"], abs=1e-12)
    assert parts["uncertainty"] == pytest.approx(theirs["unc"], abs=1e-12)
    resolution = theirs["res"] - theirs["variance"] + theirs["covariance"]
    assert parts["resolution"] == pytest.approx(resolution, abs=1e-12)


def test_brier_of_a_million_sharp_rows_keeps_its_digits():
    generator = np.random.default_rng(1)
    p = 1 - 1e-4 * generator.random(1_000_000)
    y = (generator.random(len(p)) < p).astype(float)
    parts = brier_decomposition(bin_sums(p, y, width_edges(15)))
    total = parts["reliability"] - parts["resolution"] + parts["uncertainty"]
    assert total == pytest.approx(((p - y) ** 2).mean(), abs=1e-12)


def nll_terms(p: np.ndarray, y: np.ndarray):
    """Give confidence, whether right, and the mean of the second part of the chain rule."""
    rows = np.arange(len(y))
    top = p.argmax(axis=1)
    right = top == y
    others = p.copy()
    others[rows, top] = 0  # so that 1 − confidence keeps its digits
    which = np.where(right, 0.0, -np.log(p[rows, y]) + np.log(others.sum(axis=1)))
    return p[rows, top], right.astype(float), which


@given(SEEDS, st.integers(1, 60), st.integers(2, 6), st.sampled_from([0.3, 3]), st.integers(1, 20))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_nll(seed, count, labels, sharpness, bins):
    p, y = classes(seed, count, labels, sharpness)
    confidence, right, which = nll_terms(p, y)
    nll = -np.log(p[np.arange(count), y]).mean()
    sums = bin_sums(confidence, right, width_edges(bins))
    parts = nll_decomposition(sums, nll, which.mean())
    total = parts["uncertainty"] - parts["resolution"] + parts["reliability"]
    assert total + parts["which_class"] == pytest.approx(nll, rel=1e-9)
    # the parts, from the rows
    base = right.mean()
    assert parts["uncertainty"] == pytest.approx(stats.entropy([base, 1 - base]), abs=1e-9)
    place = np.searchsorted(width_edges(bins)[1:-1], confidence, side="right")
    reliability = between = blurred = 0.0
    for b in set(place.tolist()):
        c, o = confidence[place == b], right[place == b]
        said, observed = [c.mean(), 1 - c.mean()], [o.mean(), 1 - o.mean()]
        reliability += len(c) / count * stats.entropy(observed, said)
        between += len(c) / count * stats.entropy(observed, [base, 1 - base])
        log_scores = -np.log(np.where(o == 1, c, 1 - c))
        of_mean = -np.log(np.where(o == 1, said[0], said[1]))
        blurred += (log_scores - of_mean).sum() / count
    assert parts["reliability"] == pytest.approx(reliability, rel=1e-6, abs=1e-9)
    assert parts["resolution"] == pytest.approx(between - blurred, rel=1e-6, abs=1e-9)


def test_confidence_that_rounds_to_one_gives_finite_parts():
    """Log-probabilities are finite where the probability itself rounds to 1."""
    sums = bin_sums(np.ones(10), np.arange(10) < 9, width_edges(15))
    nll, which = 0.1 * 45.0, 0.1 * 1.0
    parts = nll_decomposition(sums, nll, which)
    assert np.isfinite(list(parts.values())).all()
    total = parts["uncertainty"] - parts["resolution"] + parts["reliability"]
    assert total + parts["which_class"] == pytest.approx(nll, abs=1e-12)


@pytest.mark.parametrize("which", [0.0, 0.2, np.inf])
def test_infinite_nll_is_a_misstatement(which):
    sums = bin_sums(np.array([1.0, 0.95, 0.3]), np.array([0, 1, 1]), width_edges(2))
    parts = nll_decomposition(sums, np.inf, which)
    assert np.isinf(parts["reliability"]) == np.isfinite(which)
    bins = [stats.entropy([0.5, 0.5], [2 / 3, 1 / 3]), stats.entropy([1, 0], [2 / 3, 1 / 3])]
    assert parts["resolution"] == pytest.approx(2 / 3 * bins[0] + 1 / 3 * bins[1])
    total = parts["uncertainty"] - parts["resolution"] + parts["reliability"]
    assert total + parts["which_class"] == np.inf
