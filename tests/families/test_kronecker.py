"""The matrix normal family: exact where the posterior is a Kronecker product."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from lightning_bnn import VariationalBNN, compact, masked
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import Kronecker
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import MatrixNormalPosterior
from lightning_bnn.priors import BoundPrior, Normal
from tests.families.exact import best_elbo, exact
from tests.posteriors.common import generator
from tests.truth.linear_regression import LinearRegression


def covariance(posterior: MatrixNormalPosterior, name: str = "weight") -> torch.Tensor:
    """Of a matrix that is read row by row."""
    sd = posterior.sd[name]
    one, other = (
        posterior.factors.get(f"{name}.{side}", torch.eye(length).to(sd))
        for side, length in (("rows", len(sd)), ("columns", sd[0].numel()))
    )
    correlation = torch.kron(one @ one.T, other @ other.T)
    return sd.reshape(-1, 1) * correlation * sd.reshape(-1)


def of_several_outputs(mixing: torch.Tensor, prior_sd: float) -> tuple[LinearRegression, nn.Module]:
    """Targets T W x + noise on shared inputs, as one regression on the row by row vector of W."""
    base = LinearRegression.make(examples=40, features=3)
    base.prior_sd = prior_sd
    torch.manual_seed(4)
    targets = torch.cat([base.targets, base.targets.flip(0)], 1) @ mixing.T
    net = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)).double()
    net[1].weight.data.copy_(mixing)
    net[1].requires_grad_(False)
    base.targets = targets
    return base, net


@pytest.mark.parametrize(
    ("mixing", "prior_sd"),
    [([[1.0, 0.0], [0.0, 1.0]], 0.9), ([[1.0, 0.8], [-0.3, 1.0]], 100.0)],
    ids=["independent outputs", "mixed outputs, a wide prior"],
)
def test_it_is_the_posterior_of_several_outputs_on_shared_inputs(mixing, prior_sd):
    """Σ⁻¹ = TᵀT/σ² ⊗ XᵀX + I/s² is a product if T = I, or if 1/s² is nothing beside it.

    No noise is left in the bound: tolerances are those of L-BFGS, and of 1/s² = 1e-4 against
    precisions of some 20.
    """
    mix = torch.tensor(mixing).double()
    problem, net = of_several_outputs(mix, prior_sd)
    bnn = exact(problem, Kronecker(), net)
    elbo = best_elbo(bnn, (problem.inputs, problem.targets))
    whole = LinearRegression(
        torch.kron(problem.inputs, mix).reshape(-1, 3, 2).transpose(1, 2).reshape(-1, 6),
        problem.targets.reshape(-1, 1), problem.noise_sd, prior_sd,
    )  # fmt: skip
    assert elbo == pytest.approx(whole.log_evidence, abs=1e-6)
    posterior = bnn.posterior()
    mean = posterior.mean["0.weight"].flatten()
    torch.testing.assert_close(mean, torch.tensor(whole.mean), atol=1e-4, rtol=0)
    truth = torch.tensor(np.linalg.inv(whole.precision))
    torch.testing.assert_close(covariance(posterior, "0.weight"), truth, atol=1e-6, rtol=1e-4)


def any_family(longest: int = 1024) -> tuple[Kronecker, nn.Module, BoundPrior]:
    torch.manual_seed(1)
    net = nn.Conv2d(2, 3, (1, 2)).double()
    tensors = dict(net.named_parameters())
    family = Kronecker(longest).bind(tensors, 0.3)
    with torch.no_grad():
        for parameter in [*family.rows.parameters(), *family.columns.parameters()]:
            parameter.add_(0.7 * torch.randn_like(parameter))
    return family, net, BoundPrior(Normal(0.2, 0.7), net, tensors)


def dense(family: Kronecker) -> torch.Tensor:
    blocks = [
        torch.kron(a.root() @ a.root().T, b.root() @ b.root().T)
        for a, b in zip(family.rows, family.columns, strict=True)
    ]
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("longest", [1024, 3, 1])
def test_the_kl_is_that_of_torch_distributions(longest):
    family, _, bound = any_family(longest)
    correlated = [factor.lower is not None for factor in (family.rows[0], family.columns[0])]
    assert correlated == [longest >= 3, longest >= 4]
    assert family.rows[1].lower is family.columns[1].lower is None  # the bias
    q = MultivariateNormal(family.mean, dense(family))
    p = MultivariateNormal(torch.full((15,), 0.2).double(), 0.49 * torch.eye(15).double())
    found, expected = family.kl(torch.zeros(15).double(), bound), kl_divergence(q, p)
    torch.testing.assert_close(found, expected)
    parameters = list(family.parameters())
    for one, other in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("of", ["family", "posterior"])
def test_draws_have_the_covariance(of):
    """All 15 · 16 / 2 covariances and 15 means of 2,000 draws, within 5 standard errors.

    A false alarm is one in 10⁴ (135 numbers at 6e-7), and the seeds are fixed.
    """
    family, net, _ = any_family()
    count = 2000
    if of == "family":
        noise = torch.randn(count, 15, generator=generator(), dtype=torch.float64)
        draws = torch.stack([family.rsample(row).detach() for row in noise])
    else:
        sampled = family.posterior(net, Gaussian(), {}).sample(count, generator())
        draws = torch.cat([value.flatten(1) for value in sampled.values()], 1)
    truth = dense(family).detach()
    diagonal = truth.diagonal()
    spread = ((diagonal.outer(diagonal) + truth**2) / count).sqrt()
    assert ((torch.cov(draws.T) - truth) / spread).abs().max() < 5
    assert ((draws.mean(0) - family.mean.detach()) / (diagonal / count).sqrt()).abs().max() < 5


def test_masking_and_compacting_leave_the_covariance_of_the_rest():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    bnn = VariationalBNN(net, Gaussian(), num_data=10, family=Kronecker(), initial_scale=0.5)
    with torch.no_grad():
        for parameter in bnn.family.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    posterior = bnn.posterior()
    alive = torch.tensor([True, False, True, True])
    masks = {"0.weight": alive[:, None].expand(4, 3), "2.weight": alive.expand(2, 4)}
    kept = masked(posterior, {**masks, "0.bias": alive})
    smaller = compact(kept)
    assert smaller.net[0].out_features == 3
    for name, mask in masks.items():
        flat = mask.flatten()
        truth = covariance(posterior, name) * flat * flat[:, None]
        torch.testing.assert_close(covariance(kept, name), truth)
        torch.testing.assert_close(covariance(smaller, name), truth[flat][:, flat])
    inputs = torch.randn(5, 3).double()
    one, other = (each.predict(inputs, draws=4000) for each in (kept, smaller))
    torch.testing.assert_close(one.epistemic, other.epistemic, rtol=0.2, atol=0)


def test_scales_begin_anew_only_if_nothing_was_learned():
    family, _, _ = any_family()
    before = family.sd().detach().clone()
    family.begin(0.01)
    assert torch.equal(family.sd(), before)
    fresh = Kronecker().bind({"w": torch.zeros(3, 2), "b": torch.zeros(2)}, 0.3)
    fresh.begin(0.01)
    torch.testing.assert_close(fresh.sd(), torch.full((8,), 0.01))


def test_sharpening_keeps_the_correlations():
    family, _, bound = any_family()
    before = dense(family).detach()
    family.sharpen(4.0, None)
    torch.testing.assert_close(dense(family), before / 4)
    sd = family.sd().detach()
    family.sharpen(3.0, bound)
    # what the prior leaves of the factors is no product of rows and columns: the nearest one is
    own = 0.7**-2
    wanted = -0.5 * (3 * (sd**-2 - own).clamp(min=0) + own).log()
    moved = family.layout.views(family.sd().detach().log() - wanted)
    assert moved["weight"].mean().abs() < 1e-12
    torch.testing.assert_close(moved["bias"], torch.zeros(3).double())


def test_factors_that_do_not_fit_are_refused():
    net = nn.Linear(2, 3, bias=False)
    one = {"weight": torch.ones(3, 2)}
    with pytest.raises(ConfigurationError, match=r"'weight.rows' in the shape \[2, 2\]; .*: 3, "):
        MatrixNormalPosterior(net, Gaussian(), one, one, {"weight.rows": torch.eye(2)})


def test_what_cannot_be():
    with pytest.raises(ConfigurationError, match="longest= is a whole number, at least 1"):
        Kronecker(0)
    with pytest.raises(ConfigurationError, match="independent weights; those of Kronecker are not"):
        VariationalBNN(nn.Linear(2, 1), Gaussian(), family=Kronecker(), estimator="flipout")
    bnn = VariationalBNN(nn.Linear(2, 1), Gaussian(), family=Kronecker(), num_data=10)
    with pytest.raises(ConfigurationError, match="Kronecker cannot be pruned while training"):
        bnn.prune({"bias": torch.tensor([False])})
    with pytest.raises(ConfigurationError, match=r"of up to 10,000,000 rows, needs .* longest="):
        Kronecker(10**8).bind({"weight": torch.zeros(10**7, 1)})
