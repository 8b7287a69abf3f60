"""Graphs that are the same, and networks whose code reads the size of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.pruning.tracing import check_same_graph, is_leaf, trace


class Net(nn.Module):
    """Two layers, and a body that is written with them."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.body, self.scale = body, 8**0.5
        self.one, self.two = nn.Linear(2, width), nn.Linear(width, 1)
        self.register_buffer("shift", torch.tensor([float("nan"), float("-inf")]))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def run(net: Any, x: Tensor) -> Tensor:
    return net.two(net.one(x).relu())


def branch(net: Any, x: Tensor) -> Tensor:
    return run(net, x).tanh() if net.one.out_features > 5 else run(net, x).relu()


def broken(net: Any, x: Tensor) -> Tensor:
    if net.two.in_features != 8:
        raise ValueError("expected eight")
    return run(net, x)


READS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a number": (lambda net, x: run(net, x) / net.two.in_features**0.5, "truediv(two, 2.82"),
    "by name": (lambda net, x: torch.sum(run(net, x), dim=net.one.out_features - 8), "dim=0"),
    "in a list": (lambda net, x: run(net, x).expand([net.two.in_features, 1]), "expand(two, [8, 1"),
    "in a slice": (lambda net, x: run(net, x)[: net.one.out_features], "getitem"),
    "a tensor": (lambda net, x: run(net, x) * torch.full((1,), net.two.in_features), "its code"),
    "a shape": (lambda net, x: run(net, x) + torch.ones(net.two.in_features).sum(0, True), "code"),
    "more operations": (
        lambda net, x: sum((run(net, x) for _ in range(net.one.out_features // 4)), x),
        "becomes 'output'",
    ),
    "another operation": (branch, "tanh(two) becomes 'relu_1', relu(two)"),
    "an error": (broken, "fails with ValueError: expected eight"),
}


@pytest.mark.parametrize("name", READS)
def test_a_size_that_is_read_is_found(name: str) -> None:
    body, words = READS[name]
    with pytest.raises(ConfigurationError) as caught:
        check_same_graph(Net(body, 8), Net(body, 3), ["one", "two"])
    for expected in (words, "compact() would change", "('one', 'two')", "protect the layer"):
        assert expected in str(caught.value)
    check_same_graph(Net(body, 8), Net(body, 8), [])


SAME: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layers": run,
    "a number of its own": lambda net, x: run(net, x) / net.scale,
    "a size that stays": lambda net, x: run(net, x) / net.one.in_features,
    "not a number": lambda net, x: run(net, x).nan_to_num(float("nan"))[..., :1] + net.shift,
    "noise": lambda net, x: run(net, x) + torch.randn(3, 1),
    "local function": lambda net, x: (lambda y: y.relu())(run(net, x)),
}


@pytest.mark.parametrize("name", SAME)
def test_other_sizes_alone_are_no_difference(name: str) -> None:
    before = torch.get_rng_state()
    wide, narrow = Net(SAME[name], 8), Net(SAME[name], 3)
    torch.set_rng_state(before)
    check_same_graph(wide, narrow, ["one", "two"])
    assert torch.equal(torch.get_rng_state(), before)
    assert not any("constant" in key for key in (*vars(wide), *wide._buffers))  # nothing is left


def test_a_large_network_is_the_same_as_itself() -> None:
    check_same_graph(torchvision.models.resnet18(), torchvision.models.resnet18(), [])


def test_layers_are_leaves() -> None:
    class Own(nn.Linear):
        pass

    assert [is_leaf(net) for net in (Own(1, 1), nn.LSTM(1, 1), Net(run, 2))] == [True, True, False]
    net = nn.Sequential(Own(1, 1))
    assert [node.op for node in trace(net).nodes] == ["placeholder", "call_module", "output"]
