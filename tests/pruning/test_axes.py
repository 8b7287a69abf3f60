"""What is told about axes, against the shapes of tensors that run through the same network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_bnn.pruning.axes import find_axes

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
    net, count = KEPT[name]
    net.eval()
    graph = fx.Tracer().trace(net)
    found = find_axes(graph, dict(net.named_modules()))
    Shapes(fx.GraphModule(net, graph)).run(torch.randn(EXAMPLES, 3, 5, 5))
    (start,) = (node for node in graph.nodes if node.op == "placeholder")
    (end,) = (node for node in graph.nodes if node.op == "output")
    last = end.all_input_nodes[0]
    assert (found[last].origin, found[last].count) == (start, count)
    for node, axes in found.items():  # no promise that the numbers do not keep
        if "shape" in node.meta and axes.origin is start:
            assert node.meta["shape"][0] == EXAMPLES
            assert axes.count in (None, len(node.meta["shape"]))


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
    graph = fx.Tracer().trace(net)
    (start,) = (node for node in graph.nodes if node.op == "placeholder")
    (end,) = (node for node in graph.nodes if node.op == "output")
    origin = find_axes(graph, dict(net.named_modules()))[end.all_input_nodes[0]].origin
    assert origin is not start


def test_a_hook_may_do_anything() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_hook(lambda module, inputs, output: output.flatten())
    found = find_axes(fx.Tracer().trace(net), dict(net.named_modules()))
    assert [axes.origin.name for axes in found.values()][:2] == ["input_1", "_0"]


def test_tokens_get_an_axis() -> None:
    net = nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Embedding(3, 4))
    found = find_axes(fx.Tracer().trace(net), dict(net.named_modules()))
    assert [axes.count for axes in found.values()][:4] == [None, None, 2, 3]
