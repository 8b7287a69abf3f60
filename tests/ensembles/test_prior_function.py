"""A network with a random prior function: what it computes, what trains, what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_bnn.ensembles import RandomPriorFunction
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.network import network_tensors
from lightning_bnn.posteriors import DrawsPosterior, Posterior


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def test_only_the_network_trains() -> None:
    wrapped = RandomPriorFunction(make_net(), make_net(), 2.0)
    before = {n: t.clone() for n, t in wrapped.prior_net.state_dict().items()}
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped.train()
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 2)).square().sum().backward()
        optimizer.step()
    assert all(p.grad is not None for p in wrapped.net.parameters())
    for name, tensor in wrapped.prior_net.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_prior_function_is_one_function_in_training_too() -> None:
    wrapped = RandomPriorFunction(nn.Linear(2, 1), make_net(), 2.0).train()
    x = torch.randn(8, 2)
    assert torch.equal(wrapped(x), wrapped(x))
    assert all(module.training for module in wrapped.modules())
    assert torch.allclose(wrapped(x), wrapped.net(x) + 2.0 * wrapped.prior_net.eval()(x))


def test_gradient_by_the_inputs_goes_through_both() -> None:
    wrapped = RandomPriorFunction(nn.Linear(2, 1), nn.Linear(2, 1), 3.0)
    x = torch.zeros(1, 2, requires_grad=True)
    wrapped(x).sum().backward()
    assert x.grad is not None
    expected = wrapped.net.weight + 3.0 * wrapped.prior_net.weight
    assert torch.allclose(x.grad, expected.detach())


def test_saved_posterior_brings_prior_functions_and_scale(tmp_path: Path) -> None:
    members = [RandomPriorFunction(make_net(), make_net(), 2.5) for _ in range(3)]
    draws = [{n: t.detach() for n, t in network_tensors(m).items()} for m in members]
    DrawsPosterior(members[0], Gaussian(0.1), draws).save(tmp_path / "posterior")
    loaded = Posterior.load(
        tmp_path / "posterior", RandomPriorFunction(make_net(), make_net(), scale=1.0)
    )
    x = torch.randn(6, 2)
    expected = torch.stack([member.eval()(x) for member in members])
    assert torch.allclose(loaded.predict(x, draws=3).outputs, expected, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), True])
def test_scale_is_positive(scale: float) -> None:
    with pytest.raises(ConfigurationError, match="positive number"):
        RandomPriorFunction(nn.Linear(2, 1), nn.Linear(2, 1), scale)


def test_prior_network_is_another_one() -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match="shares parameters"):
        RandomPriorFunction(net, net)


def test_outputs_agree() -> None:
    wrapped = RandomPriorFunction(nn.Linear(2, 1), nn.Linear(2, 3))
    with pytest.raises(ConfigurationError, match=r"\(5, 1\), the prior network \(5, 3\)"):
        wrapped(torch.zeros(5, 2))
