"""Exchanging a network's tensors: as functional_call does it, with nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations

from lightning_bnn.exchange import call_with
from tests.nets import NETS


class Tied(nn.Module):
    """One matrix that embeds tokens and gives the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, scale: float = 1.0) -> Tensor:
        return scale * self.head(self.embed(tokens))


def others(net: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn_like(tensor) for name, tensor in net.named_parameters()}


def snapshot(net: nn.Module) -> dict[str, int]:
    return {name: id(tensor) for name, tensor in (*net.named_parameters(), *net.named_buffers())}


@pytest.mark.parametrize("name", NETS)
def test_equals_functional_call(name: str) -> None:
    make, make_inputs = NETS[name]
    torch.manual_seed(0)
    net = make(3).eval()
    inputs, tensors = make_inputs(torch.Generator().manual_seed(0)), others(net)
    before = snapshot(net)
    expected = functional_call(net, tensors, (inputs,))
    for _ in range(2):  # found, and then known
        assert torch.equal(call_with(net, tensors, (inputs,)), expected)
    assert snapshot(net) == before
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_tied_weights_are_exchanged_together(name: str) -> None:
    net, tokens = Tied(), torch.tensor([[1, 2]])
    tensors = {name: torch.randn(5, 3)}
    expected = functional_call(net, tensors, (tokens,), {"scale": 2.0})
    assert torch.equal(call_with(net, tensors, (tokens,), {"scale": 2.0}), expected)
    assert net.head.weight is net.embed.weight


def test_gradients_go_to_the_given_tensors() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    tensors = {name: tensor.requires_grad_() for name, tensor in others(net).items()}
    call_with(net, tensors, (torch.randn(4, 2),)).sum().backward()
    assert all(tensor.grad is not None for tensor in tensors.values())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_buffers_are_updated_in_the_given_tensors() -> None:
    net = nn.BatchNorm1d(2)
    given = {"running_mean": torch.zeros(2), "num_batches_tracked": torch.tensor(4)}
    call_with(net, given, (torch.randn(8, 2) + 3,))
    assert given["running_mean"].min() > 0.1
    assert given["num_batches_tracked"] == 5
    assert net.running_mean.abs().max() == 0
    assert net.num_batches_tracked == 0


def test_an_error_leaves_the_network_whole() -> None:
    net = nn.Linear(2, 1)
    before = snapshot(net)
    with pytest.raises(RuntimeError):
        call_with(net, others(net), (torch.randn(4, 3),))
    assert snapshot(net) == before


def replace(net: nn.Sequential) -> None:
    net[0][0] = nn.Linear(2, 2)


def append(net: nn.Sequential) -> None:
    net[0].append(nn.Linear(2, 2))


def parametrise(net: nn.Sequential) -> None:
    parametrizations.weight_norm(net[0][0])


def untie(net: nn.Sequential) -> None:
    net[0][0].weight = nn.Parameter(torch.randn(2, 2))


@pytest.mark.parametrize("change", [replace, append, parametrise, untie])
def test_a_changed_network_is_looked_at_again(change: Callable[[Any], None]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    inputs = torch.randn(3, 2)
    call_with(net, others(net), (inputs,))
    change(net)
    tensors = others(net)
    assert torch.equal(call_with(net, tensors, (inputs,)), functional_call(net, tensors, (inputs,)))


def test_copies_are_networks_of_their_own() -> None:
    net = nn.Linear(2, 1)
    inputs = torch.randn(3, 2)
    call_with(net, others(net), (inputs,))
    copied = deepcopy(net).double()
    tensors = others(copied)
    assert torch.equal(
        call_with(copied, tensors, (inputs.double(),)),
        functional_call(copied, tensors, (inputs.double(),)),
    )


def test_runs_stacked() -> None:
    net = nn.Linear(2, 1)
    weights = {"weight": torch.randn(4, 1, 2), "bias": torch.randn(4, 1)}
    inputs = torch.randn(3, 2)
    found = vmap(lambda one: call_with(net, one, (inputs,)))(weights)
    expected = torch.einsum("moi,bi->mbo", weights["weight"], inputs) + weights["bias"][:, None]
    torch.testing.assert_close(found, expected)
