"""Rank-1 factors: the bound in closed form, the components, what is left after pruning."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.distributions import Normal as TorchNormal

from lightning_bnn import VariationalBNN, compact, masked
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import RankOne
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import RankOnePosterior
from lightning_bnn.priors import BoundPrior, Laplace, Normal
from tests.families.exact import SigmaPoints, best_elbo
from tests.posteriors.common import generator


class Constant(nn.Module):
    """A network that says the same of every input."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor([1.5]).double())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.level.expand(len(inputs), 1)


def test_the_bound_is_the_joint_density_of_data_and_shared_weights():
    """y ~ N(w r, σ²) with r ~ N(1, τ²): given w all is Gaussian, and one component is exact.

    The energy is quadratic in r, so nothing is random: tolerances are those of L-BFGS.
    """
    noise_sd, prior_sd, factor_sd = 0.7, 0.9, 0.4
    targets = 1 + torch.randn(12, 1, generator=generator(), dtype=torch.float64)
    bnn = VariationalBNN(
        Constant(), Gaussian(noise_sd), Normal(0.0, prior_sd), num_data=12,
        family=RankOne(1, prior_scale=factor_sd), initial_scale=0.2,
    )  # fmt: skip
    bnn.train_draws = 2 * bnn.family.noise_size
    bnn.noise.stream = SigmaPoints()
    bound = best_elbo(bnn, (torch.zeros(12, 1).double(), targets))
    shared = bnn.family.mean.detach()
    covariance = noise_sd**2 * torch.eye(12).double() + (shared * factor_sd) ** 2
    exact = MultivariateNormal(shared.expand(12), covariance).log_prob(targets[:, 0])
    exact = exact + TorchNormal(0.0, prior_sd).log_prob(shared)[0]
    assert bound == pytest.approx(exact.item(), abs=1e-7)
    precision = 12 * shared**2 / noise_sd**2 + factor_sd**-2
    centre = (shared * targets.sum() / noise_sd**2 + factor_sd**-2) / precision
    torch.testing.assert_close(bnn.family.centre.detach()[0], centre, atol=1e-5, rtol=0)
    sd = bnn.family.rho.detach()[0].exp()
    torch.testing.assert_close(sd, precision.rsqrt(), atol=1e-5, rtol=0)


def any_family(components: int = 3, prior: object = None) -> tuple[RankOne, nn.Module, BoundPrior]:
    torch.manual_seed(1)
    net = nn.Conv2d(2, 3, (1, 2)).double()
    tensors = dict(net.named_parameters())
    family = RankOne(components).bind(tensors, 0.2)
    with torch.no_grad():
        for parameter in (family.centre, family.rho):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return family, net, BoundPrior(prior or Normal(0.2, 0.7), net, tensors)


@pytest.mark.parametrize("prior", [Normal(0.2, 0.7), Laplace(0.2, 0.7)])
@pytest.mark.parametrize("power", [1.0, 4.0])
def test_the_kl_is_that_of_torch_distributions_and_the_energy_of_the_shared_weights(prior, power):
    family, _, bound = any_family(prior=prior)
    bound.power = power
    q = TorchNormal(family.centre, family.rho.exp())
    p = TorchNormal(
        torch.ones_like(family.centre), torch.full_like(family.centre, 0.1 / power**0.5)
    )
    expected = bound.energy(family.mean) + kl_divergence(q, p).sum() / 3
    found = family.kl(family.rsample(torch.zeros(family.noise_size).double()), bound)
    torch.testing.assert_close(found, expected)
    parameters = list(family.parameters())
    for one, other in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(one, other)


def test_every_component_is_drawn_equally_often():
    """Of 3,000 draws a third, within 5 standard errors (26): a false alarm in 10⁶."""
    family, _, _ = any_family()
    family.requires_grad_(False).rho.fill_(-math.inf)
    still = torch.zeros(family.noise_size).double()
    seen: dict[float, int] = {}
    for first in torch.randn(3000, generator=generator(), dtype=torch.float64):
        still[0] = first
        value = round(float(family.rsample(still)[0]), 9)
        seen[value] = seen.get(value, 0) + 1
    assert len(seen) == 3
    assert all(abs(count - 1000) < 5 * 26 for count in seen.values())
    for extreme in (-40.0, 40.0):
        still[0] = extreme
        assert family.rsample(still).isfinite().all()


def test_draws_of_the_posterior_are_shared_out_and_of_rank_one():
    family, net, _ = any_family()
    family.requires_grad_(False).rho.fill_(-math.inf)
    posterior = family.posterior(net, Gaussian(), {})
    drawn = posterior.sample(6, generator())["weight"]
    assert len(drawn.unique(dim=0)) == 3
    assert "3 components" in repr(posterior)
    ratio = drawn.flatten(2) / net.weight.detach().flatten(1)
    values = torch.linalg.svdvals(ratio)
    assert (values[:, 1:] < 1e-12 * values[:, :1]).all()


def test_one_component_begins_at_the_network_and_several_apart():
    tensors = {"w": torch.randn(3, 2)}
    (one, several) = (RankOne(count).bind(tensors, 0.1) for count in (1, 40))
    assert torch.equal(one.rsample(torch.zeros(6)), one.mean)
    spread = several.centre.detach().std()
    # 200 draws of N(1, 0.1²): five standard errors of the sd are a quarter
    assert 0.075 < spread < 0.125
    before = several.rho.detach().clone()
    several.begin(0.02)
    torch.testing.assert_close(several.rho.exp(), torch.full_like(before, 0.02))
    with torch.no_grad():
        several.rho.add_(0.1)
    several.begin(0.5)
    assert float(several.rho.detach().exp().max()) < 0.03


@pytest.mark.parametrize("tempered", [True, False])
def test_sharpening_moves_the_factors(tempered):
    family, _, bound = any_family()
    before = family.rho.detach().exp()
    family.sharpen(4.0, None if tempered else bound)
    own = 0.0 if tempered else 100.0
    precision = 4 * (before**-2 - own).clamp(min=0) + own
    torch.testing.assert_close(family.rho.detach().exp(), precision.rsqrt())


def test_pruned_weights_are_gone_from_every_component_and_stay_so():
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    bnn = VariationalBNN(net, Gaussian(), num_data=20, family=RankOne(2), seed=0)
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.1)
    batch = torch.randn(20, 4), torch.randn(20, 2)

    def step() -> None:
        optimizer.zero_grad()
        bnn.loss(batch).backward()
        optimizer.step()

    step()
    mask = torch.rand(2, 4) > 0.5
    bnn._trainer = type("Trainer", (), {"optimizers": [optimizer], "state": None})()
    bnn._trainer.state = type("State", (), {"status": None})()
    bnn.prune({"weight": mask})
    bnn._trainer = None
    for _ in range(3):
        step()
    posterior = bnn.posterior()
    assert torch.equal(posterior.sample(4)["weight"] != 0, mask.expand(4, 2, 4))
    assert torch.equal(posterior.moments().variance["weight"] > 0, mask)
    flat = torch.cat([mask.flatten(), torch.ones(2, dtype=torch.bool)])
    assert torch.equal(bnn.family.mean != 0, flat)


def test_compacting_keeps_the_factors_of_what_is_left():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    bnn = VariationalBNN(net, Gaussian(), num_data=10, family=RankOne(2), initial_scale=0.3)
    alive = torch.tensor([True, False, True, True])
    kept = masked(bnn.posterior(), {"0.weight": alive[:, None].expand(4, 3), "0.bias": alive})
    smaller = compact(kept)
    assert smaller.net[0].out_features == 3
    one, other = kept.moments(), smaller.moments()
    for name, index in {
        "0.weight": (alive,),
        "0.bias": (alive,),
        "2.weight": (slice(None), alive),
    }.items():
        torch.testing.assert_close(other.mean[name], one.mean[name][index])
        torch.testing.assert_close(other.variance[name], one.variance[name][index])


def test_what_cannot_be():
    with pytest.raises(ConfigurationError, match="components= is a whole number, at least 1"):
        RankOne(0)
    with pytest.raises(ConfigurationError, match="prior_scale= is a number greater than 0"):
        RankOne(prior_scale=math.inf)
    with pytest.raises(ConfigurationError, match="independent weights; those of RankOne are not"):
        VariationalBNN(nn.Linear(2, 1), Gaussian(), family=RankOne(), estimator="local")
    net, one = nn.Linear(2, 1, bias=False), {"weight": torch.ones(1, 2)}
    factors = {"weight.rows": torch.ones(2, 1)}
    with pytest.raises(
        ConfigurationError, match=r"lengths {'weight.rows': 1, 'weight.columns': 2}"
    ):
        RankOnePosterior(net, Gaussian(), one, factors, factors)
