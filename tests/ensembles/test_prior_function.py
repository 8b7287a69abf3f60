"""A network with a random prior function: what it computes, what trains, what is saved."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_bnn.ensembles import RandomPriorFunction
from lightning_bnn.errors import ConfigurationError


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
