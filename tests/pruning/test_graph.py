"""What a graph tells about axes, against the shapes of tensors; and networks that read a size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, fx, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.pruning.graph import check_same_graph, find_axes, is_leaf, trace

EXAMPLES = 7  # no other axis has this size, before or after an operation


class Written(nn.Module):
    """Layers, and a body of functions after them that also sees what came in."""

    def __init__(self, body: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.body = nn.Sequential(*layers), body
        self.offset = nn.Parameter(torch.zeros(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.layers(x), x, self.offset)


def same(units: Tensor, x: Tensor, offset: Tensor) -> Tensor:
    return units


class Shapes(fx.Interpreter):
    """The shape of every tensor."""

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            n.meta["shape"] = tuple(result.shape)
        return result


CONV = nn.Conv2d(3, 5, 1)
KEPT: dict[str, tuple[nn.Module, int | None]] = {
    "convolution": (Written(same, CONV, nn.ReLU(), nn.MaxPool2d(1), nn.BatchNorm2d(5)), 4),
    "flatten layer": (Written(same, CONV, nn.Flatten(), nn.Linear(125, 4), nn.Dropout()), 2),
    "partly flattened": (Written(same, nn.Flatten(1, 2)), None),
    "functions": (Written(lambda u, x, o: F.max_pool2d(torch.sigmoid(u).clamp(0, 1), 1), CONV), 4),
    "flatten": (Written(lambda u, x, o: u.flatten(1), CONV), 2),
    "view by an input": (Written(lambda u, x, o: u.view(x.size(0), 5, -1), CONV), 3),
    "joined": (Written(lambda u, x, o: u + 2 * u.tanh(), CONV), 4),
    "own tensor": (Written(lambda u, x, o: u + o, CONV), None),
    "concatenated": (Written(lambda u, x, o: torch.cat([u, x], 1), CONV), None),
    "from the end": (Written(lambda u, x, o: torch.cat([u, u], -1), CONV), 4),
    "transposed": (Written(lambda u, x, o: u.transpose(1, 2), CONV), 4),
    "transposed from the end": (Written(lambda u, x, o: u.transpose(-1, -2), CONV), 4),
    "permuted": (Written(lambda u, x, o: x.permute(0, 2, 3, 1)), 4),
    "mean": (Written(lambda u, x, o: u.mean((2, 3)), CONV), 2),
    "mean from the end": (Written(lambda u, x, o: u.mean([-1], keepdim=True), CONV), 4),
    "sum of the unknown": (Written(lambda u, x, o: x.sum(1)), None),
    "chosen": (Written(lambda u, x, o: u[:, -1, 1:], CONV), 3),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_first_axis_of_an_input_is_kept(name: str) -> None:
    net, rank = KEPT[name]
    net.eval()
    graph = trace(net)
    found = find_axes(graph, dict(net.named_modules()))
    Shapes(fx.GraphModule(net, graph)).run(torch.randn(EXAMPLES, 3, 5, 5))
    (start,) = (node for node in graph.nodes if node.op == "placeholder")
    (end,) = (node for node in graph.nodes if node.op == "output")
    last = end.all_input_nodes[0]
    assert (found[last].origin, found[last].rank) == (start, rank)
    for node, axes in found.items():  # no promise that the numbers do not keep
        if "shape" in node.meta and axes.origin is start:
            assert node.meta["shape"][0] == EXAMPLES
            assert axes.rank in (None, len(node.meta["shape"]))


CHANGED: dict[str, nn.Module] = {
    "folded": Written(lambda u, x, o: u.flatten(0, 1), CONV),
    "folded layer": Written(same, nn.Flatten(0, 1)),
    "view": Written(lambda u, x, o: u.view(-1, 5), CONV),
    "view by another axis": Written(lambda u, x, o: u.view(x.size(1), -1), CONV),
    "view by a folded size": Written(lambda u, x, o: u.reshape(u.flatten(0, 1).size(0), -1), CONV),
    "transposed": Written(lambda u, x, o: u.transpose(0, 1), CONV),
    "transposed from the end": Written(lambda u, x, o: x.transpose(-1, -4)),
    "permuted": Written(lambda u, x, o: u.permute(1, 0, 2, 3), CONV),
    "mean": Written(lambda u, x, o: u.mean(0), CONV),
    "mean of all": Written(lambda u, x, o: u.mean(), CONV),
    "concatenated": Written(lambda u, x, o: torch.cat([u, u]), CONV),
    "concatenated from the end": Written(lambda u, x, o: torch.cat([u, u], -4), CONV),
    "joined with a folded one": Written(lambda u, x, o: u.flatten(0, 1) + x),
    "chosen": Written(lambda u, x, o: u[1:], CONV),
    "unknown function": Written(lambda u, x, o: u.unfold(0, 2, 1), CONV),
    "unknown layer": Written(same, nn.Unflatten(0, (7, 1))),
}


@pytest.mark.parametrize("name", CHANGED)
def test_another_first_axis_is_not_that_of_the_input(name: str) -> None:
    net = CHANGED[name]
    graph = trace(net)
    (start,) = (node for node in graph.nodes if node.op == "placeholder")
    (end,) = (node for node in graph.nodes if node.op == "output")
    origin = find_axes(graph, dict(net.named_modules()))[end.all_input_nodes[0]].origin
    assert origin is not start


def test_a_hook_may_do_anything() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_hook(lambda module, inputs, output: output.flatten())
    found = find_axes(trace(net), dict(net.named_modules()))
    assert [axes.origin.name for axes in found.values()][:2] == ["input_1", "_0"]


def test_tokens_get_an_axis() -> None:
    net = nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Embedding(3, 4))
    found = find_axes(trace(net), dict(net.named_modules()))
    assert [axes.rank for axes in found.values()][:4] == [None, None, 2, 3]


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
