"""The whole strategy against the closed form: N, T, prior, likelihood and noise together.

256 stacked chains run through ``Trainer.fit`` on Bayesian linear regression (d = 5, all examples in
a batch) and leave draws by a collector. Every eigenvalue of the whitened covariance,
T⁻¹ L⁻¹ Σ L⁻ᵀ with A⁻¹ = L Lᵀ, must lie within 0.93 and 1.07, and the mean within 0.05 posterior
sd. With 256 chains of 26 draws, about 60 % of an independent draw each, the standard error of an
eigenvalue is about √(2/4000) = 0.022, and 0.016 of a mean: seeds are fixed, and over other seeds
a false alarm has a probability below 1 % (the discretisation takes 1 % of the room).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from lightning_bnn import SGMCMC, bank
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.flat import split_weights
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import Normal
from lightning_bnn.samplers import HMC, SGHMC, Sampler
from lightning_bnn.target import Target, Tempers
from tests.trainers import quiet_trainer
from tests.truth.linear_regression import LinearRegression, full_batches

SAMPLERS = {
    "SGHMC": (partial(SGHMC, lr=0.01, friction=0.2), 800, 150, 25),
    "HMC": (partial(HMC, lr=0.2, leapfrog_steps=6, adapt_steps=20), 100, 40, 2),
}


def check(
    sampler: str = "SGHMC",
    temperature: float = 1.0,
    tempers: Tempers = "posterior",
    prior_sd: float = 0.9,
) -> None:
    problem = replace(LinearRegression.make(), prior_sd=prior_sd)
    make_sampler, steps, burn_in, every = SAMPLERS[sampler]
    bnn = SGMCMC(
        problem.net(), Gaussian(problem.noise_sd), Normal(0.0, problem.prior_sd), make_sampler,
        chains=256, temperature=temperature, tempers=tempers, mode="stacked", seed=5,
    )  # fmt: skip
    collector = SampleCollector(burn_in=burn_in, every=every)
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, callbacks=[collector])
    trainer.fit(bnn, full_batches(problem.inputs, problem.targets, epoch=50))
    posterior = bnn.posterior()
    draws = posterior.sample(len(posterior))["weight"][:, 0].numpy()
    mean, covariance = draws.mean(0), np.cov(draws.T)
    cold = replace(problem, noise_sd=problem.noise_sd * temperature**0.5)
    if tempers == "posterior":
        cold = replace(cold, prior_sd=problem.prior_sd * temperature**0.5)
    truth = np.linalg.inv(cold.precision)
    root = np.linalg.inv(np.linalg.cholesky(truth))
    ratios = np.linalg.eigvalsh(root @ covariance @ root.T)
    assert ratios.min() > 0.93, ratios
    assert ratios.max() < 1.07, ratios
    assert np.abs((mean - cold.mean) / np.sqrt(np.diag(truth))).max() < 0.05


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draws_are_of_the_posterior(sampler: str, temperature: float) -> None:
    check(sampler, temperature)


@pytest.mark.filterwarnings("ignore:The chains sampled at another temperature")  # 16 readings
@pytest.mark.parametrize("temperature", [0.3, 3.0])
def test_draws_are_of_the_posterior_of_a_tempered_likelihood(temperature: float) -> None:
    """Under a prior that matters: with p(w)^1 in the energy, the mean would be sds away."""
    check("SGHMC", temperature, "likelihood", prior_sd=0.1)


def without_prior(*arguments: Any) -> Any:
    weights, energy = split_weights(*arguments)
    return weights, 0 * energy


def doubled(self: Target, *arguments: Any) -> Any:
    return 2 * DATA_ENERGY(self, *arguments)


DATA_ENERGY = Target.data_energy


def noise_without_n(self: Sampler, group: Any, variance: float) -> float:
    return float((variance * group["temperature"]) ** 0.5)


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (bank, "split_weights", without_prior),
        (Target, "data_energy", doubled),
        (Sampler, "noise_scale", noise_without_n),
    ],
)
@pytest.mark.filterwarnings("ignore:The chains sampled at another temperature")
def test_seeded_bugs_are_caught(
    owner: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises(AssertionError):
        check()
