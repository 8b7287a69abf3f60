"""Risk–coverage against brute force: every order of ties, every repeated row."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bnn.calibration.selective import aurc_replicates, coverage_at_risk, risk_coverage


def all_orders(confidence, wrong) -> np.ndarray:
    """Give the mean risks over all orders that fall in confidence."""
    curves = []
    for order in permutations(range(len(wrong))):
        ranked = [confidence[i] for i in order]
        if ranked == sorted(ranked, reverse=True):
            hits = [wrong[i] for i in order]
            curves.append([sum(hits[: j + 1]) / (j + 1) for j in range(len(hits))])
    return np.mean(curves, axis=0)


@given(st.lists(st.tuples(st.sampled_from([0.2, 0.5, 1.0]), st.booleans()), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_ties_are_the_mean_over_their_orders(rows):
    confidence, wrong = np.array([c for c, _ in rows]), np.array([float(w) for _, w in rows])
    expected = all_orders(confidence, wrong)
    np.testing.assert_allclose(risk_coverage(confidence, wrong), expected, atol=1e-12)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.2, 0.5, 0.7, 1.0]), st.booleans()), min_size=1, max_size=20
    ),
    st.sampled_from([0.0, 0.05, 0.25, 0.5, 1.0]),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_coverage_at_risk_against_a_search(rows, risk):
    risks = risk_coverage(np.array([c for c, _ in rows]), np.array([w for _, w in rows]))
    within = [at / len(rows) for at, value in enumerate(risks, 1) if value <= risk]
    assert coverage_at_risk(risks, risk) == max(within, default=0.0)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("block", [1, 170, 10**6])
def test_replicates_against_rows_that_are_repeated(monkeypatch, ties, block):
    monkeypatch.setattr("lightning_bnn.calibration.selective._BLOCK", block)
    generator = np.random.default_rng(1)
    confidence, wrong = generator.random(60), generator.integers(2, size=60)
    if ties:
        confidence = confidence.round(1)
    weights = generator.multinomial(60, np.full(60, 1 / 60), size=25).astype(np.float32)
    values = aurc_replicates(confidence, wrong, weights)
    assert values.dtype == np.float64
    for value, drawn in zip(values, weights, strict=True):
        rows = np.repeat(np.arange(60), drawn.astype(int))
        expected = risk_coverage(confidence[rows], wrong[rows]).mean()
        assert value == pytest.approx(expected, rel=1e-9)


def test_replicates_of_unequal_size():
    """Rows of one example are drawn together, so that the number of rows varies."""
    confidence, wrong = np.array([0.9, 0.8, 0.7]), np.array([0.0, 1.0, 1.0])
    values = aurc_replicates(confidence, wrong, np.array([[1.0, 1, 1], [3.0, 2, 0]]))
    assert values[0] == pytest.approx(risk_coverage(confidence, wrong).mean())
    repeated = risk_coverage(confidence[[0, 0, 0, 1, 1]], wrong[[0, 0, 0, 1, 1]])
    assert values[1] == pytest.approx(repeated.mean())
