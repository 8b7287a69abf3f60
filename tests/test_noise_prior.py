"""Priors of the noise: closed forms, and the same term in the energy of every strategy."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from scipy import stats
from torch import nn

from lightning_bnn import SGMCMC, DeepEnsemble, VariationalBNN
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from lightning_bnn.priors import BoundPrior, Normal
from lightning_bnn.samplers import SGHMC
from lightning_bnn.target import Target

N, NU = 40, 6.0


def test_it_is_a_gamma_prior_of_the_precision():
    """Gamma(ν/2, ν σ₀²/2) as a density of log λ, up to a constant."""
    for sigma in (0.05, 0.3, 2.0):
        gaussian = Gaussian(0.5, learn=True, noise_prior=NU).double()
        at_start = gaussian.log_prior(torch.zeros(3, 1).double()).item()
        with torch.no_grad():
            gaussian.log_scale.fill_(math.log(sigma))
        law = stats.gamma(NU / 2, scale=2 / (NU * 0.5**2))
        expected = [law.logpdf(s**-2) - 2 * math.log(s) for s in (sigma, 0.5)]
        found = gaussian.log_prior(torch.zeros(3, 1).double()).item() - at_start
        assert found == pytest.approx(expected[0] - expected[1])
        assert at_start == 0


@pytest.mark.parametrize("fitted", [False, True])
def test_the_optimum_of_a_learned_scale(fitted):
    """σ² = (Σ r² + ν σ₀²)/(N + ν) of each output: away from 0 even where all targets are fitted."""
    gaussian = Gaussian([0.5, 2.0], learn=True, noise_prior=NU).double()
    residuals = 0 * torch.randn(N, 2).double() if fitted else torch.randn(N, 2).double()
    optimum = (residuals.square().sum(0) + NU * torch.tensor([0.25, 4.0])) / (N + NU)
    with torch.no_grad():
        gaussian.log_scale.copy_(optimum.log() / 2)
    target = Target(gaussian, num_data=N)
    energy = target.mean_energy(torch.zeros(1, 0), residuals[None], torch.zeros(N, 2).double())
    (gradient,) = torch.autograd.grad(energy.sum(), gaussian.log_scale)
    torch.testing.assert_close(gradient, torch.zeros(2).double(), atol=1e-12, rtol=0)


def test_the_same_noise_everywhere_has_the_prior_of_gaussian():
    outputs = torch.randn(7, 4).double()
    outputs[:, 2:] = torch.tensor([0.3, -1.0])
    heteroscedastic = HeteroscedasticGaussian(noise_prior=NU, noise_scale=0.5)
    scales = heteroscedastic.predictive(outputs[None]).scales[0, 0]
    gaussian = Gaussian([0.5, 0.5], learn=True, noise_prior=NU).double()
    with torch.no_grad():
        gaussian.log_scale.copy_(scales.log())
    torch.testing.assert_close(heteroscedastic.log_prior(outputs), gaussian.log_prior(outputs))


def test_a_row_that_is_fitted_exactly_keeps_some_noise():
    """Of N rows each with a scale of its own: σ² = σ₀² ν/(N + ν) where the residual is 0."""
    likelihood = HeteroscedasticGaussian(minimum_scale=1e-9, noise_prior=NU, noise_scale=0.5)
    sigma = 0.5 * math.sqrt(NU / (N + NU))
    raw = math.log(math.expm1(sigma - 1e-9))
    outputs = torch.tensor([[0.0, raw]] * N, dtype=torch.float64)[None]
    outputs.requires_grad_()
    target = Target(likelihood, num_data=N)
    energy = target.mean_energy(torch.zeros(1, 0), outputs, torch.zeros(N, 1).double())
    (gradient,) = torch.autograd.grad(energy.sum(), outputs)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-9, rtol=0)


def test_each_of_several_sets_has_its_own():
    """With outputs, and what was learned, of its own; as alone."""
    outputs, targets = torch.randn(3, 8, 2).double(), torch.randn(8, 2).double()
    learned = {"log_scale": torch.randn(3, 2).double()}
    gaussian = Gaussian([0.5, 2.0], learn=True, noise_prior=NU).double()
    together = Target(gaussian, num_data=N).noise_energy(outputs, learned)
    for k in range(3):
        with torch.no_grad():
            gaussian.log_scale.copy_(learned["log_scale"][k])
        torch.testing.assert_close(together[k], -gaussian.log_prior(outputs[k]))
    likelihood = HeteroscedasticGaussian(noise_prior=NU)
    together = Target(likelihood, num_data=N).noise_energy(outputs)
    alone = torch.stack([-likelihood.log_prior(one) for one in outputs])
    torch.testing.assert_close(together, alone)
    for none in (Gaussian(0.5), Gaussian(0.5, learn=True, noise_prior=0), Categorical()):
        assert Target(none, num_data=N).noise_energy(outputs) is None
    plain = Target(HeteroscedasticGaussian(), num_data=N)
    with_prior = Target(likelihood, num_data=N)
    energies = [
        t.mean_energy(torch.zeros(3, 0), outputs, targets[:, :1]) for t in (plain, with_prior)
    ]
    torch.testing.assert_close(energies[1] - energies[0], together / N)


STRATEGIES = {
    "VI": partial(VariationalBNN, draws=2),
    "ensemble": partial(DeepEnsemble, members=3),
    "in chunks": partial(DeepEnsemble, members=3, chunk=2),
    "adversarial": partial(DeepEnsemble, members=2, adversarial=0.01),
    "chains": partial(SGMCMC, chains=3, sampler=partial(SGHMC, lr=1e-4), warm_up=5),
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", ["Gaussian", "heteroscedastic"])
def test_every_strategy_trains_on_it_and_shows_the_likelihood(name, kind):
    """The loss with the prior less that without it is −log p/N; the NLL is the same."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    inputs, targets = torch.randn(9, 3), torch.randn(9, 2 if kind == "Gaussian" else 1)
    losses, energies = [], []
    for noise_prior in (0.0, NU):
        likelihood = (
            Gaussian([0.5, 2.0], learn=True, noise_prior=noise_prior)
            if kind == "Gaussian"
            else HeteroscedasticGaussian(noise_prior=noise_prior, noise_scale=0.4)
        )
        strategy = STRATEGIES[name](net, likelihood, Normal(), num_data=N, seed=3)
        for parameter in strategy.parameters():
            if parameter.shape[-1:] == (2,):  # the learned scales, moved from where they start
                with torch.no_grad():
                    parameter.fill_(0.3)
        losses.append(strategy.loss((inputs, targets)))
        bank = getattr(strategy, "bank", None)
        energies.append(strategy._last[0] if bank is None else bank.data_energies)
    difference = (losses[1] - losses[0]).item()
    if kind == "Gaussian":
        moved = Gaussian([0.5, 2.0], learn=True, noise_prior=NU)
        with torch.no_grad():
            moved.log_scale.fill_(0.3)
        sets = 1 if name == "VI" else len(strategy.ids)
        expected = -sets * moved.log_prior(torch.zeros(9, 2)).item() / N
        assert difference == pytest.approx(expected, rel=1e-4)
    else:
        assert difference > 0.01
    torch.testing.assert_close(energies[0], energies[1])


def test_options_are_kept_and_checked():
    for likelihood in (
        Gaussian([0.5, 2.0], learn=True, noise_prior=3.0),
        HeteroscedasticGaussian(noise_prior=2.0, noise_scale=0.1),
    ):
        again = type(likelihood)(**likelihood.config())
        assert repr(again) == repr(likelihood)
    with pytest.raises(ConfigurationError, match=r"noise_prior= .*got -1"):
        Gaussian(0.5, learn=True, noise_prior=-1)
    with pytest.raises(ConfigurationError, match=r"noise_scale= .*got 0"):
        HeteroscedasticGaussian(noise_scale=0.0)


def test_a_prior_of_a_likelihood_of_ones_own():
    class Own(Gaussian):
        @property
        def has_prior(self):
            return True

        def log_prior(self, outputs):
            return -outputs.square().mean()

    net = nn.Linear(2, 1)
    prior = BoundPrior(Normal(), net, dict(net.named_parameters()))
    target, outputs = Target(Own(0.5), prior, num_data=N), torch.randn(3, 5, 1)
    torch.testing.assert_close(target.noise_energy(outputs), outputs.square().mean((1, 2)))
