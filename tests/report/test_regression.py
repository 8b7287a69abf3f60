"""The numbers of a regression against SciPy and direct formulas."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_bnn.predictive import GaussianPredictive, PoissonPredictive
from lightning_bnn.report.comparison import common_rows
from lightning_bnn.report.regression import widening
from lightning_bnn.report.statistics import Statistics
from tests.report.predictions import (
    block_of,
    drawn_rows,
    regression_data,
    regression_statistics,
)


def test_scalars_and_curves():
    predictive, targets = regression_data(count=400, outputs=2)
    block = block_of(regression_statistics(predictive, targets))
    error = (predictive.mean - targets).ravel().numpy()
    sd = predictive.variance.sqrt().ravel().numpy()
    scalars = block["scalars"]
    assert scalars["rmse"] == pytest.approx(np.sqrt((error**2).mean()))
    assert scalars["bias"] == pytest.approx(error.mean())
    assert scalars["nll"] == pytest.approx(-predictive.log_prob(targets).mean().item())
    assert scalars["crps"] == pytest.approx(predictive.crps(targets).mean().item())
    assert scalars["coverage_90"] == predictive.covers(targets, 0.9).double().mean().item()
    assert scalars["sharpness"] == pytest.approx(sd.mean())
    epistemic, aleatoric = predictive.epistemic.mean().item(), predictive.aleatoric.mean().item()
    assert scalars["epistemic_share"] == pytest.approx(epistemic / (epistemic + aleatoric))
    for nominal, observed in zip(
        *(block["coverage"][k] for k in ("nominal", "observed")), strict=True
    ):
        assert observed == predictive.covers(targets, float(nominal)).double().mean().item()
    pit = predictive.cdf(targets).ravel().numpy()
    np.testing.assert_array_equal(block["pit"]["count"], np.histogram(pit, np.arange(11) / 10)[0])
    order = np.argsort(sd).reshape(10, 80)
    rmse = np.sqrt((error[order] ** 2).mean(1))
    np.testing.assert_allclose(block["error_sd"]["rmse"], rmse)
    parts = block["uncertainty"]
    np.testing.assert_allclose(parts["sd"], sd[order].mean(1))
    np.testing.assert_allclose(
        parts["epistemic"], predictive.epistemic.ravel().numpy()[order].mean(1)
    )
    np.testing.assert_allclose(
        parts["aleatoric"], predictive.aleatoric.ravel().numpy()[order].mean(1)
    )
    np.testing.assert_allclose(np.sort(block["scatter"]["sd"]), np.sort(sd), rtol=1e-5)
    assert block["fit"] is None


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
def test_widening(factor):
    """The factor found mends exactly the 90 percent interval."""
    z = factor * np.random.default_rng(0).normal(size=5000)
    found = widening(z)
    assert found == pytest.approx(factor, rel=0.05)
    assert (np.abs(z / found) <= stats.norm.ppf(0.95)).mean() == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize(
    ("narrow", "label"),
    [(1.0, "calibrated"), (1.5, "over-confident"), (0.66, "under-confident")],
)
def test_verdict(narrow, label):
    """At 1,000 rows the power is above 0.999; a false alarm has 1 percent, for this seed none."""
    statistics = regression_statistics(*regression_data(count=1000, narrow=narrow, seed=1))
    assert block_of(statistics)["verdict"]["label"] == label


def test_a_bias_is_found_with_its_sign():
    predictive, targets = regression_data(count=1000)
    block = block_of(regression_statistics(predictive, targets + 0.3))
    assert block["verdict"]["label"] == "biased"
    assert block["scalars"]["mean_score"] > 0
    assert block["scalars"]["bias"] < 0


def test_counts():
    generator = torch.Generator().manual_seed(2)
    rates = torch.rand(1, 500, generator=generator) * 5
    targets = torch.poisson(rates[0], generator=generator)
    statistics = Statistics()
    statistics.update(PoissonPredictive(rates.log()), targets, inputs=rates[0])
    block = block_of(statistics)
    expected = -stats.poisson.logpmf(targets.numpy(), rates[0].double().numpy()).mean()
    assert block["scalars"]["nll"] == pytest.approx(expected, rel=1e-6)
    assert block["verdict"]["label"] == "calibrated"
    assert math.isfinite(block["scalars"]["crps"])
    assert np.all(np.diff(block["fit"]["x"]) >= 0)
    assert len(block["fit"]["x"]) == 400


def test_several_outputs_are_clustered_and_merge_exactly():
    predictive, targets = regression_data(count=90, outputs=3)
    whole = regression_statistics(predictive, targets, batch=90)
    parts = regression_statistics(predictive, targets, batch=20)
    for name in ("bias", "spread"):
        one, two = getattr(whole.sums, name), getattr(parts.sums, name)
        assert one.examples == two.examples == 90
        assert one.squares == pytest.approx(two.squares)
    assert block_of(whole)["verdict"]["clustered"] is True
    single = regression_statistics(*regression_data(count=90))
    assert block_of(single)["verdict"]["clustered"] is False


def test_a_spread_that_does_not_follow_the_errors():
    generator = torch.Generator().manual_seed(0)
    sd = torch.rand(4000, generator=generator, dtype=torch.float64) + 1
    right = torch.where(sd < 1.5, 1.165, 0.8)
    targets = right * sd * torch.randn(4000, generator=generator, dtype=torch.float64)
    statistics = Statistics()
    statistics.update(GaussianPredictive(torch.zeros(1, 4000).double(), sd[None]), targets)
    verdict = block_of(statistics)["verdict"]
    assert verdict["label"] == "miscalibrated"
    assert set(verdict["spread_outside"]) & set(range(5))
    assert set(verdict["spread_outside"]) & set(range(5, 10))


def test_replicates_of_a_regression():
    predictive, targets = regression_data(count=100)
    statistics = regression_statistics(predictive, targets)
    weights, replicates = drawn_rows(100)
    found = statistics.sums.replicated(
        statistics, {}, common_rows({"net": statistics}, 1000), weights
    )
    error = (predictive.mean - targets)[:, 0].numpy()
    columns = {
        "nll": -predictive.log_prob(targets).numpy(),
        "crps": predictive.crps(targets)[:, 0].numpy(),
        "coverage_90": predictive.covers(targets, 0.9)[:, 0].numpy(),
        "sharpness": predictive.variance.sqrt()[:, 0].numpy(),
    }
    for r, rows in enumerate(replicates):
        assert found["rmse"][r] == pytest.approx(np.sqrt((error[rows] ** 2).mean()))
        for name, column in columns.items():
            assert found[name][r] == pytest.approx(column[rows].mean()), name


def fit_of(statistics):
    """The sample of the section that draws the fit."""
    return next(section for section in statistics.sections if section.key == "errors").fit


def test_the_fit_of_a_one_dimensional_input():
    predictive, targets = regression_data(count=900, outputs=1, draws=30)
    inputs = torch.randn(900, 1, generator=torch.Generator().manual_seed(5))
    statistics = Statistics()
    for start in range(0, 900, 50):
        part = slice(start, start + 50)
        piece = GaussianPredictive(predictive.means[:, part], predictive.scales[:, part])
        statistics.update(piece, targets[part], inputs=inputs[part])
    fit = fit_of(statistics)
    assert len(fit) == 400
    chosen = torch.from_numpy(fit.example)
    lower, upper = predictive.interval(0.9)
    np.testing.assert_allclose(fit["x"], inputs[chosen, 0])
    np.testing.assert_allclose(fit["y"], targets[chosen, 0])
    np.testing.assert_allclose(fit["mean"], predictive.mean[chosen, 0])
    np.testing.assert_allclose(fit["lower"], lower[chosen, 0], atol=1e-6)
    np.testing.assert_allclose(fit["upper"], upper[chosen, 0], atol=1e-6)
    means = predictive.means[:, chosen, 0].numpy()
    np.testing.assert_allclose(fit["epistemic_lower"], np.quantile(means, 0.05, axis=0))
    np.testing.assert_allclose(fit["epistemic_upper"], np.quantile(means, 0.95, axis=0))


def test_counts_have_a_fit_too_and_wide_inputs_have_none():
    counts = PoissonPredictive(torch.zeros(2, 30))
    targets = torch.ones(30)
    statistics = Statistics()
    statistics.update(counts, targets, inputs=torch.arange(30.0))
    assert len(fit_of(statistics)) == 30
    assert fit_of(statistics)["epistemic_lower"].tolist() == [1.0] * 30
    for inputs in (None, torch.zeros(30, 2), torch.zeros(30, 1, 8, 8)):
        statistics = Statistics()
        statistics.update(counts, targets, inputs=inputs)
        assert len(fit_of(statistics)) == 0
    several = GaussianPredictive(torch.zeros(1, 30, 2), torch.ones(1, 30, 2))
    statistics = Statistics()
    statistics.update(several, torch.zeros(30, 2), inputs=torch.arange(30.0))
    assert len(fit_of(statistics)) == 0
