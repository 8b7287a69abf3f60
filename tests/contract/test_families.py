"""What every variational family is: a distribution that can be drawn from, with its KL."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_bnn.families import Family
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import BoundPrior, Learned, Normal, StudentT
from lightning_bnn.random import NormalStream
from tests.contract.cases import FAMILIES

RELATIVE = ("RankOne",)  # its scale is that of factors
pytestmark = pytest.mark.parametrize("name", FAMILIES)


def make(name: str, prior: Any = None) -> tuple[Family, BoundPrior, nn.Module]:
    torch.manual_seed(2)
    net = nn.Linear(3, 2).double()
    tensors = dict(net.named_parameters())
    return FAMILIES[name]().bind(tensors, 0.3), BoundPrior(prior or Normal(), net, tensors), net


def test_it_starts_at_the_network_with_the_scale_that_was_asked_for(name: str) -> None:
    family, _, net = make(name)
    assert torch.equal(family.mean, family.layout.flatten(dict(net.named_parameters())))
    if name in RELATIVE:
        return
    moments = family.posterior(net, Gaussian(0.1), {}).moments()
    for key, value in moments.mean.items():
        torch.testing.assert_close(value, net.get_parameter(key).detach())
        torch.testing.assert_close(moments.variance[key], torch.full_like(value, 0.09))


def test_draws_have_the_moments_of_the_posterior(name: str) -> None:
    family, _, net = make(name)
    moments = family.posterior(net, Gaussian(0.1), {}).moments()
    noise = torch.randn(2000, family.noise_size, dtype=torch.float64)
    draws = torch.stack([family.rsample(row).detach() for row in noise])
    mean, sd = family.layout.flatten(moments.mean), family.layout.flatten(moments.variance).sqrt()
    # mean and sd within 5 standard errors of each of 8 weights: a false alarm in 10⁵
    assert ((draws.mean(0) - mean) / sd).abs().max() < 5 / 44
    torch.testing.assert_close(draws.std(0), sd, rtol=5 / 63, atol=0)


@pytest.mark.parametrize("prior", [Normal(0.1, 0.7), StudentT(), Normal(scale=Learned())], ids=str)
def test_the_gradients_of_draw_and_kl_are_right(name: str, prior: Any) -> None:
    family, bound, _ = make(name, prior)
    noise = torch.randn(family.noise_size, dtype=torch.float64)

    def objective(*parameters: torch.Tensor) -> torch.Tensor:
        draw = family.rsample(noise)
        return draw.sin().sum() + family.kl(draw, bound)

    assert torch.autograd.gradcheck(objective, tuple(family.parameters()))


def test_a_training_step_takes_the_same_draw_with_the_same_gradients(name: str) -> None:
    """However fast a family makes its step, it is ``rsample`` and ``kl`` at the stream's noise."""
    gradients = []
    for stepping in (True, False):
        family, bound, _ = make(name)
        if stepping:
            weights, kl = family.draw(0, NormalStream(5), bound)
            draw = torch.cat([weight.flatten() for weight in weights.values()])
        else:
            empty = torch.empty(family.noise_size, dtype=torch.float64)
            draw = family.rsample(NormalStream(5).fill_(empty))
            kl = family.kl(draw, bound)
        (draw.sin().sum() + kl).backward()
        gradients.append([draw.detach(), kl.detach(), *(p.grad for p in family.parameters())])
    for stepped, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(stepped, plain)


def test_the_same_noise_serves_again_where_it_is_asked_for(name: str) -> None:
    family, bound, _ = make(name)
    stream = NormalStream(1)
    first = family.draw(0, stream, bound)[0]["weight"].detach().clone()
    same = family.draw(0, stream, bound, fresh=False)[0]["weight"].detach().clone()
    other = family.draw(0, stream, bound)[0]["weight"].detach().clone()
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
