"""Linear regression in closed form against NumPy and scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mpmath  # of torch's own needs
import numpy as np
import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from scipy import stats
from sklearn.linear_model import BayesianRidge
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import BayesianLinear, PolynomialRegression, Posterior
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import Laplace, Learned, Normal
from lightning_bnn.strategies.linear import DataFactor, solve, triangle
from tests.trainers import quiet_trainer
from tests.truth.linear_regression import LinearRegression

PROBLEM = LinearRegression.make()


def fit(bnn: BayesianLinear, inputs: Tensor, targets: Tensor, **options: Any) -> Any:
    trainer = quiet_trainer(**{"max_epochs": 7, **options})
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
    trainer.fit(bnn, loader, options.pop("val", None))
    return trainer


def known() -> BayesianLinear:
    net = PROBLEM.net()
    return BayesianLinear(net, Gaussian(PROBLEM.noise_sd), Normal(0.0, PROBLEM.prior_sd))


def test_it_is_the_closed_form() -> None:
    """Mean, covariance, evidence and predictive to 1e-8, in float64."""
    bnn = known()
    trainer = fit(bnn, PROBLEM.inputs, PROBLEM.targets)
    assert trainer.global_step == 1
    posterior = bnn.posterior()
    mean = posterior.mean["weight"][0].numpy()
    np.testing.assert_allclose(mean, PROBLEM.mean, rtol=1e-8)
    rows = posterior.deviations["weight"][:, 0].numpy()
    covariance = np.linalg.inv(PROBLEM.precision)
    np.testing.assert_allclose(rows.T @ rows, covariance, rtol=1e-8, atol=1e-12)
    assert bnn.log_evidence() == pytest.approx(PROBLEM.log_evidence, abs=1e-8)
    x = PROBLEM.inputs[:9]
    predictive = posterior.predict(x)
    epistemic = np.einsum("ni,ij,nj->n", x, covariance, x)
    np.testing.assert_allclose(predictive.mean[:, 0], x.numpy() @ PROBLEM.mean, rtol=1e-8)
    np.testing.assert_allclose(predictive.epistemic[:, 0], epistemic, rtol=1e-8)
    np.testing.assert_allclose(predictive.aleatoric[:, 0], PROBLEM.noise_sd**2, rtol=1e-6)


def test_draws_have_the_closed_forms_moments() -> None:
    """Of 4,096 draws with a fixed seed: 5 standard errors, a false alarm in 10⁶."""
    bnn = known()
    fit(bnn, PROBLEM.inputs, PROBLEM.targets)
    posterior, count = bnn.posterior(), 4096
    sampled = posterior.sample(count, torch.Generator().manual_seed(0))["weight"][:, 0]
    covariance = np.linalg.inv(PROBLEM.precision)
    sd = np.sqrt(np.diag(covariance))
    error = (sampled.mean(0).numpy() - PROBLEM.mean) / sd * count**0.5
    assert np.abs(error).max() < 5
    found = np.cov(sampled.numpy().T)
    assert (np.abs(found - covariance) / np.outer(sd, sd)).max() < 5 * (2 / count) ** 0.5


def test_mackays_updates_find_what_scikit_learn_finds() -> None:
    """With its hyperpriors turned off."""
    bnn = BayesianLinear(PROBLEM.net(), Gaussian(learn=True))
    bnn.likelihood.double()
    fit(bnn, PROBLEM.inputs, PROBLEM.targets)
    off = dict.fromkeys(("alpha_1", "alpha_2", "lambda_1", "lambda_2"), 0.0)
    ridge = BayesianRidge(
        fit_intercept=False, tol=1e-12, max_iter=10_000, compute_score=True, **off
    )
    ridge.fit(PROBLEM.inputs.numpy(), PROBLEM.targets[:, 0].numpy())
    assert float(bnn.finished["alpha"]) == pytest.approx(ridge.lambda_, rel=1e-5)
    noise = float(bnn.likelihood.log_scale.detach().exp())
    assert noise == pytest.approx(ridge.alpha_**-0.5, rel=1e-6)
    posterior = bnn.posterior()
    np.testing.assert_allclose(posterior.mean["weight"][0].numpy(), ridge.coef_, rtol=1e-6)
    assert bnn.log_evidence() == pytest.approx(ridge.scores_[-1], abs=1e-6)
    mean, sd = ridge.predict(PROBLEM.inputs.numpy(), return_std=True)
    predictive = posterior.predict(PROBLEM.inputs)
    np.testing.assert_allclose(predictive.mean[:, 0], mean, rtol=1e-6)
    np.testing.assert_allclose(predictive.variance[:, 0].sqrt(), sd, rtol=1e-6)


def test_what_is_found_is_the_evidences_maximum() -> None:
    bnn = BayesianLinear(PROBLEM.net(), Gaussian(learn=True))
    fit(bnn, PROBLEM.inputs, PROBLEM.targets)
    x, y = PROBLEM.inputs.numpy(), PROBLEM.targets[:, 0].numpy()
    noise, alpha = float(bnn.likelihood.log_scale.detach().exp()), float(bnn.finished["alpha"])

    def evidence(noise: float, alpha: float) -> float:
        return LinearRegression(
            torch.tensor(x), torch.tensor(y)[:, None], noise, alpha**-0.5
        ).log_evidence

    best = evidence(noise, alpha)
    assert bnn.log_evidence() == pytest.approx(best, abs=1e-8)
    for factor in (0.9, 1.1):
        assert evidence(noise * factor, alpha) < best
        assert evidence(noise, alpha * factor) < best


@pytest.mark.parametrize("shared", [True, False])
def test_several_outputs(shared: bool) -> None:
    """Each with a noise of its own where the likelihood has several."""
    torch.manual_seed(1)
    inputs = torch.randn(200, 3)
    noise = torch.tensor([0.1, 0.5])
    targets = inputs @ torch.randn(3, 2) + 2 + noise * torch.randn(200, 2)
    scale: Any = 1.0 if shared else [1.0, 1.0]
    bnn = BayesianLinear(nn.Linear(3, 2), Gaussian(scale, learn=True))
    fit(bnn, inputs, targets)
    found = bnn.likelihood.log_scale.exp()
    expected = noise.square().mean().sqrt() if shared else noise
    torch.testing.assert_close(found.detach(), expected, rtol=0.15, atol=0.0)
    posterior = bnn.posterior()
    closed, drawn = posterior.predict(inputs[:5]), posterior.predict(inputs[:5], draws=4000)
    torch.testing.assert_close(drawn.mean, closed.mean, rtol=0.0, atol=0.02)
    torch.testing.assert_close(drawn.epistemic, closed.epistemic, rtol=0.2, atol=0.0)


def test_priors_of_their_own_for_weight_and_bias() -> None:
    """fan_in scales the weight's and not the bias's: against the dense formula."""
    torch.manual_seed(0)
    x, y = torch.randn(20, 4).double(), torch.randn(20, 1).double()
    bnn = BayesianLinear(nn.Linear(4, 1).double(), Gaussian(0.5), Normal(0.0, 2.0, fan_in=True))
    fit(bnn, x, y)
    rows = torch.cat([x, torch.ones(20, 1)], 1).numpy()
    prior = np.diag([1.0] * 4 + [4.0])
    covariance = 0.25 * np.eye(20) + rows @ prior @ rows.T
    _, log_determinant = np.linalg.slogdet(2 * np.pi * covariance)
    target = y[:, 0].numpy()
    expected = -0.5 * (log_determinant + target @ np.linalg.solve(covariance, target))
    assert bnn.log_evidence() == pytest.approx(expected, abs=1e-8)


# ---------------------------------------------------------------- the fit around it


def features() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.ReLU(), nn.Linear(6, 1)
    )


def test_fit_validate_test_predict_save_load(tmp_path: Path) -> None:
    net, inputs, targets = features(), PROBLEM.inputs.float(), PROBLEM.targets.float()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    bnn = BayesianLinear(net)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16)
    trainer = quiet_trainer(max_epochs=5)
    trainer.fit(bnn, loader, loader)
    assert trainer.current_epoch <= 1
    assert trainer.callback_metrics["val_nll"].isfinite()
    (results,) = trainer.test(bnn, loader, verbose=False)
    assert "test_nll" in results
    assert "test_nll_mcse" not in results
    assert results["test_nll"] == pytest.approx(float(trainer.callback_metrics["test_nll"]))
    joined = Predictive.concatenate(trainer.predict(bnn, loader))
    posterior = bnn.posterior()
    torch.testing.assert_close(joined.epistemic, posterior.predict(inputs).epistemic)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    kept = {name: value for name, value in bnn.net.state_dict().items() if name not in bnn.trained}
    assert all(torch.equal(before[name], value) for name, value in kept.items())
    posterior.save(tmp_path)
    again = Posterior.load(tmp_path)
    torch.testing.assert_close(again.predict(inputs).variance, posterior.predict(inputs).variance)


def test_a_checkpoint_gives_it_back(tmp_path: Path) -> None:
    inputs, targets = PROBLEM.inputs, PROBLEM.targets
    bnn = known()
    saver = ModelCheckpoint(tmp_path, "last")
    fit(bnn, inputs, targets, callbacks=[saver], enable_checkpointing=True)
    again = BayesianLinear.load_from_checkpoint(tmp_path / "last.ckpt")
    assert again.log_evidence() == bnn.log_evidence()
    outputs = [one.posterior().predict(inputs).variance for one in (bnn, again)]
    assert torch.equal(*outputs)
    resumed = known()
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16)
    saver = ModelCheckpoint(tmp_path / "again")
    trainer = quiet_trainer(max_epochs=2, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(resumed, loader, ckpt_path=tmp_path / "last.ckpt")
    assert torch.equal(resumed.posterior().predict(inputs).variance, outputs[0])


def test_other_data_are_fitted_anew() -> None:
    bnn = known()
    fit(bnn, PROBLEM.inputs[:30], PROBLEM.targets[:30])
    fit(bnn, PROBLEM.inputs, PROBLEM.targets)
    assert bnn.log_evidence() == pytest.approx(PROBLEM.log_evidence, abs=1e-8)


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigurationError, match="ends in an nn"):
        BayesianLinear(nn.Conv1d(1, 1, 1))
    with pytest.raises(ConfigurationError, match="a Gaussian"):
        BayesianLinear(nn.Linear(1, 1), Categorical())
    for prior in (Laplace(), Normal(1.0, 1.0), Normal(scale=Learned())):
        with pytest.raises(ConfigurationError, match="prior"):
            BayesianLinear(nn.Linear(1, 1), prior=prior)
    x, y = torch.randn(8, 2), torch.randn(8, 1)
    with pytest.raises(ConfigurationError, match="not that of its last layer"):
        fit(BayesianLinear(nn.Sequential(nn.Linear(2, 1), nn.Tanh())), x, y)
    with pytest.raises(DataError, match="NaN"):
        fit(BayesianLinear(nn.Linear(2, 1)), x * float("nan"), y)
    with pytest.raises(ConfigurationError, match="inputs=2"):
        fit(PolynomialRegression(order=2), x, y)


def test_targets_without_noise_or_signal_end_in_numbers() -> None:
    x = torch.randn(30, 2).double()
    for y in (
        x @ torch.ones(2, 1).double(),
        torch.zeros(30, 1).double(),
        torch.randn(30, 1) * 1e-9,
    ):
        rows, target = x, y.double()
        data = DataFactor.of(triangle(torch.cat([rows, target], 1)), rows.shape[1], 30)
        found = solve(data, None, None)
        for one in (found.mean, found.sd, found.noise):
            assert one.isfinite().all()


def test_features_that_are_all_zero_leave_the_prior() -> None:
    rows = torch.cat([torch.zeros(9, 2), torch.ones(9, 1)], 1).double()
    found = solve(DataFactor.of(triangle(rows), 2, 9), None, None)
    assert found.mean.abs().max() == 0
    assert float(found.noise) == pytest.approx(1.0)
    torch.testing.assert_close(found.sd, torch.ones(2, 1).double())


def test_raw_powers_lose_nothing_to_their_size() -> None:
    """Powers to 10¹⁰ beside 1, whose sums of squares have no inverse in float64.

    Against arithmetic with 60 digits: evidence to 1e-5, predictions to 1e-5 of the noise.
    """
    mpmath.mp.dps = 60
    torch.manual_seed(0)
    x = torch.rand(30, dtype=torch.float64) * 10
    y, noise, prior_sd = (x / 3).sin() + 0.1 * torch.randn(30).double(), 0.1, 2.0
    bnn = PolynomialRegression(10, likelihood=Gaussian(noise), prior=Normal(0.0, prior_sd)).double()
    fit(bnn, x[:, None], y[:, None])
    rows = mpmath.matrix([[mpmath.mpf(v) ** k for k in range(11)] for v in x.tolist()])
    targets = mpmath.matrix(y.tolist())
    precision = rows.T * rows / noise**2 + mpmath.eye(11) / prior_sd**2
    mean = rows * mpmath.inverse(precision) * rows.T * targets / noise**2
    marginal = mpmath.eye(30) * noise**2 + rows * rows.T * prior_sd**2
    energy = (targets.T * mpmath.inverse(marginal) * targets)[0]
    volume = mpmath.log(mpmath.det(2 * mpmath.pi * marginal))
    assert bnn.log_evidence() == pytest.approx(float(-(energy + volume) / 2), abs=1e-5)
    predicted = bnn.posterior().predict(x[:, None]).mean[:, 0]
    np.testing.assert_allclose(predicted.numpy(), [float(m) for m in mean], atol=1e-5 * noise)


def test_positions_of_a_sequence_are_rows() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, 3)
    y = x @ torch.randn(3, 2) + 0.1 * torch.randn(6, 4, 2)
    one, other = BayesianLinear(nn.Linear(3, 2)), BayesianLinear(nn.Linear(3, 2))
    fit(one, x, y)
    fit(other, x.flatten(0, 1), y.flatten(0, 1))
    assert one.log_evidence() == pytest.approx(other.log_evidence(), abs=1e-9)
    assert one.posterior().predict(x).mean.shape == y.shape


def test_more_features_than_memory_says_how_much() -> None:
    with pytest.raises(ConfigurationError, match=r"100,001 features needs 640\.0 GB of memory"):
        BayesianLinear(nn.Linear(100_000, 1))


# ---------------------------------------------------------------- evidence chooses the order


def evidence_of(order: int, x: Tensor, y: Tensor) -> float:
    rows = torch.stack([x**power for power in range(order + 1)], 1)
    data = DataFactor.of(triangle(torch.cat([rows, y], 1)), rows.shape[1], len(x))
    return solve(data, None, None).log_evidence


def test_the_evidence_picks_the_order_of_a_quadratic() -> None:
    torch.manual_seed(0)
    x = torch.rand(50, dtype=torch.float64) * 4 - 2
    y = (1 - x + 0.5 * x**2 + 0.3 * torch.randn(50))[:, None]
    evidences = {}
    for order in range(1, 7):
        bnn = PolynomialRegression(order)
        bnn.double()
        fit(bnn, x[:, None], y, precision="64-true")
        evidences[order] = bnn.log_evidence()
        assert evidences[order] == pytest.approx(evidence_of(order, x, y), abs=1e-6)
    assert max(evidences, key=evidences.get) == 2


@pytest.mark.parametrize("true", [1, 2, 3])
def test_the_evidence_picks_the_true_order(true: int) -> None:
    """In at least 95 of 100 sets of 50 points, among the orders 0 to 6.

    Of seeded sets with random coefficients, the first 100 in which a t-test of the highest one is
    significant at 0.001: in the others no method could. The seeds are fixed.
    """
    right = tested = seed = 0
    while tested < 100:
        generator = torch.Generator().manual_seed(seed)
        seed += 1
        x = torch.rand(50, generator=generator, dtype=torch.float64) * 6 - 3
        coefficients = torch.randn(true + 1, generator=generator, dtype=torch.float64)
        rows = torch.stack([x**power for power in range(true + 1)], 1)
        y = rows @ coefficients + 0.3 * torch.randn(50, generator=generator, dtype=torch.float64)
        fitted = torch.linalg.lstsq(rows, y[:, None]).solution[:, 0]
        left = 50 - true - 1
        variance = (y - rows @ fitted).square().sum() / left
        error = (variance * torch.inverse(rows.T @ rows)[-1, -1]).sqrt()
        if 2 * stats.t.sf(abs(float(fitted[-1] / error)), left) > 1e-3:
            continue
        tested += 1
        evidences = [evidence_of(order, x, y[:, None]) for order in range(7)]
        right += int(np.argmax(evidences)) == true
    assert right >= 95, right
