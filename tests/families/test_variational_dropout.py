"""Variational dropout: its KL against quadrature, what it prunes, and its fit of a linear model."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from scipy.special import dawsn
from torch import nn
from torch.optim import Adam

from lightning_bnn import VariationalBNN, masked, signal_to_noise
from lightning_bnn.callbacks import SNRPruning
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import VariationalDropout
from lightning_bnn.families.variational_dropout import dropout_kl
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import BoundPrior, Normal
from tests.nets import loader, make_data, mlp
from tests.trainers import quiet_trainer
from tests.truth.linear_regression import full_batches


def exact_kl(log_alpha: float) -> float:
    """E log|z| + (γ + log 2)/2 for z ~ N(α^-1/2, 1), by quadrature on both sides of 0."""
    mean = np.exp(-log_alpha / 2)

    def integrand(z: float) -> float:
        return float(np.log(abs(z)) * np.exp(-0.5 * (z - mean) ** 2) / np.sqrt(2 * np.pi))

    ends = sorted({mean - 12, min(0.0, mean - 12), 0.0, mean, mean + 12})
    parts = [quad(integrand, a, b, limit=200)[0] for a, b in itertools.pairwise(ends)]
    return sum(parts) + (np.euler_gamma + np.log(2)) / 2


def test_the_kl_by_quadrature() -> None:
    """The approximation is within 0.01 nats; the integral has the derivative √2 D(x/√2)."""
    points = np.linspace(-9, 9, 73)
    exact = np.array([exact_kl(point) for point in points])
    found = dropout_kl(torch.tensor(points)).numpy()
    assert np.abs(found - exact).max() < 0.01
    assert np.abs(found - exact).max() > 0.001
    step = 1e-3
    slope = (exact_kl(1 + step) - exact_kl(1 - step)) / (2 * step)
    mean = np.exp(-0.5)
    assert slope == pytest.approx(-0.5 * mean * np.sqrt(2) * dawsn(mean / np.sqrt(2)), rel=1e-5)
    assert (np.diff(found) < 0).all()


def family(means: list[float], sd: float = 0.1) -> VariationalDropout:
    tensors = {"weight": torch.tensor([means], dtype=torch.float64)}
    return VariationalDropout().bind(tensors, sd)


def test_the_kl_has_no_scale_and_stands_a_weight_of_zero() -> None:
    net = nn.Linear(3, 1, bias=False).double()
    prior = BoundPrior(Normal(), net, dict(net.named_parameters()))
    draw = torch.zeros(3, dtype=torch.float64)
    one, other = family([0.3, -1.0, 2.0], 0.1), family([30.0, -100.0, 200.0], 10.0)
    torch.testing.assert_close(one.kl(draw, prior), other.kl(draw, prior))
    zero = family([0.0, 1e-9, 1.0])
    kl = zero.kl(draw, prior)
    kl.backward()
    assert zero.mean.grad.isfinite().all()
    assert zero.rho.grad.isfinite().all()
    assert float(zero.log_alpha().detach()[0]) == pytest.approx(20.0)


def test_a_prior_without_scale_has_no_power() -> None:
    bnn = VariationalBNN(
        nn.Linear(2, 1), Gaussian(), family=VariationalDropout(), num_data=10, temperature=0.1,
        tempers="posterior",
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="Pass tempers='likelihood'"):
        bnn.loss((torch.zeros(2, 2), torch.zeros(2, 1)))


def test_alpha_is_the_inverse_square_of_the_signal_to_noise_ratio() -> None:
    made = family([0.5, 0.02, -0.01])
    posterior = made.posterior(nn.Linear(3, 1, bias=False).double(), Gaussian(), {})
    ratios = signal_to_noise(posterior)["weight"].flatten()
    torch.testing.assert_close(ratios, torch.exp(-made.log_alpha().detach() / 2))
    kept = made.kept_weights()
    assert torch.equal(kept["weight"], (ratios >= np.exp(-1.5))[None])
    assert torch.equal(masked(posterior, kept).mean["weight"] != 0, kept["weight"])


def test_a_fit_finds_what_quadrature_finds_and_prunes_the_rest() -> None:
    """Orthogonal inputs, so that each weight is by itself: σ to 5 % and μ to 3 %.

    Weights of the data are 1 and 0; the bound is minimised over α by SciPy, with the exact E.
    """
    examples, noise = 64, 1.0
    inputs = torch.linalg.qr(torch.randn(64, 2, generator=torch.Generator().manual_seed(1)))[0] * 8
    targets = inputs @ torch.tensor([[1.0], [0.0]])
    torch.manual_seed(0)
    net = nn.Linear(2, 1, bias=False)
    net.weight.data.copy_(torch.tensor([[0.8, 0.05]]))
    bnn = VariationalBNN(
        net, Gaussian(noise), family=VariationalDropout(), estimator="local",
        initial_scale=0.1, seed=2, optimizer=partial(Adam, lr=0.04), scheduler="cosine",
    )  # fmt: skip
    quiet_trainer(max_epochs=1).fit(bnn, full_batches(inputs, targets, epoch=200))

    def bound(log_sd: float, mean: float = 1.0) -> float:
        sd, log_alpha = np.exp(log_sd), 2 * log_sd - np.log(mean**2)
        energy = examples * ((1 - mean) ** 2 + sd**2) / (2 * noise**2)
        return float(energy + dropout_kl(torch.tensor(log_alpha)))

    best = minimize_scalar(bound, bounds=(-5, 1), method="bounded").x
    posterior = bnn.posterior()
    assert posterior.sd["weight"][0, 0].item() == pytest.approx(np.exp(best), rel=0.05)
    assert posterior.mean["weight"][0, 0].item() == pytest.approx(1.0, rel=0.03)
    assert bnn.family.kept_weights()["weight"].tolist() == [[True, False]]
    bnn.prune(bnn.family.kept_weights())
    assert bnn.posterior().sample(3)["weight"][..., 1].count_nonzero() == 0


def test_the_callback_prunes_it_while_it_trains() -> None:
    data = make_data("mlp", "regression")
    bnn = VariationalBNN(
        mlp(2), Gaussian(0.5), bayesian="*.weight", family=VariationalDropout(),
        estimator="local", seed=0,
    )  # fmt: skip
    pruning = SNRPruning(fraction=0.5, start=0.25, end=0.75)
    quiet_trainer(max_epochs=4, callbacks=[pruning]).fit(bnn, loader(data))
    assert pruning.sparsity == pytest.approx(0.5, abs=0.02)
    assert bnn.posterior().predict(data.tensors[0]).mean.isfinite().all()
