"""Whose first axis a tensor has, as a graph tells it; and networks that read a size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.pruning.graph import check_same_graph, first_axes, is_leaf, trace


class Written(nn.Module):
    """A convolution, and a body of functions after it that also sees what came in."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body, self.conv = body, nn.Sequential(nn.Conv2d(3, 5, 1), nn.BatchNorm2d(5))
        self.offset = nn.Parameter(torch.zeros(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.conv(x), x, self.offset)


FIRST_AXES: list[tuple[bool, Callable[[Tensor, Tensor, Tensor], Tensor]]] = [
    # whether it is that of the input; what is done
    (True, lambda u, x, o: torch.max_pool2d(torch.sigmoid(u).clamp(0, 1), 1)),
    (True, lambda u, x, o: u.flatten(1)),
    (True, lambda u, x, o: u.view(x.size(0), 5, -1)),
    (True, lambda u, x, o: u + 2 * u.tanh() + o),
    (True, lambda u, x, o: torch.cat([u, x], 1)),
    (False, lambda u, x, o: u.flatten(0, 1)),
    (False, lambda u, x, o: u.view(-1, 5)),
    (False, lambda u, x, o: u.view(x.size(1), -1)),
    (False, lambda u, x, o: u.reshape(u.flatten(0, 1).size(0), -1)),
    (False, lambda u, x, o: u.transpose(0, 1)),
    (False, lambda u, x, o: u.mean(0)),
    (False, lambda u, x, o: torch.cat([u, u])),
    (False, lambda u, x, o: u.flatten(0, 1) + x),
    (False, lambda u, x, o: u[1:]),
    (False, lambda u, x, o: u.unfold(0, 2, 1)),
]


@pytest.mark.parametrize(("kept", "body"), FIRST_AXES)
def test_whose_first_axis_it_is(kept: bool, body: Callable[..., Tensor]) -> None:
    net = Written(body)
    graph = trace(net)
    start, *_, end = graph.nodes
    origin = first_axes(graph, dict(net.named_modules()))[end.all_input_nodes[0]]
    assert (origin is start) == kept
    rows = net(torch.randn(7, 3, 5, 5)).shape[0] if kept else 7
    assert rows == 7  # no promise that the numbers do not keep


def test_a_hook_may_do_anything() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_hook(lambda module, inputs, output: output.flatten())
    found = first_axes(trace(net), dict(net.named_modules()))
    assert [origin.name for origin in found.values()][:2] == ["input_1", "_0"]


# ----------------------------------------------------------------------------- the same graph


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
    "a tensor": (lambda net, x: run(net, x) * torch.full((1,), net.two.in_features), "another te"),
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


def test_layers_are_leaves() -> None:
    class Own(nn.Linear):
        pass

    assert [is_leaf(net) for net in (Own(1, 1), nn.LSTM(1, 1), Net(run, 2))] == [True, True, False]
    net = nn.Sequential(Own(1, 1))
    assert [node.op for node in trace(net).nodes] == ["placeholder", "call_module", "output"]
