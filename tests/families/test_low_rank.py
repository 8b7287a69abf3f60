"""The low-rank family: its determinant, its limits, what is left after pruning."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from lightning_bnn import VariationalBNN
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import LowRank
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import BoundPrior, Normal
from tests.families.exact import best_elbo, covariance, exact
from tests.truth.linear_regression import LinearRegression


@pytest.mark.parametrize("rank", [3, 9])
def test_with_all_ranks_it_is_the_full_rank_family(rank):
    """A rank of P − 1 is enough for any covariance; of more than P no more than P are made.

    No noise is left in the bound: tolerances are those of L-BFGS.
    """
    problem = LinearRegression.make(features=4)
    bnn = exact(problem, LowRank(rank))
    assert bnn.family.rank == min(rank, 4)
    elbo = best_elbo(bnn, (problem.inputs, problem.targets))
    assert elbo == pytest.approx(problem.log_evidence, abs=1e-6)
    posterior = bnn.posterior()
    torch.testing.assert_close(
        posterior.mean["weight"][0], torch.tensor(problem.mean), atol=1e-5, rtol=0
    )
    truth = torch.linalg.inv(torch.tensor(problem.precision))
    torch.testing.assert_close(covariance(posterior), truth, atol=1e-5, rtol=0)


def test_a_lower_rank_lies_between_mean_field_and_full_rank():
    """Optimal mean field falls short by ½(Σ log A_ii − log det A)."""
    problem = LinearRegression.make(features=3)
    bound = best_elbo(exact(problem, LowRank(1)), (problem.inputs, problem.targets), steps=50)
    precision = problem.precision
    gap = 0.5 * (np.log(np.diag(precision)).sum() - np.linalg.slogdet(precision)[1])
    assert 0.01 * gap < problem.log_evidence - bound < 0.9 * gap


def any_family(rank: int = 3, size: int = 6) -> tuple[LowRank, nn.Module, BoundPrior]:
    torch.manual_seed(1)
    net = nn.Linear(size, 1, bias=False).double()
    tensors = dict(net.named_parameters())
    family = LowRank(rank).bind(tensors, 0.3)
    with torch.no_grad():
        for parameter in (family.rho, family.columns):
            parameter.add_(0.7 * torch.randn_like(parameter))
    return family, net, BoundPrior(Normal(0.2, 0.7), net, tensors)


def dense(family: LowRank) -> torch.Tensor:
    scales = family.rho.exp()
    columns = scales * family.columns / math.sqrt(family.rank)
    return torch.diag(scales**2) + columns.T @ columns


@pytest.mark.parametrize("pruned", [(), (1, 4)], ids=["whole", "pruned"])
def test_the_kl_is_that_of_torch_distributions(pruned):
    family, _, bound = any_family()
    keep = torch.ones(6, dtype=torch.bool)
    keep[list(pruned)] = False
    expected_of = dense(family)[keep][:, keep]
    if pruned:
        family.prune(keep, bound)
        expected_of = dense(family)[keep][:, keep]
    q = MultivariateNormal(family.mean[keep], expected_of)
    size = int(keep.sum())
    p = MultivariateNormal(torch.full((size,), 0.2).double(), 0.49 * torch.eye(size).double())
    found, expected = family.kl(torch.zeros(6).double(), bound), kl_divergence(q, p)
    torch.testing.assert_close(found, expected)
    parameters = [family.mean, family.rho, family.columns]
    for one, other in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other)


def test_pruning_leaves_the_covariance_of_the_others_and_nothing_moves_the_pruned():
    torch.manual_seed(0)
    net = nn.Linear(6, 1)
    bnn = VariationalBNN(net, Gaussian(), Normal(0.0, 0.5), num_data=20, family=LowRank(2), seed=0)
    before = covariance(bnn.posterior())
    mask = torch.tensor([[True, False, True, True, False, True]])
    bnn.prune({"weight": mask})
    keep = torch.cat([mask[0], torch.tensor([True])])
    after = covariance(bnn.posterior())
    torch.testing.assert_close(after, before * keep * keep[:, None])
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.1)
    parked = [parameter.detach().clone() for parameter in bnn.family.parameters()]
    for _ in range(3):
        optimizer.zero_grad()
        bnn.loss((torch.randn(20, 6), torch.randn(20, 1))).backward()
        optimizer.step()
    for now, then in zip(bnn.family.parameters(), parked, strict=True):
        assert torch.equal(now[..., ~keep], then[..., ~keep])
        assert not torch.equal(now[..., keep], then[..., keep])
    drawn = bnn.posterior().sample(5)["weight"]
    assert torch.equal(drawn != 0, mask.expand(5, 1, 6))
    bnn._set_temperature(0.5)  # parks them again, at the prior of that temperature
    bnn.family.sharpen(2.0, bnn.prior)
    assert torch.equal(bnn.family.rho[~keep], parked[1][~keep])


def test_sharpening_moves_the_spread_of_each_and_keeps_the_correlations():
    family, _, bound = any_family()
    before = dense(family).detach()
    family.sharpen(4.0, None)
    torch.testing.assert_close(dense(family), before / 4)
    family.sharpen(3.0, bound)
    own = 0.7**-2
    precision = 3 * (4 / before.diagonal() - own).clamp(min=0) + own
    torch.testing.assert_close(dense(family).diagonal(), 1 / precision)


def test_scales_begin_anew_only_if_nothing_was_learned():
    family, _, _ = any_family()
    before = family.sd().detach().clone()
    family.begin(0.01)
    assert torch.equal(family.sd(), before)
    fresh = LowRank(2).bind({"w": torch.zeros(3)}, 0.3)
    fresh.begin(0.01)
    torch.testing.assert_close(fresh.sd(), torch.full((3,), 0.01))


def test_weights_at_their_prior_are_known():
    net = nn.Linear(4, 1, bias=False)
    tensors = dict(net.named_parameters())
    family = LowRank(1).bind(tensors, 0.5)
    nn.init.zeros_(family.mean)
    assert family.at_prior(BoundPrior(Normal(0.0, 0.5), net, tensors)).all()
    assert not family.at_prior(BoundPrior(Normal(0.0, 5.0), net, tensors)).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes(dtype):
    net = nn.Linear(3, 2).to(dtype)
    tensors = dict(net.named_parameters())
    family, bound = LowRank(2).bind(tensors), BoundPrior(Normal(), net, tensors)
    draw = family.rsample(torch.randn(family.noise_size, dtype=dtype))
    kl = family.kl(draw, bound)
    (draw.sum() + kl).backward()
    assert {one.dtype for one in (draw, kl, family.rho.grad, family.columns.grad)} == {dtype}


@pytest.mark.parametrize("rank", [0, 2.5, "all"])
def test_what_cannot_be(rank):
    with pytest.raises(ConfigurationError, match="rank= is a whole number, at least 1"):
        LowRank(rank)
    with pytest.raises(ConfigurationError, match="independent weights; those of LowRank are not"):
        VariationalBNN(nn.Linear(2, 1), Gaussian(), family=LowRank(), estimator="local")
