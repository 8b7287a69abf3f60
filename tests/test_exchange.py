"""Exchanging a network's tensors: as functional_call does it, with nothing left behind."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils import parametrizations

from lightning_bnn import DeepEnsemble
from lightning_bnn.exchange import call_with
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.network import copy_network
from lightning_bnn.priors import Normal
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


def test_an_error_leaves_the_network_whole() -> None:
    net = nn.Linear(2, 1)
    before = snapshot(net)
    with pytest.raises(RuntimeError):
        call_with(net, others(net), (torch.randn(4, 3),))
    assert snapshot(net) == before


def add_buffer(layer: nn.Module) -> None:
    layer.register_buffer("late", torch.ones(2))
    layer.register_forward_hook(lambda module, inputs, outputs: outputs * module.late)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a module replaced": lambda net: net.__setitem__(0, nn.Linear(2, 2)),
    "a module added": lambda net: net.append(nn.Linear(2, 2)),
    "a parametrisation": lambda net: parametrizations.weight_norm(net[0]),
    "a buffer": lambda net: add_buffer(net[0]),
    "weights tied": lambda net: setattr(net[1], "weight", net[0].weight),
    "a new weight": lambda net: setattr(net[0], "weight", nn.Parameter(torch.randn(2, 2))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_network_is_looked_at_again(change: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    inputs = torch.randn(3, 2)
    call_with(net, others(net), (inputs,))
    CHANGES[change](net[0])
    tensors = others(net) | {name: torch.full_like(b, 3.0) for name, b in net.named_buffers()}
    assert torch.equal(call_with(net, tensors, (inputs,)), functional_call(net, tensors, (inputs,)))


class Hooked(nn.Module):
    """A child that calls its parent back, so that each keeps the other."""

    def __init__(self, of_tensor: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        if of_tensor:
            self.layer.weight.register_hook(self.see)
        else:
            self.layer.register_forward_hook(self.see)

    def see(self, *seen: Any) -> None:
        return None

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)


def test_a_network_is_not_kept_alive() -> None:
    known = []
    for of_tensor in (False, True):
        net = Hooked(of_tensor)
        call_with(net, others(net), (torch.randn(2, 3),))
        known.append(weakref.ref(net))
    del net
    gc.collect()
    assert [net() for net in known] == [None, None]


def test_copies_and_pickles_are_of_the_network_alone() -> None:
    net, inputs = nn.Sequential(nn.Linear(3, 1)), torch.randn(2, 3)
    tensors = others(net)
    expected = call_with(net, tensors, (inputs,))
    replica = net._replicate_for_data_parallel()
    replica._modules["0"] = nn.Linear(3, 1)
    for other in (deepcopy(net), copy(net), pickle.loads(pickle.dumps(net)), replica):
        assert torch.equal(call_with(other, tensors, (inputs,)), expected)
    assert b"lightning_bnn.exchange" not in pickle.dumps(net)


class Inside(nn.Module):
    """Runs itself once more, with another first weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, inputs: Tensor, again: bool = True) -> Tensor:
        if again:
            inputs = call_with(self, {"first.weight": torch.eye(2)}, (inputs, False))
        return self.second(self.first(inputs))


def test_a_call_inside_a_call() -> None:
    net, inputs = Inside(), torch.randn(3, 2)
    weight = torch.randn(2, 2)  # one tensor for two weights does not make them one
    found = call_with(net, {"first.weight": weight, "second.weight": weight}, (inputs,))
    torch.testing.assert_close(found, inputs @ weight.T @ weight.T @ weight.T)
    torch.testing.assert_close(net(inputs, False), net.second(net.first(inputs)))


class Replaces(nn.Module):
    """Puts a new tensor in the place of its running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layer(inputs)
        self.mean = 0.5 * self.mean + 0.5 * hidden.mean(0)
        self.cache = torch.zeros(len(inputs))
        return hidden - self.mean


@pytest.mark.parametrize("stacked", [False, True])
def test_replaced_buffers_are_kept_in_the_given_tensors(stacked: bool) -> None:
    torch.manual_seed(0)
    net, inputs = Replaces(), torch.randn(4, 2)
    weight = torch.randn(3, 2, 2, requires_grad=True)
    given = {"mean": torch.ones(3, 2), "cache": torch.ones(3, 1), "layer.weight": weight}

    def run(tensors: dict[str, Tensor]) -> Tensor:
        return call_with(net, tensors, (inputs,))

    if stacked:
        outputs = vmap(run)(given)
    else:
        outputs = torch.stack([run({k: t[m] for k, t in given.items()}) for m in range(3)])
    outputs.sum().backward()
    hidden = torch.einsum("moi,bi->mbo", weight, inputs) + net.layer.bias
    torch.testing.assert_close(given["mean"], (0.5 + 0.5 * hidden.mean(1)).detach())
    assert not given["mean"].requires_grad
    assert torch.equal(given["cache"], torch.ones(3, 1))  # of another shape: left alone
    assert torch.equal(net.mean, torch.zeros(2))


class Keeps(nn.Module):
    """Keeps its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        self.plain = self.last.detach()
        return self.last


@pytest.mark.parametrize("mode", ["stacked", "loop"])
def test_activations_that_members_left_on_the_network(mode: str) -> None:
    ensemble = DeepEnsemble(Keeps, Gaussian(1.0), Normal(), members=3, mode=mode, num_data=4)
    ensemble.energies((torch.ones(4, 2), torch.ones(4, 1)))
    net = ensemble.posterior().net
    assert not net.last.requires_grad
    assert torch.equal(net.last, net.plain)
    with torch.no_grad():
        ensemble.energies((torch.ones(4, 2), torch.ones(4, 1)))
    assert len(ensemble.posterior()) == 3
    torch.func.grad(lambda x: ensemble.net(x).sum())(torch.ones(4, 2))
    assert torch.isfinite(copy_network(ensemble.net).last).all()
