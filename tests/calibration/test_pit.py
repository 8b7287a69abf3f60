"""PIT histogram, coverage and error by sd against SciPy, direct counting and simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lightning_bnn.calibration.pit import coverage_curve, error_by_sd, pit_histogram

LEVELS = np.arange(1, 20) / 20


class TestHistogram:
    @pytest.mark.parametrize("level", [0.9, 0.99])
    @pytest.mark.parametrize(("count", "bins"), [(0, 4), (1, 1), (7, 20), (360, 15), (10**6, 20)])
    def test_band_is_the_exact_binomial_one(self, count, bins, level):
        counts = np.bincount(np.arange(count) % bins, minlength=bins)
        histogram = pit_histogram(counts, level)
        assert (histogram["count"] == counts).all()
        np.testing.assert_allclose(histogram["edges"], np.linspace(0, 1, bins + 1))
        tail = (1 - level) / bins / 2
        binomial = stats.binom(count, 1 / bins)
        for lower, upper in zip(histogram["lower"], histogram["upper"], strict=True):
            # The ends are the last counts before the tails hold too much.
            assert binomial.cdf(lower - 1) <= tail < binomial.cdf(lower)
            assert binomial.sf(upper) <= tail < binomial.sf(upper - 1)

    @pytest.mark.parametrize(("count", "fewest"), [(30, 0.01), (400, 0.05)])
    def test_joint_coverage_by_simulation(self, count, fewest):
        """True predictions lie in the 90% band in at least 90% of 4000 data sets, and not in all.

        Tolerance: 4 standard errors of 0.47% (false alarm 3e-5). Counts come in steps, and 30 in
        10 bins cannot be too few in one, so that the alarms are fewer than the 10% allowed.
        """
        generator = np.random.default_rng(0)
        counts = generator.multinomial(count, np.full(10, 0.1), size=4000)
        band = pit_histogram(counts[0], level=0.9)
        alarms = ((counts < band["lower"]) | (counts > band["upper"])).any(1).mean()
        assert fewest < alarms < 0.1 + 0.019


class TestCoverage:
    @settings(deadline=None, max_examples=40)
    @given(st.integers(1, 300), st.floats(0.3, 3), st.integers(0, 2**32 - 1))
    def test_against_direct_intervals(self, count, scale, seed):
        """Counting by |2 pit - 1| gives how often intervals held the target."""
        target = scale * np.random.default_rng(seed).normal(size=count)
        place = np.abs(2 * stats.norm.cdf(target) - 1)
        counts = (place[:, None] <= LEVELS).sum(0)
        curve = coverage_curve(counts, LEVELS, count)
        for observed, level in zip(curve["observed"], LEVELS, strict=True):
            lower, upper = stats.norm.interval(level)
            inside = sum(lower <= value <= upper for value in target)
            assert observed == inside / count
        band = stats.binom(count, LEVELS)  # exact, and shared by the levels
        tail = 0.01 / len(LEVELS) / 2
        lower, upper = np.round(count * curve["lower"]), np.round(count * curve["upper"])
        assert (band.cdf(lower - 1) <= tail).all()
        assert (tail < band.cdf(lower)).all()
        assert (band.sf(upper) <= tail).all()
        assert (tail < band.sf(upper - 1)).all()

    def test_levels_at_the_ends(self):
        curve = coverage_curve(np.array([0, 8]), np.array([0.0, 1.0]), 8)
        for name in ("lower", "upper", "observed"):
            assert curve[name].tolist() == [0, 1]


class TestErrorBySd:
    def test_certain_predictions(self):
        result = error_by_sd(np.zeros(4), np.array([0.0, 1.0, 1.0, 1.0]))
        assert (result["sd"].item(), result["lower"].item(), result["upper"].item()) == (0, 0, 0)
        assert result["rmse"].item() == pytest.approx(0.75**0.5)

    @pytest.mark.parametrize("count", [1, 5, 10, 11, 500])
    def test_against_a_loop(self, count):
        generator = np.random.default_rng(count)
        sd, error = generator.gamma(2, size=count), generator.normal(size=count)
        result = error_by_sd(sd, error, bins=10, level=0.95)
        bins = min(10, count)
        assert result["count"].sum() == count
        assert len(result["count"]) == bins
        start = 0
        order = np.argsort(sd)
        for index, size in enumerate(result["count"].astype(int)):
            rows = order[start : start + size]
            start += size
            assert abs(size - count / bins) < 1 + 1e-9
            assert result["rmse"][index] == pytest.approx(np.sqrt(np.mean(error[rows] ** 2)))
            square = sum(sd[row] ** 2 for row in rows)
            assert result["sd"][index] == pytest.approx(np.sqrt(square / size))
            freedom = square**2 / sum(sd[row] ** 4 for row in rows)
            ends = stats.chi2(freedom).ppf([0.025 / bins, 1 - 0.025 / bins])
            lower, upper = np.sqrt(square / size * ends / freedom)
            assert result["lower"][index] == pytest.approx(lower)
            assert result["upper"][index] == pytest.approx(upper)

    def test_joint_coverage_by_simulation(self):
        """True sd lie in the 90% band in about 90% of 1000 data sets: within 4 errors of 0.95%.

        The bins are nearly independent, and Bonferroni then gives 9.6% alarms.
        """
        generator = np.random.default_rng(0)
        alarms = 0
        for _ in range(1000):
            sd = generator.gamma(3, size=200)
            error = sd * generator.normal(size=200)
            result = error_by_sd(sd, error, level=0.9)
            rmse = result["rmse"]
            alarms += bool(((rmse < result["lower"]) | (rmse > result["upper"])).any())
        assert 0.096 - 0.038 < alarms / 1000 < 0.096 + 0.038
        halved = error_by_sd(sd / 2, error)
        assert (halved["rmse"] > halved["upper"]).sum() >= 9


@pytest.mark.parametrize("rate", [0.3, 1.0, 5.0])
def test_error_by_sd_of_true_counts(rate):
    """All bins inside of the 99% band in at least 97% of 300 data sets (2% would be 4 sigma)."""
    generator = np.random.default_rng(0)
    inside = np.zeros(2)
    for _ in range(300):
        rates = rate * generator.uniform(0.8, 1.2, 1000)
        error = generator.poisson(rates) - rates
        for i, given_rate in enumerate((rates, None)):
            found = error_by_sd(np.sqrt(rates), error, bins=5, rate=given_rate)
            rmse = found["rmse"]
            inside[i] += ((found["lower"] <= rmse) & (rmse <= found["upper"])).all()
    assert inside[0] >= 291
    assert inside[1] < inside[0]


def test_band_of_counts_has_the_kurtosis_of_a_poisson():
    """Rows of one rate: ν = 2 n λ / (2 λ + 1), as the variance of the squared error is 2 λ² + λ."""
    rows, rate = 40, 1.5
    sd, error = np.full(rows, rate**0.5), np.ones(rows)
    result = error_by_sd(sd, error, bins=1, level=0.9, rate=np.full(rows, rate))
    freedom = 2 * rows * rate / (2 * rate + 1)
    expected = np.sqrt(rate * stats.chi2(freedom).ppf([0.05, 0.95]) / freedom)
    np.testing.assert_allclose([result["lower"][0], result["upper"][0]], expected)
