"""Verdicts on regressions; for the false-alarm rates see ``test_verdict.py``."""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtri

from lightning_bnn.calibration.clusters import ClusterSums
from lightning_bnn.calibration.verdict import (
    FALSE_ALARM,
    REGRESSION_BAND_LEVEL,
    Verdict,
    regression_verdict,
    spread_by_sd,
)


def judge_numbers(z: np.ndarray) -> Verdict:
    """Judge by the moments and by a PIT histogram of 20 bins with SciPy's binomial band."""
    counts = np.histogram(stats.norm.cdf(z), bins=20, range=(0, 1))[0]
    tail = (1 - REGRESSION_BAND_LEVEL) / 20 / 2
    low, high = stats.binom.ppf([tail, 1 - tail], len(z), 1 / 20)
    outside = ((counts < low) | (counts > high)).any()
    return regression_verdict(z.sum(), (z**2).sum(), len(z), outside)


@pytest.mark.parametrize("count", [20, 200, 2000])
def test_true_numbers_are_calibrated(count):
    generator = np.random.default_rng(count)
    labels = [judge_numbers(generator.normal(size=count)).label for _ in range(400)]
    assert labels.count("calibrated") >= 392


@pytest.mark.parametrize(
    ("scale", "shift", "label"),
    [
        (1.5, 0.0, "over-confident"),
        (1 / 1.5, 0.0, "under-confident"),
        (1.0, 0.3, "biased"),
        (1.0, -0.3, "biased"),
        (1.0, 2.0, "biased"),  # a large bias is no wrong spread
    ],
)
def test_wrong_numbers_are_named(scale, shift, label):
    generator = np.random.default_rng(1)
    verdicts = [judge_numbers(scale * generator.normal(size=400) + shift) for _ in range(100)]
    assert sum(verdict.label == label for verdict in verdicts) >= 95
    if shift:
        assert all((verdict.z > 0) == (shift > 0) for verdict in verdicts)
    else:
        assert all((verdict.z > 0) == (scale > 1) for verdict in verdicts)


def test_numbers_of_another_shape_are_seen_by_the_histogram():
    """Two points a standard deviation to each side: mean and spread are right."""
    generator = np.random.default_rng(2)
    z = generator.choice([-1.0, 1.0], size=400) + 1e-3 * generator.normal(size=400)
    z = (z - z.mean()) / z.std()
    assert judge_numbers(z).label == "miscalibrated"
    assert regression_verdict(z.sum(), (z**2).sum(), 400).label == "calibrated"


def test_p_values_of_numbers_against_scipy():
    z = np.random.default_rng(3).normal(size=50)
    for scale in (0.7, 1.0, 1.4):
        squares = ((scale * z) ** 2).sum()
        verdict = regression_verdict(0.0, squares, 50)
        tail = min(stats.chi2.cdf(squares, 49), stats.chi2.sf(squares, 49))
        assert verdict.p_value == pytest.approx(min(1, 2 * tail))
        assert verdict.z == pytest.approx((squares - 49) / math.sqrt(98))
    verdict = regression_verdict(40.0, 100 + 16.0, 100)
    assert verdict.label == "biased"
    assert verdict.p_value == pytest.approx(2 * stats.norm.sf(4.0))


def test_numbers_share_the_false_alarms_by_four():
    limit = -ndtri(FALSE_ALARM / 8) * 10  # of a sum over 100 rows
    assert regression_verdict(limit - 1e-6, 100 + limit**2 / 100, 100).label == "calibrated"
    assert regression_verdict(limit + 1e-6, 100 + limit**2 / 100, 100).label == "biased"
    low = stats.chi2.ppf(FALSE_ALARM / 8, 99)
    assert regression_verdict(0.0, low + 1e-6, 100).label == "calibrated"
    assert regression_verdict(0.0, low - 1e-6, 100).label == "under-confident"
    assert pytest.approx(1 - FALSE_ALARM / 4) == REGRESSION_BAND_LEVEL


def test_of_two_faults_the_further_one_is_named():
    assert regression_verdict(50.0, 125 + 150.0, 100).label == "over-confident"
    assert regression_verdict(100.0, 150 + 100.0, 100).label == "biased"


def test_a_target_beyond_all_that_was_possible():
    verdict = regression_verdict(math.nan, math.inf, 100, True)
    assert (verdict.label, verdict.z, verdict.p_value) == ("over-confident", math.inf, 0.0)


# ------------------------------------------------------------------ spread by sd


def test_a_spread_that_does_not_follow_the_errors_is_found():
    """z of 0.8 and 1.2 in two halves of the sd: nearly standard normal together."""
    found = []
    for seed in range(100):
        generator = np.random.default_rng(seed)
        sd = generator.uniform(1, 2, 2000)
        z = generator.normal(size=2000) * np.where(sd < np.median(sd), 1.165, 0.8)
        spread = spread_by_sd(sd, z)
        assert regression_verdict(z.sum(), (z**2).sum(), 2000).label in ("calibrated", "biased")
        found.append(regression_verdict(z.sum(), (z**2).sum(), 2000, False, spread).label)
        assert set(spread[0]) <= set(range(5))
        assert set(spread[1]) <= set(range(5, 10))
    assert sum(label not in ("calibrated", "biased") for label in found) > 95


def test_spread_bins_of_true_predictions_are_rarely_outside():
    """A quarter of 1 %: more than 7 of 1000 in 0.4 % of all seeds."""
    generator = np.random.default_rng(0)
    sd = generator.uniform(1, 2, 300)
    found = [spread_by_sd(sd, generator.normal(size=300)) for _ in range(1000)]
    assert sum(bool(narrow or wide) for narrow, wide in found) <= 7


def test_labels_of_spread_bins():
    for spread, label in (
        (([1], []), "over-confident"),
        (([], [2]), "under-confident"),
        (([1], [2]), "miscalibrated"),
        (([], []), "calibrated"),
    ):
        verdict = regression_verdict(0.0, 100.0, 100, False, spread)
        assert (verdict.label, verdict.spread_outside) == (label, spread[0] + spread[1])


def test_equal_sd_have_no_bins():
    assert spread_by_sd(np.ones(100), np.full(100, 9.0)) == ([], [])


@pytest.mark.parametrize(("bias", "label"), [(2.97, "biased"), (2.5, "calibrated")])
def test_dependent_rows_spend_half_of_the_false_alarms_on_the_bias(bias, label):
    """P-values of 0.003 and 0.012."""
    clusters = ClusterSums(200, 400.0, 0.0), ClusterSums(200, 800.0, 0.0)
    verdict = regression_verdict(20 * bias, 400 + bias**2, 400, clusters=clusters)
    assert (verdict.label, verdict.clustered) == (label, True)
