"""The bootstrap against explicit resampling by index, and the coverage of its intervals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_bnn.calibration import bootstrap
from lightning_bnn.calibration.bins import width_edges
from lightning_bnn.calibration.bootstrap import (
    basic_interval,
    mean_replicates,
    paired_difference_is_clear,
    percentile_interval,
    resample_weights,
)
from lightning_bnn.calibration.error import expected_calibration_errors


class TestWeights:
    @settings(deadline=None, max_examples=40)
    @given(st.lists(st.integers(-3, 6), min_size=1, max_size=30), st.integers(0, 3))
    def test_examples_are_drawn_whole(self, example, seed):
        example = np.array(example)
        weights = resample_weights(example, 5, seed)
        assert weights.shape == (5, len(example))
        assert weights.dtype == np.float32
        names = sorted(set(example.tolist()))
        drawn = np.zeros(5)
        for name in names:
            rows = weights[:, example == name]
            assert (rows == rows[:, :1]).all()
            drawn += rows[:, 0]
        assert (drawn == len(names)).all()

    def test_counts_are_multinomial(self):
        """Mean 1, variance 1 - 1/m and covariance -1/m of a count, each within 5 standard errors.

        With 20,000 replicates of 4 examples the errors are 0.006, 0.012 and 0.006 (false alarm
        below 1e-5 in all).
        """
        weights = resample_weights(np.arange(4), 20_000).astype(np.float64)
        covariance = np.cov(weights.T)
        np.testing.assert_allclose(weights.mean(0), 1, atol=0.03)
        np.testing.assert_allclose(np.diag(covariance), 0.75, atol=0.06)
        np.testing.assert_allclose(covariance[0, 1:], -0.25, atol=0.03)

    def test_replicates_differ_and_seeds_repeat(self):
        weights = resample_weights(np.arange(50), 40)
        assert len(np.unique(weights, axis=0)) == 40
        assert (weights == resample_weights(np.arange(50) + 7, 40)).all()
        assert (weights != resample_weights(np.arange(50), 40, seed=1)).any()


class TestMeans:
    def test_equals_resampling_by_index(self, monkeypatch):
        generator = np.random.default_rng(0)
        example = generator.integers(0, 30, 80)
        columns = generator.normal(size=(80, 3))
        weights = resample_weights(example, 20)
        expected = np.array(
            [
                [columns[np.repeat(np.arange(80), w.astype(int)), c].mean() for c in range(3)]
                for w in weights
            ]
        )
        np.testing.assert_allclose(mean_replicates(columns, weights), expected, rtol=1e-12)
        np.testing.assert_allclose(
            mean_replicates(columns[:, 1], weights), expected[:, 1], rtol=1e-12
        )
        monkeypatch.setattr(bootstrap, "_BUDGET", 240)
        np.testing.assert_allclose(mean_replicates(columns, weights), expected, rtol=1e-12)

    def test_large_offsets_keep_their_digits(self):
        """Sums in float32 would lose the difference."""
        column = 1e6 + np.arange(1000) * 1e-3
        means = mean_replicates(column, np.ones((1, 1000), np.float32))
        assert means[0] == pytest.approx(1e6 + 0.4995, abs=1e-6)

    def test_infinite_rows_spoil_only_the_replicates_that_draw_them(self):
        weights = np.array([[1, 1, 1], [3, 0, 0], [0, 2, 1]], np.float32)
        columns = np.array([[1.0, 1.0, 1.0], [np.inf, 2.0, np.nan], [4.0, 6.0, 2.0]])
        expected = [[np.inf, 3, np.nan], [1, 1, 1], [np.inf, 10 / 3, np.nan]]
        np.testing.assert_allclose(mean_replicates(columns, weights), expected)
        np.testing.assert_allclose(mean_replicates(columns[:, 0], weights), [np.inf, 1, np.inf])


class TestPercentileInterval:
    def test_undefined_replicates(self):
        values = np.array([np.nan, *np.arange(101.0), np.nan])
        assert percentile_interval(values, 0.5) == (25, 75)
        assert np.isnan(percentile_interval(np.full(3, np.nan))).all()
        assert percentile_interval(np.array([1.0, np.inf, np.inf]), 0.9) == (1, np.inf)

    def test_covers_the_mean_of_normal_data(self):
        """Of 500 samples of 200 numbers, 95% +- 4 standard errors of 0.97% (false alarm 6e-5).

        The percentile interval of n = 200 numbers is itself short by about 0.5%.
        """
        samples = np.random.default_rng(0).normal(size=(500, 200))
        weights = resample_weights(np.arange(200), 1000)
        means = mean_replicates(samples.T, weights)
        intervals = np.array([percentile_interval(column) for column in means.T])
        covered = ((intervals[:, 0] <= 0) & (intervals[:, 1] >= 0)).mean()
        assert 0.945 - 0.039 < covered < 0.945 + 0.039

    def test_rows_of_one_example_do_not_count_as_independent(self):
        """Each example is repeated 9 times: the interval stays as wide as that of the examples."""
        values = np.random.default_rng(0).normal(size=100)
        one = percentile_interval(mean_replicates(values, resample_weights(np.arange(100), 1000)))
        example = np.repeat(np.arange(100), 9)
        nine = mean_replicates(np.repeat(values, 9), resample_weights(example, 1000))
        assert percentile_interval(nine) == pytest.approx(one)


class TestBasicInterval:
    def test_formula(self):
        values = np.random.default_rng(0).permutation(np.linspace(10, 20, 1001))
        high = 19.75  # of the middle 95%
        assert basic_interval(15, values) == pytest.approx((59.9375**0.5, 15 + high - 15))
        assert 2 * 15**2 - high**2 == 59.9375
        assert basic_interval(12, values) == (0, 16.75)
        assert basic_interval(30, values) == pytest.approx((30, 34.75))  # never above the estimate
        assert basic_interval(0, np.zeros(5)) == (0, 0)
        assert np.isnan(basic_interval(1.0, np.full(3, np.nan))).all()

    @staticmethod
    def intervals(shift: float, rows: int, seeds: int = 300) -> np.ndarray:
        """Intervals of the calibration error of statements that are ``shift`` too sure."""
        edges, result = width_edges(15), []
        weights = resample_weights(np.arange(rows), 400)
        for seed in range(seeds):
            generator = np.random.default_rng(seed)
            stated = generator.uniform(0.5, 1, rows)
            observed = (generator.uniform(size=rows) < stated - shift).astype(np.float64)
            ones = np.ones((1, rows), np.float32)
            estimate = float(expected_calibration_errors(stated, observed, edges, ones)[0])
            values = expected_calibration_errors(stated, observed, edges, weights)
            result.append((*basic_interval(estimate, values), *percentile_interval(values)))
        return np.array(result)

    def test_of_a_calibrated_predictor_holds_zero(self):
        """The error is 0, but the replicates never are.

        At least 95% of 300 seeds, minus 4 standard errors of 1.26% (false alarm 3e-5).
        """
        lower, _, low, _ = self.intervals(0.0, 300).T
        assert (lower == 0).mean() > 0.95 - 0.05
        assert (low > 0.01).all()

    @pytest.mark.parametrize(("shift", "rows"), [(0.02, 300), (0.1, 300), (0.2, 300), (0.05, 2000)])
    def test_of_a_miscalibrated_predictor_holds_its_error(self, shift, rows):
        """At least 95% of 300 seeds, minus 4 standard errors of 1.26% (false alarm 3e-5)."""
        lower, upper, *_ = self.intervals(shift, rows).T
        assert ((lower <= shift) & (upper >= shift)).mean() > 0.95 - 0.05
        if shift == 0.2:  # and tells it from a calibrated one
            assert (lower > 0.05).mean() > 0.9
            assert (upper < 0.3).mean() > 0.9


class TestPairedDifference:
    def test_pairs_see_what_intervals_do_not(self):
        generator = np.random.default_rng(0)
        difficulty = generator.normal(size=500)
        first = difficulty + 0.05 * generator.normal(size=500)
        second = difficulty + 0.05 * generator.normal(size=500) + 0.02
        weights = resample_weights(np.arange(500), 1000)
        one, two = (mean_replicates(column, weights) for column in (first, second))
        assert percentile_interval(one)[1] > percentile_interval(two)[0]  # they overlap
        assert paired_difference_is_clear(one, two)
        assert paired_difference_is_clear(two, one)
        assert not paired_difference_is_clear(one, one)
        assert not paired_difference_is_clear(np.full(3, np.inf), np.full(3, np.inf))
        assert paired_difference_is_clear(one, np.full(1000, np.inf))

    def test_false_alarms(self):
        """Two equal models: clear in 5% of 400 seeds, plus 4 standard errors of 1.1%."""
        differences = np.random.default_rng(0).normal(size=(200, 400))
        means = mean_replicates(differences, resample_weights(np.arange(200), 1000))
        clear = np.mean([paired_difference_is_clear(c, np.zeros(1000)) for c in means.T])
        assert 0.01 < clear < 0.10


def test_two_true_models_have_calibration_errors_that_are_not_clear():
    """Of 40 pairs at most 6 are called clear; the plain difference calls more than 15 so.

    At a false-alarm rate of 5% more than 6 of 40 come in 0.3% of all seeds.
    """
    called = np.zeros(2)
    for seed in range(40):
        generator = np.random.default_rng(seed)
        fine, coarse = generator.uniform(0.5, 1, 500), np.full(500, 0.75)
        observed = (generator.random(500) < fine).astype(float)
        weights = np.ones((301, 500), np.float32)
        weights[1:] = resample_weights(np.arange(500), 300)
        one, two = (
            expected_calibration_errors(p, observed, width_edges(15), weights)
            for p in (coarse, fine)
        )
        called += (
            paired_difference_is_clear(one[1:], two[1:], distances=(one[0], two[0])),
            paired_difference_is_clear(one[1:], two[1:]),
        )
    assert called[0] <= 6
    assert called[1] > 15
