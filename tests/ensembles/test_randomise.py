"""Anchors and noisy targets: their distribution, whose they are, and what cannot be randomised."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn

from lightning_bnn.ensembles.randomise import (
    AnchoredPrior,
    check_randomise,
    draw_offsets,
    noisy_targets,
)
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.flat import KeptMemory, split_weights
from lightning_bnn.likelihoods import Bernoulli, Gaussian, HeteroscedasticGaussian
from lightning_bnn.priors import BoundPrior, Laplace, Normal, Prior
from lightning_bnn.selection import FlatLayout

NET = nn.Linear(4, 2)
OWN = dict(NET.named_parameters())


def bound(prior: Prior | dict[str, Prior]) -> BoundPrior:
    return BoundPrior(prior, NET, OWN)


def test_offsets_have_the_scale_of_the_prior() -> None:
    """4.5 standard errors: 7 in a million by chance, with fixed seeds."""
    prior = bound({"weight": Normal(5.0, 0.3, fan_in=True), "bias": Normal(0.0, 2.0)})
    offsets = draw_offsets(prior, torch.arange(5000), torch.empty(5000, 10).double())
    for part, scale in ((offsets[:, :8], 0.3 / 2), (offsets[:, 8:], 2.0)):
        assert stats.kstest(part.flatten().numpy() / scale, "norm").pvalue > 7e-6
    off = torch.corrcoef(offsets.T)[~torch.eye(10, dtype=torch.bool)]
    assert off.abs().max() < 5 / math.sqrt(5000)


def test_offsets_belong_to_the_member() -> None:
    prior, seeds = bound(Normal()), torch.tensor([8, 9, 10])
    whole = draw_offsets(prior, seeds, torch.empty(3, 10))
    assert torch.equal(draw_offsets(prior, seeds[1:2], torch.empty(1, 10)), whole[1:2])


def test_anchored_energy_and_gradient() -> None:
    """The prior energy of each member is that of its weights moved by its offset."""
    prior = bound({"weight": Normal(0.5, 0.3), "bias": Normal(0.0, 2.0)})
    offsets = draw_offsets(prior, torch.arange(3), torch.empty(3, 10).double())
    flat = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    anchored = AnchoredPrior(prior, offsets)
    _, energy = split_weights(flat, FlatLayout(OWN), anchored, KeptMemory())
    assert torch.allclose(energy, prior.energy(flat.detach() - offsets))
    (energy * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    scale = torch.cat([torch.full((8,), 0.3), torch.full((2,), 2.0)]).double()
    loc = torch.cat([torch.full((8,), 0.5), torch.zeros(2)]).double()
    expected = (flat.detach() - loc - offsets) / scale**2 * torch.tensor([[1.0], [2.0], [3.0]])
    assert flat.grad is not None
    assert torch.allclose(flat.grad, expected)


@pytest.mark.parametrize("shape", [(2000,), (2000, 1), (2000, 2)])
def test_noise_of_targets_has_the_size_of_the_likelihood(shape: tuple[int, ...]) -> None:
    scale = [0.1, 3.0] if shape[1:] == (2,) else 0.1
    targets = torch.randn(shape).double()
    seeds, indices = torch.arange(5), torch.arange(2000)
    moved = noisy_targets(scale, targets, seeds, indices) - targets
    assert moved.shape == (5, *shape)
    sizes = torch.tensor(scale).double()
    assert stats.kstest((moved / sizes).flatten().numpy(), "norm").pvalue > 7e-6
    off = torch.corrcoef(moved.flatten(1))[~torch.eye(5, dtype=torch.bool)]
    assert off.abs().max() < 5 / math.sqrt(2000)


def test_noise_belongs_to_member_and_example() -> None:
    seeds, targets = torch.arange(3), torch.randn(10, 2)
    whole = noisy_targets(0.1, targets, seeds, torch.arange(10))
    order = torch.randperm(10)
    assert torch.equal(noisy_targets(0.1, targets[order], seeds, order), whole[:, order])
    alone = noisy_targets(0.1, targets, seeds[2:], torch.arange(10))
    assert torch.equal(alone, whole[2:])
    own = torch.stack([torch.randperm(10) for _ in range(3)])
    found = noisy_targets(0.1, targets[own], seeds, own)
    assert torch.equal(found, torch.stack([whole[m, own[m]] for m in range(3)]))


@pytest.mark.parametrize(
    ("kind", "likelihood", "prior", "message"),
    [
        ("targets", Gaussian(), Normal(), "'targets and anchors' or 'anchors'.*got 'targets'"),
        ("anchors", Gaussian(), Laplace(), "Normal prior.*Laplace"),
        ("anchors", Gaussian(), {"*.bias": Laplace(), "*": Normal()}, "No prior|Laplace"),
        ("targets and anchors", Bernoulli(), Normal(), "Gaussian.*got Bernoulli.*bootstrap"),
        ("targets and anchors", HeteroscedasticGaussian(), Normal(), "HeteroscedasticGaussian"),
    ],
)
def test_what_cannot_be_randomised(kind: str, likelihood: object, prior: object, message: str):
    if isinstance(prior, dict):
        net = nn.Sequential(NET)
        chosen = BoundPrior(prior, net, dict(net.named_parameters()))
    else:
        chosen = bound(prior)
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        check_randomise(kind, likelihood, chosen)  # type: ignore[arg-type]


def test_what_can_be_randomised() -> None:
    for likelihood in (Gaussian(0.1), Gaussian(learn=True)):
        check_randomise("targets and anchors", likelihood, bound(Normal("pretrained", 0.1)))
    for likelihood in (Bernoulli(), Gaussian(learn=True)):
        check_randomise("anchors", likelihood, bound(Normal()))


def test_targets_that_are_whole_numbers() -> None:
    with pytest.raises(DataError, match=r"real numbers; got torch\.int64"):
        noisy_targets(1.0, torch.arange(3), torch.arange(2), torch.arange(3))
