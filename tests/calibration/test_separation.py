"""Separation of out-of-distribution inputs against scikit-learn and direct counting."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score

from lightning_bnn.calibration import separation as module
from lightning_bnn.calibration.separation import auroc_replicates, separation

SCORES = st.lists(
    st.one_of(st.integers(0, 4).map(float), st.floats(-1e6, 1e6)), min_size=1, max_size=40
).map(np.array)


def missed(inside: np.ndarray, outside: np.ndarray) -> float:
    """FPR95, by trying every threshold from the lowest one on."""
    for threshold in sorted(inside.tolist()):
        kept = sum(score <= threshold for score in inside)
        if 100 * kept >= 95 * len(inside):
            return sum(score <= threshold for score in outside) / len(outside)
    raise AssertionError


def check(inside: np.ndarray, outside: np.ndarray) -> None:
    scores = np.concatenate([inside, outside])
    is_outside = np.repeat([0, 1], [len(inside), len(outside)])
    result = separation(inside, outside)
    # torchmetrics counts in whole numbers and divides in float32.
    assert result["auroc"] == pytest.approx(roc_auc_score(is_outside, scores), abs=1e-6)
    assert result["aupr"] == pytest.approx(average_precision_score(is_outside, scores), abs=1e-6)
    assert result["fpr95"] == missed(inside, outside)


class TestSeparation:
    @settings(deadline=None, max_examples=100)
    @given(SCORES, SCORES)
    def test_any_scores(self, inside, outside):
        check(inside, outside)

    def test_large_scores_are_not_squashed(self):
        """Read as logits all of these would be 1 in float64, and their order lost."""
        assert separation(np.array([50.0, 60.0]), np.array([70.0, 80.0]))["auroc"] == 1
        assert separation(np.array([50.0, 60.0]), np.array([np.inf]))["auroc"] == 1
        inside, outside = 1 + np.arange(5) * 1e-12, 1 + (5 + np.arange(5)) * 1e-12  # nor in float32
        assert separation(inside, outside)["auroc"] == 1

    @pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
    def test_an_empty_side_is_nan_without_a_warning(self, sizes):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = separation(np.ones(sizes[0]), np.ones(sizes[1]))
        assert np.isnan(list(result.values())).all()


class TestReplicates:
    @settings(deadline=None, max_examples=50)
    @given(SCORES, SCORES, st.integers(0, 2**32 - 1))
    def test_against_scikit_learn_with_weights(self, inside, outside, seed):
        generator = np.random.default_rng(seed)
        near = generator.uniform(0.1, 3, (4, len(inside)))
        far = generator.uniform(0.1, 3, (4, len(outside)))
        areas = auroc_replicates(inside, outside, near, far)
        is_outside = np.repeat([0, 1], [len(inside), len(outside)])
        for area, weights in zip(areas, np.concatenate([near, far], 1), strict=True):
            expected = roc_auc_score(
                is_outside, np.concatenate([inside, outside]), sample_weight=weights
            )
            assert area == pytest.approx(expected, abs=1e-12)

    def test_a_side_without_weight_is_nan(self):
        weights = np.array([[0.0, 0.0], [1.0, 0.0]])
        areas = auroc_replicates(np.array([1.0, 2.0]), np.array([3.0, 0.0]), weights, weights)
        np.testing.assert_array_equal(areas, [np.nan, 1.0])

    def test_chunks_change_nothing(self, monkeypatch):
        generator = np.random.default_rng(0)
        inside, outside = generator.normal(size=11), generator.normal(size=13)
        weights = generator.integers(0, 4, (9, 11)), generator.integers(0, 4, (9, 13))
        whole = auroc_replicates(inside, outside, *weights)
        monkeypatch.setattr(module, "_BUDGET", 30)
        np.testing.assert_array_equal(auroc_replicates(inside, outside, *weights), whole)
