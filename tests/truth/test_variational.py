"""VariationalBNN against the closed form on Bayesian linear regression.

Mean-field VI on a Gaussian posterior N(m, A⁻¹) has mean m, variances 1/A_ii and an ELBO that
falls short of the evidence by ½(Σ log A_ii − log det A). The network has 512 outputs, each a
copy of the same problem with weights of its own; the averages over copies are judged, so that
what is left of the noise of training is small against the tolerance.

False alarms: over eight other seeds the largest deviations seen, of any estimator, were 0.005
posterior sd (mean), 0.010 (variance ratio; its spread between seeds is 0.0015) and 0.0001 nat
(gap). The tolerances of 0.02, 0.02 and 0.01 lie seven spreads beyond: a rate far below 1 in 10⁶
for a new seed. The seed here is fixed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from lightning_bnn import VariationalBNN
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.native.library import load
from lightning_bnn.priors import Normal, Prior
from lightning_bnn.target import Tempers
from tests.trainers import quiet_trainer
from tests.truth.linear_regression import LinearRegression, full_batches

COPIES, STEPS = 512, 2000


def fit(
    problem: LinearRegression,
    estimator: str,
    seed: int = 1,
    dtype: torch.dtype = torch.float64,
    temperature: float = 1.0,
    tempers: Tempers = "likelihood",
    prior: Prior | None = None,
    steps: int = STEPS,
) -> VariationalBNN:
    inputs, targets = problem.inputs.to(dtype), problem.targets.to(dtype)
    targets = targets.expand(-1, COPIES).contiguous()
    count = len(targets)
    largest = float(np.linalg.eigvalsh(problem.precision)[-1])

    def optimizer(parameters: list[torch.nn.Parameter]) -> SGD:
        mean, rho = parameters
        # the curvature of the mean energy is A/N in the means and 2T/N in log σ
        rates = 0.1 * count / largest, 0.01 * count
        return SGD([{"params": [p], "lr": lr} for p, lr in zip((mean, rho), rates, strict=True)])

    bnn = VariationalBNN(
        problem.net(COPIES).to(dtype),
        likelihood=Gaussian(problem.noise_sd),
        prior=Normal(0.0, problem.prior_sd) if prior is None else prior,
        temperature=temperature,
        tempers=tempers,
        estimator=estimator,
        initial_scale=0.1 * temperature,
        optimizer=optimizer,
        scheduler=lambda made: LambdaLR(made, lambda step: min(1.0, 2 * (1 - step / steps))),
        scheduler_interval="step",
        seed=seed,
    )
    trainer = quiet_trainer(max_steps=steps, limit_val_batches=0)
    trainer.fit(bnn, full_batches(inputs, targets))
    return bnn


def moments(bnn: VariationalBNN) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of each weight, averaged over the copies."""
    posterior = bnn.posterior()
    mean, sd = (part["weight"].double().numpy() for part in (posterior.mean, posterior.sd))
    return mean.mean(0), (sd**2).mean(0)


def errors(problem: LinearRegression, bnn: VariationalBNN) -> tuple[float, float, float]:
    """Largest error of the mean (in posterior sd), of the variance ratio, and of the ELBO gap."""
    precision = problem.precision
    mean, variance = moments(bnn)
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    gap = problem.log_evidence - problem.elbo(mean, np.sqrt(variance))
    exact = 0.5 * (np.log(np.diag(precision)).sum() - np.linalg.slogdet(precision)[1])
    return (
        float(np.abs((mean - problem.mean) / sd).max()),
        float(np.abs(variance * np.diag(precision) - 1).max()),
        float(abs(gap - exact)),
    )


def within_tolerance(problem: LinearRegression, bnn: VariationalBNN) -> bool:
    by_mean, by_variance, by_gap = errors(problem, bnn)
    return by_mean <= 0.02 and by_variance <= 0.02 and by_gap <= 0.01


@pytest.mark.parametrize(
    ("estimator", "dtype"),
    [
        ("weight", torch.float64),
        ("weight", torch.float32),  # compiled, where there is a compiler
        ("flipout", torch.float64),
        ("local", torch.float64),
    ],
)
def test_mean_field_is_the_closed_form(estimator: str, dtype: torch.dtype) -> None:
    problem = LinearRegression.make()
    bnn = fit(problem, estimator, dtype=dtype)
    assert bnn.target.num_data == len(problem.inputs)
    compiled = dtype == torch.float32 and load() is not None
    assert (bnn.family.workspace().key is not None) == compiled
    assert within_tolerance(problem, bnn), errors(problem, bnn)


def test_temperature_is_that_of_the_likelihood_alone() -> None:
    """T = 1/4 is noise of half the sd, under the prior as it is (here one that matters)."""
    problem = replace(LinearRegression.make(), prior_sd=0.05)
    bnn = fit(problem, "weight", dtype=torch.float32, temperature=0.25)
    colder = replace(problem, noise_sd=problem.noise_sd / 2)
    prior_too = replace(colder, prior_sd=problem.prior_sd / 2)
    # less of the noise averages out than at T = 1: 0.025 was seen, 0.46 if the prior were tempered
    by_mean, by_variance, _ = errors(colder, bnn)
    assert by_mean <= 0.02
    assert by_variance <= 0.1
    assert errors(prior_too, bnn)[1] > 0.4


class Estimated(Prior):
    """A Gaussian prior that knows neither its closed forms nor its powers."""

    def log_prob(self, weights: Tensor, loc: Tensor | float, scale: float) -> Tensor:
        return Normal.log_prob(self, weights, loc, scale)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Normal, torch.float32), (Estimated, torch.float64)],  # the first is compiled
)
def test_a_cold_posterior_tempers_the_prior_too(kind: type[Prior], dtype: torch.dtype) -> None:
    """T = 1/4 is noise and a prior of half the sd: the mean stays, each variance is a quarter."""
    problem = replace(LinearRegression.make(), prior_sd=0.05)
    prior = kind(0.0, problem.prior_sd)
    bnn = fit(problem, "weight", 1, dtype, temperature=0.25, tempers="posterior", prior=prior)
    colder = replace(problem, noise_sd=problem.noise_sd / 2, prior_sd=problem.prior_sd / 2)
    assert np.allclose(colder.mean, problem.mean)
    by_mean, by_variance, _ = errors(colder, bnn)
    assert by_mean <= 0.02
    assert by_variance <= 0.1
    likelihood_alone = replace(colder, prior_sd=problem.prior_sd)
    assert errors(likelihood_alone, bnn)[1] > 0.2
    # the evidence, and so its bound, is that of the untempered model
    batch = (problem.inputs.to(dtype), problem.targets.to(dtype).expand(-1, COPIES))
    mean, variance = moments(bnn)
    exact = COPIES * problem.elbo(mean, np.sqrt(variance))
    assert float(bnn.elbo(batch)) == pytest.approx(exact, rel=0.01)


def test_elbo_agrees_with_the_exact_one() -> None:
    """Monte Carlo over 4,096 draws of one copy: tolerance 5 standard errors (1 in 10⁶)."""
    problem = LinearRegression.make()
    bnn = VariationalBNN(
        problem.net(),
        likelihood=Gaussian(problem.noise_sd),
        prior=Normal(0.0, problem.prior_sd),
        num_data=len(problem.inputs),
        initial_scale=0.05,
    )
    with torch.no_grad():
        bnn.family.mean.copy_(torch.tensor(problem.mean))
    batch = (problem.inputs, problem.targets)
    exact = problem.elbo(problem.mean, np.full(5, 0.05))
    outputs = bnn.posterior().predict(problem.inputs, 4096).outputs
    each = torch.stack([bnn.likelihood.log_prob(one, problem.targets).sum() for one in outputs])
    standard_error = float(each.std()) / 4096**0.5
    assert abs(float(bnn.elbo(batch, draws=4096)) - exact) < 5 * standard_error


class AveragedKL(VariationalBNN):
    """The defect of other libraries: the KL divided by the number of layers (here two)."""

    def loss(self, batch: object, kl_weight: float = 1.0) -> torch.Tensor:
        return super().loss(batch, kl_weight / 2)


@pytest.mark.slow
def test_an_averaged_kl_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.truth.test_variational.VariationalBNN", AveragedKL)
    problem = LinearRegression.make()
    assert not within_tolerance(problem, fit(problem, "local"))
