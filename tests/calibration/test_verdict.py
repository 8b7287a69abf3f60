"""Verdicts: rarely an alarm for true statements, nearly always the right one for wrong ones.

False-alarm rates of the statistical tests below. A verdict may raise an alarm in 1 % of true
predictors. Of 400 at most 8 may (98 %): at exactly 1 % that fails with probability 2.1 %, at the
0.6 % and less that these predictors show (discrete counts, Bonferroni) with less than 0.1 %. The
seeds are fixed, so the outcome is. Wrong predictors must be named rightly in 95 of 100.
"""

import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import log_softmax, ndtri

from lightning_bnn.calibration.verdict import (
    CLASS_BAND_LEVEL,
    FALSE_ALARM,
    Verdict,
    class_verdict,
    score_moments,
)
from tests.calibration.rows import rows_verdict


def top_logit(count: int, classes: int, confidence: float, generator: np.random.Generator):
    """Give logits that state the same confidence in each row, the rest shared equally."""
    logit = np.log(confidence / (1 - confidence) * (classes - 1))
    return logit * np.eye(classes)[generator.integers(classes, size=count)]


PREDICTORS = {
    "middling": lambda g, n, k: 1.5 * g.normal(size=(n, k)),
    "sharp": lambda g, n, k: 8 * g.normal(size=(n, k)),
    "sharp with a few doubts": lambda g, n, k: (
        np.where(g.random((n, 1)) < 0.1, 1, 12) * g.normal(size=(n, k))
    ),
    "nearly certain": lambda g, n, k: top_logit(n, k, 0.999, g),
    "almost never wrong": lambda g, n, k: top_logit(n, k, 0.99995, g),
    "all alike": lambda g, n, k: top_logit(n, k, 0.7, g),
    "knows nothing": lambda g, n, k: np.zeros((n, k)),
}


def outcomes(logits: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Draw classes by Gumbel's trick."""
    return (logits + generator.gumbel(size=logits.shape)).argmax(axis=1)


def judge(logits: np.ndarray, targets: np.ndarray) -> Verdict:
    return rows_verdict(log_softmax(logits, axis=1), targets)


def test_moments_of_the_score_are_those_of_its_distribution():
    log_p = log_softmax(np.random.default_rng(0).normal(size=(5, 4)), axis=1)
    p = np.exp(log_p)
    every = [score_moments(log_p, p, np.full(5, k)) for k in range(4)]
    scores = np.stack([score for score, _, _ in every], axis=1)
    for power, expected in ((1, 0.0), (2, every[0][1]), (3, every[0][2])):
        np.testing.assert_allclose((p * scores**power).sum(1), expected, atol=1e-12)


# ------------------------------------------------------------------ classes, statistically


@pytest.mark.parametrize(("count", "classes"), [(200, 2), (1000, 10)])
@pytest.mark.parametrize("kind", PREDICTORS)
def test_true_classes_are_calibrated(kind, count, classes):
    generator = np.random.default_rng([count, classes])
    alarms = 0
    for _ in range(400):
        logits = PREDICTORS[kind](generator, count, classes)
        alarms += judge(logits, outcomes(logits, generator)).label != "calibrated"
    assert alarms <= 8


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize(
    ("factor", "label"), [(1.5, "over-confident"), (1 / 1.5, "under-confident")]
)
def test_wrong_temperature_is_named(factor, label, classes):
    generator = np.random.default_rng(classes)
    named = 0
    for _ in range(100):
        logits = 2 * generator.normal(size=(2000, classes))
        verdict = judge(factor * logits, outcomes(logits, generator))
        named += verdict.label == label
        assert (verdict.z < 0) == (factor > 1)
    assert named >= 95


def test_what_no_temperature_mends_is_seen_by_the_band():
    """Too sure below 0.7 and not sure enough above, balanced so that the score sees nothing."""
    generator = np.random.default_rng(0)
    named = 0
    for _ in range(100):
        p = np.repeat([0.6, 0.9], [5000, 1000])
        truth = np.repeat([0.54, 0.9554], [5000, 1000])
        logits = np.log(np.stack([p, 1 - p], axis=1))
        targets = (generator.random(6000) > truth).astype(int)
        named += judge(logits, targets).label == "miscalibrated"
    assert named >= 95


# ------------------------------------------------------------------ classes, by hand


def curve_outside(*sides: int) -> dict[str, np.ndarray]:
    """A curve of 1000 statements with a bin on each side: −1 below the band, 0 inside, 1 above."""
    bins = len(sides)
    return {
        "count": np.full(bins, 1000 // bins),
        "observed": 0.5 + 0.3 * np.array(sides),
        "lower": np.full(bins, 0.4),
        "upper": np.full(bins, 0.6),
    }


INSIDE = curve_outside(0)


def test_symmetric_scores_have_the_normal_tail():
    for z in (-3.0, -2.0, 0.5, 2.0, 3.0):
        verdict = class_verdict(INSIDE, 3 * z, 9.0, 0.0)
        assert verdict.z == pytest.approx(z)
        assert verdict.p_value == pytest.approx(2 * stats.norm.sf(abs(z)), rel=1e-9)
        for third in (1.01e-4, -0.99e-4):  # λ = 1 / third² on both sides of the switch at 1e8
            verdict = class_verdict(INSIDE, z, 1.0, third)
            assert verdict.p_value == pytest.approx(2 * stats.norm.sf(abs(z)), rel=2e-3)


@pytest.mark.parametrize("surprises", [0, 1, 2, 5, 12])
def test_rare_surprises_have_the_poisson_tail(surprises):
    """Rows that state 1 − ε and cost the same when wrong: the number of wrong ones decides."""
    rate, cost = 2.0, 7.0
    moments = rate * cost**2, -rate * cost**3
    verdict = class_verdict(INSIDE, cost * (rate - surprises), *moments)
    tails = stats.poisson.cdf(surprises, rate), stats.poisson.sf(surprises - 1, rate)
    assert verdict.p_value == pytest.approx(min(1, 2 * min(tails)), rel=1e-9, abs=1e-12)


def test_half_of_the_false_alarms_is_for_the_score():
    limit = -ndtri(FALSE_ALARM / 4)  # 2.81: half of 1 %, on two sides
    inside = class_verdict(INSIDE, limit - 1e-6, 1.0, 0.0)
    assert inside.label == "calibrated"
    outside = class_verdict(INSIDE, limit + 1e-6, 1.0, 0.0)
    assert outside.label == "under-confident"
    assert CLASS_BAND_LEVEL == 0.995


@pytest.mark.parametrize(
    ("sides", "label"),
    [
        ((0, 0, 0), "calibrated"),
        ((-1, 0, -1), "over-confident"),
        ((0, 1, 0), "under-confident"),
        ((1, 0, -1), "miscalibrated"),
    ],
)
def test_bins_outside_decide_if_the_score_does_not(sides, label):
    verdict = class_verdict(curve_outside(*sides), 1.0, 1.0, 0.0)
    assert verdict.label == label
    assert class_verdict(curve_outside(*sides), -10.0, 1.0, 0.0).label == "over-confident"


def test_certain_and_wrong():
    for variance in (0.0, 4.0):
        verdict = class_verdict(INSIDE, -math.inf, variance, 0.0)
        assert (verdict.label, verdict.z, verdict.p_value) == ("over-confident", -math.inf, 0.0)


def test_equally_probable_classes_carry_no_score_whatever_the_rounding():
    verdict = class_verdict(INSIDE, 2e-7 * 1000, 0.0, 0.0)
    assert (verdict.label, verdict.z, verdict.p_value) == ("calibrated", 0.0, 1.0)
