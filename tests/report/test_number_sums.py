"""Sums of a regression against direct formulas."""

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_bnn.predictive import GaussianPredictive
from lightning_bnn.report.number_sums import LEVELS, NumberSums, normal_scores
from lightning_bnn.report.rows import make_rows
from tests.report.predictions import number_data


def test_sums_equal_direct_formulas():
    predictive, targets = number_data(count=80, outputs=2)
    sums, other = NumberSums(bins=8), NumberSums(bins=8)
    for part, into in ((slice(0, 30), sums), (slice(30, 80), other)):
        piece = GaussianPredictive(predictive.means[:, part], predictive.scales[:, part])
        into.add(make_rows(piece, targets[part], np.arange(80)[part]))
    sums.merge(other)
    means, scales = predictive.means.numpy(), predictive.scales.numpy()
    pit = stats.norm.cdf(targets.numpy(), means, scales).mean(0).ravel()
    z = stats.norm.ppf(pit)
    error = (means.mean(0) - targets.numpy()).ravel()
    assert sums.count == 160
    np.testing.assert_allclose(sums.mean("error"), error.mean(), rtol=1e-10)
    np.testing.assert_allclose(sums.mean("squared_error"), (error**2).mean(), rtol=1e-10)
    np.testing.assert_allclose(sums.mean("z"), z.mean(), rtol=1e-8)
    np.testing.assert_allclose(sums.mean("z_squared"), (z**2).mean(), rtol=1e-8)
    np.testing.assert_allclose(sums.mean("nll"), -predictive.log_prob(targets).mean(), rtol=1e-10)
    np.testing.assert_allclose(sums.mean("crps"), predictive.crps(targets).mean(), rtol=1e-10)
    np.testing.assert_array_equal(sums.pit, np.histogram(pit, np.linspace(0, 1, 9))[0])
    for level, count in zip(LEVELS, sums.central, strict=True):
        lower, upper = predictive.interval(float(level))
        assert count == ((targets >= lower) & (targets <= upper)).sum().item()


def test_targets_far_out_count_alike_on_both_sides():
    predictive = GaussianPredictive(torch.zeros(1, 2), torch.ones(1, 2))
    sums = NumberSums(bins=4)
    sums.add(make_rows(predictive, torch.tensor([-1e6, 1e6]), np.arange(2)))
    assert sums.mean("z") == 0
    assert sums.mean("z_squared") == pytest.approx(1e12)  # not cut at 8.2 standard deviations
    assert sums.pit.tolist() == [1, 0, 0, 1]
    assert sums.central.sum() == 0
    np.testing.assert_allclose(
        normal_scores(np.array([0.975]), np.ones(1), np.ones(1)), 1.959964, atol=1e-5
    )
