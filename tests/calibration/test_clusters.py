"""Rows that depend on each other: copies are no evidence, and a real fault is found."""

import math

import numpy as np
import pytest
from scipy.special import log_softmax

from lightning_bnn.calibration.clusters import cluster_sums
from lightning_bnn.calibration.verdict import regression_verdict
from tests.calibration.rows import rows_verdict


def test_copied_rows_are_no_evidence():
    """100 examples of 64 equal rows: at most 4 of 200 alarms, where 64 times as many rows cry."""
    alarms = np.zeros(2)
    for seed in range(200):
        generator = np.random.default_rng(seed)
        p = generator.dirichlet(np.ones(3), 100)
        y = (generator.random(100)[:, None] > p.cumsum(1)).sum(1).clip(max=2)
        log_p, targets = np.repeat(np.log(p), 64, 0), np.repeat(y, 64)
        for i, examples in enumerate((np.repeat(np.arange(100), 64), None)):
            verdict = rows_verdict(log_p, targets, examples)
            assert verdict.clustered == (i == 0)
            alarms[i] += verdict.label != "calibrated"
    assert alarms[0] <= 4
    assert alarms[1] > 100


def test_over_confidence_of_dependent_rows_is_found():
    generator = np.random.default_rng(0)
    p = generator.dirichlet(np.ones(3), 500)
    y = (generator.random(500)[:, None] > p.cumsum(1)).sum(1).clip(max=2)
    log_p = np.repeat(log_softmax(2 * np.log(p), 1), 8, 0)
    verdict = rows_verdict(log_p, np.repeat(y, 8), np.repeat(np.arange(500), 8))
    assert (verdict.label, verdict.clustered) == ("over-confident", True)


@pytest.mark.parametrize(
    ("shift", "scale", "label"),
    [(0, 1, "calibrated"), (0, 2, "over-confident"), (0, 0.5, "under-confident"), (1, 1, "biased")],
)
def test_dependent_numbers(shift, scale, label):
    """24 outputs that share most of their error: at most 2 % alarms, and faults are found."""
    right = 0
    for seed in range(200):
        generator = np.random.default_rng(seed)
        shared, own = generator.normal(size=(200, 1)), generator.normal(size=(200, 24))
        z = (shift + scale * (0.9 * shared + math.sqrt(0.19) * own)).ravel()
        examples = np.repeat(np.arange(200), 24)
        clusters = cluster_sums(examples, z), cluster_sums(examples, z**2 - 1)
        verdict = regression_verdict(z.sum(), (z**2).sum(), z.size, clusters=clusters)
        right += verdict.label == label
    assert right >= 196


def test_cluster_sums_add_up():
    generator = np.random.default_rng(0)
    examples, values = np.repeat(np.arange(10), 3), generator.normal(size=30)
    whole = cluster_sums(examples, values)
    parts = cluster_sums(examples[:12], values[:12]) + cluster_sums(examples[12:], values[12:])
    totals = values.reshape(10, 3).sum(1)
    assert whole.examples == parts.examples == 10
    assert whole.squares == pytest.approx(parts.squares) == pytest.approx((totals**2).sum())
    assert whole.cubes == pytest.approx(parts.cubes) == pytest.approx((totals**3).sum())
