"""Evidence by sampling against closed forms, by their own error bars."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from scipy import integrate, stats
from torch import nn

from lightning_bnn import BayesianLinear, DrawsPosterior, LaplaceBNN
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.evidence import Evidence, annealed_importance, thermodynamic_integration
from lightning_bnn.families import FullRank
from lightning_bnn.likelihoods import Bernoulli, Gaussian, HeteroscedasticGaussian
from lightning_bnn.priors import Laplace, Learned, Normal, Prior, StudentT
from tests.families.exact import best_elbo, exact
from tests.trainers import quiet_trainer
from tests.truth.linear_regression import LinearRegression, full_batches

METHODS = {"AIS": annealed_importance, "TI": thermodynamic_integration}


def polynomial(order: int) -> LinearRegression:
    """A quadratic with noise, and powers up to ``order`` to explain it; the prior is N(0, 1)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, generator=generator, dtype=torch.float64) * 2 - 1
    noise = 0.3 * torch.randn(30, generator=generator, dtype=torch.float64)
    rows = torch.stack([x**power for power in range(order + 1)], 1)
    return LinearRegression(rows, (1 - x + 0.5 * x**2 + noise)[:, None], 0.3, 1.0)


def fitted(problem: LinearRegression, bnn: Any, epochs: int = 1) -> Evidence:
    """What the posterior of a fit knows."""
    trainer = quiet_trainer(max_epochs=epochs, precision="64-true")
    trainer.fit(bnn, full_batches(problem.inputs, problem.targets, epoch=1))
    found: Evidence = bnn.posterior().evidence
    return found


def full_rank_bound(problem: LinearRegression) -> Evidence:
    """Of the best Gaussian, which is the posterior: the bound is the evidence."""
    bnn, data = exact(problem, FullRank()), (problem.inputs, problem.targets)
    best_elbo(bnn, data)
    found: Evidence = bnn.evidence_bound([data], draws=100)
    return found


def close(found: Evidence, truth: float, sds: float = 4.0) -> None:
    assert abs(found.value - truth) < sds * found.error, (found, truth)


@pytest.mark.parametrize("method", METHODS)
def test_it_agrees_with_the_closed_form(method: str) -> None:
    """Within 4 standard errors; by Gaussian errors a false alarm of 6e-5; the seed is fixed."""
    problem, short = polynomial(2), {"AIS": {"rungs": 80}, "TI": {"rungs": 16, "transitions": 6}}
    data = [
        (problem.inputs[:20], problem.targets[:20]),
        (problem.inputs[20:], problem.targets[20:]),
    ]
    options = {"leapfrog_steps": 5, "seed": 0, **short[method]}
    found = METHODS[method](problem.net(), Gaussian(0.3), data, **options)
    assert found.method == method
    assert 0.02 < found.error < 1.0
    close(found, problem.log_evidence)


@pytest.mark.slow
@pytest.mark.parametrize("order", range(5))
def test_all_estimators_agree_on_polynomials(order: int) -> None:
    """Exact ones to rounding; the others within 4 of their standard errors, and these below 0.6."""
    problem = polynomial(order)
    truth, likelihood, prior = problem.log_evidence, Gaussian(0.3), Normal(0.0, 1.0)
    closed = fitted(problem, BayesianLinear(problem.net(), likelihood, prior))
    optimizer = partial(torch.optim.LBFGS, max_iter=100, line_search_fn="strong_wolfe")
    bnn = LaplaceBNN(
        problem.net(), likelihood, prior, structure="full", optimizer=optimizer, seed=0
    )
    laplace = fitted(problem, bnn, epochs=3)
    assert [closed.method, laplace.method] == ["closed form", "Laplace"]
    assert closed.value == pytest.approx(truth, abs=1e-8)
    assert laplace.value == pytest.approx(truth, abs=1e-6)
    data = [(problem.inputs, problem.targets)]
    estimates = [
        full_rank_bound(problem),
        annealed_importance(problem.net(), likelihood, data, prior, leapfrog_steps=6, seed=0),
        thermodynamic_integration(
            problem.net(), likelihood, data, prior, rungs=30, leapfrog_steps=6, seed=0
        ),
    ]
    assert [one.method for one in estimates] == ["ELBO", "AIS", "TI"]
    for one in estimates:
        assert 0 < one.error < 0.6
        close(one, truth)


def test_a_network_that_is_not_linear_against_quadrature() -> None:
    """Two weights, yes-or-no targets and a Laplace prior; in two batches and chunks of chains."""

    class Bend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            return 3 * torch.tanh(self.weights[0] * x[:, 0]) + self.weights[1]

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(12, 1, generator=generator, dtype=torch.float64)
    y = (x[:, 0] > 0.2).double()

    grid = torch.linspace(-9, 9, 1201, dtype=torch.float64)
    a, b = grid[:, None, None], grid[None, :, None]
    logits = 3 * torch.tanh(a * x[:, 0]) + b
    log_prob = (y * logits - nn.functional.softplus(logits)).sum(-1)
    prior_log = -(a.abs() + b.abs())[..., 0] / 0.7 - 2 * math.log(1.4)
    total = float((log_prob + prior_log).exp().sum() * (18 / 1200) ** 2)
    data, prior = [(x[:5], y[:5]), (x[5:], y[5:])], Laplace(0.0, 0.7)
    options: dict[str, Any] = {"rungs": 20, "leapfrog_steps": 5, "chunk": 40, "seed": 0}
    found = annealed_importance(Bend(), Bernoulli(), data, prior, **options)
    close(found, math.log(total))
    assert found.error < 0.3


def test_one_rung_is_importance_sampling_from_the_prior() -> None:
    """N(2; 0, 2); what starts anywhere else than at the prior is off by many standard errors."""
    net, data = nn.Linear(1, 1, bias=False), [(torch.ones(1, 1), torch.full((1, 1), 2.0))]
    found = annealed_importance(
        net, Gaussian(1.0), data, chains=2000, rungs=1, leapfrog_steps=3, seed=0
    )
    close(found, -0.5 * math.log(4 * math.pi) - 1)
    assert found.error < 0.2


def test_learned_scales_of_the_prior_are_integrated_out() -> None:
    """One weight w ~ N(0, 1/τ), τ ~ Gamma(1, 0.1): a Student-t prior of 2 degrees of freedom."""
    x, y = torch.ones(1, 1).double(), torch.full((1, 1), 0.5).double()
    net = nn.Linear(1, 1, bias=False).double()
    student = stats.t(2, 0, math.sqrt(0.1))
    total, _ = integrate.quad(
        lambda w: stats.norm(w, 0.4).pdf(0.5) * student.pdf(w), -50, 50, points=[0, 0.5]
    )
    for prior in (Normal(scale=Learned()), StudentT(scale=math.sqrt(0.1), df=2.0)):
        found = annealed_importance(
            net, Gaussian(0.4), [(x, y)], prior, chains=256, rungs=20, leapfrog_steps=4, seed=0
        )
        close(found, math.log(total))
        assert found.error < 0.2


def test_the_seed_decides_and_nothing_else_moves() -> None:
    problem = polynomial(1)
    net, data = problem.net(), [(problem.inputs, problem.targets)]
    before, state = net.weight.clone(), torch.get_rng_state()
    run = partial(
        annealed_importance, net, Gaussian(0.3), data, chains=20, rungs=60, leapfrog_steps=3
    )
    one = run(seed=1)
    assert run(seed=1) == one != run(seed=2)
    assert torch.equal(net.weight, before)
    assert net.weight.requires_grad
    assert torch.equal(torch.get_rng_state(), state)


def test_too_few_rungs_are_told() -> None:
    problem = polynomial(2)
    data = [(problem.inputs, problem.targets)]
    with pytest.warns(UserWarning, match="chains have nearly all the weight"):
        found = annealed_importance(
            problem.net(), Gaussian(0.3), data, chains=40, rungs=2, leapfrog_steps=2, seed=0
        )
    assert found.error > 2  # and the error says so, too


class Flat(Prior):
    """One that nobody can draw from."""

    def log_prob(self, weights: Any, loc: Any, scale: float) -> Any:
        return 0 * weights


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"likelihood": Gaussian(0.3, learn=True)}, ConfigurationError, "learns or has a prior"),
        (
            {"likelihood": HeteroscedasticGaussian(noise_prior=1.0)},
            ConfigurationError,
            "learns or has a prior",
        ),
        ({"prior": Flat()}, ConfigurationError, "Flat does not know how to draw"),
        ({"data": []}, DataError, "no evidence without data"),
        ({"chains": 1}, ConfigurationError, "chains= is a whole number, at least 2"),
        ({"rungs": 0}, ConfigurationError, "rungs= is a whole number"),
        ({"data": [(torch.ones(2, 3), torch.ones(2, 4))]}, DataError, "targets of shape"),
    ],
)
def test_what_has_no_evidence(options: dict[str, Any], error: type, message: str) -> None:
    given = {
        "net": nn.Linear(3, 1, bias=False),
        "likelihood": Gaussian(0.3),
        "data": [(torch.ones(2, 3), torch.ones(2, 1))],
        **options,
    }
    with pytest.raises(error, match=message):
        annealed_importance(**given, seed=0)
    with pytest.raises(error, match=message):
        thermodynamic_integration(**given, seed=0)


def test_rungs_of_thermodynamic_integration_are_even() -> None:
    with pytest.raises(ConfigurationError, match="even number"):
        thermodynamic_integration(
            nn.Linear(1, 1), Gaussian(0.3), [(torch.ones(2, 1), torch.ones(2, 1))], rungs=5
        )


def test_a_posterior_keeps_it(tmp_path: Any) -> None:
    net = nn.Linear(1, 1, bias=False)
    posterior = DrawsPosterior(net, Gaussian(0.3), [{"weight": torch.ones(1, 1)}])
    posterior.evidence = annealed_importance(
        net, Gaussian(0.3), [(torch.ones(2, 1), torch.ones(2, 1))], chains=10, rungs=5, seed=0
    )
    posterior.save(tmp_path)
    assert DrawsPosterior.load(tmp_path).evidence == posterior.evidence
    assert posterior.map(lambda name, tensor: 0 * tensor).evidence is None
