"""What operations do to units, against the operations themselves.

Whatever is followed has to keep its promise on numbers: a unit of zeros stays one, and no unit is
felt in another. What test_chains follows through whole networks is not repeated here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lightning_bnn.pruning import operations
from lightning_bnn.pruning.operations import (
    Blocked,
    Layout,
    name_of,
    pass_function,
    pass_module,
    why_hooked,
)

SHAPES = {1: (2, 4, 6), 2: (2, 4, 6, 6), 3: (2, 4, 6, 6, 6)}


def keeps_its_promise(function: Callable[[Tensor], Tensor], inputs: Tensor) -> bool:
    """Whether units (axis 1) of zeros stay so, and the others do not feel that they are gone."""
    without = inputs.clone()
    without[:, 1] = 0
    torch.manual_seed(0)
    whole = function(inputs.clone())
    torch.manual_seed(0)  # the same noise for dropout
    rest = function(without)
    others = [0, *range(2, inputs.shape[1])]
    return bool((rest[:, 1] == 0).all()) and torch.equal(rest[:, others], whole[:, others])


def numbers(*shape: int) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(1))


# ----------------------------------------------------------------------------------- modules


@pytest.mark.parametrize("kind", operations.ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_activations_keep_zeros_and_their_place(kind: type[nn.Module]) -> None:
    layer = kind().eval()
    axes = int(kind.__name__[-2]) if kind.__name__[-1] == "d" else 2
    assert keeps_its_promise(layer, numbers(*SHAPES[axes]))
    for layout in (Layout(0), Layout(0, True), Layout(axes)):
        assert pass_module(layer, layout) == layout


@pytest.mark.parametrize("kind", operations.POOLS, ids=lambda kind: kind.__name__)
def test_pools_over_the_positions_of_a_unit(kind: type[nn.Module]) -> None:
    axes = int(kind.__name__[-2])
    layer = kind(2)
    assert keeps_its_promise(layer, numbers(*SHAPES[axes]))
    assert pass_module(layer, Layout(axes)) == Layout(axes)
    for other in {0, 1, 2, 3} - {axes}:
        with pytest.raises(Blocked, match="positions of a unit alone"):
            pass_module(layer, Layout(other))


def test_every_pool_of_these_sorts_is_known() -> None:
    assert len(operations.POOLS) == 12
    assert {kind.__name__ for kind in operations.POOLS} >= {"MaxPool1d", "AdaptiveAvgPool3d"}


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.MaxPool2d(2, return_indices=True), "returns indices"),
        (nn.AdaptiveMaxPool2d(2, return_indices=True), "returns indices"),
        (nn.Hardtanh(0.5, 1), "from 0.5 to 1 does not keep a zero at zero"),
        (nn.Hardtanh(-1, -0.5), "from -1 to -0.5 does not keep a zero at zero"),
        (nn.PReLU(4), "not known"),  # a slope for each unit would have to shrink too
        (nn.Flatten(2), "not known"),
        (nn.Flatten(1, 2), "not known"),
        (nn.Flatten(0), "not known"),
        (nn.Sigmoid(), "not zero at zero"),
        (nn.Softplus(), "not zero at zero"),
        (nn.LogSigmoid(), "not zero at zero"),
        (nn.Hardsigmoid(), "not zero at zero"),
        (nn.Softmax(1), "not known"),
        (nn.LocalResponseNorm(2), "not known"),
        (nn.LPPool2d(2, 2), "not known"),
        (nn.ChannelShuffle(2), "not known"),
        (nn.Threshold(0.1, 20), "not known"),
        (nn.Upsample(scale_factor=2), "not known"),
    ],
)
def test_layers_that_block(layer: nn.Module, text: str) -> None:
    with pytest.raises(Blocked, match=text):
        pass_module(layer, Layout(2))


@pytest.mark.parametrize("layer", [nn.Sigmoid(), nn.Softplus(), nn.LogSigmoid(), nn.Hardsigmoid()])
def test_what_is_said_not_to_be_zero_at_zero_is_not(layer: nn.Module) -> None:
    assert float(layer(torch.zeros(1))) != 0


@pytest.mark.parametrize("layer", [nn.Hardtanh(), nn.Hardtanh(0, 2), nn.Hardtanh(-2, 0)])
def test_ranges_around_zero_are_passed(layer: nn.Module) -> None:
    assert keeps_its_promise(layer, numbers(*SHAPES[2]))
    assert pass_module(layer, Layout(2)) == Layout(2)


def test_a_slope_for_all_units_is_passed() -> None:
    assert keeps_its_promise(nn.PReLU(), numbers(*SHAPES[1]))
    assert pass_module(nn.PReLU(), Layout(1)) == Layout(1)


# ----------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_flattened_unit_is_a_block_of_its_positions(axes: int) -> None:
    inputs = numbers(*SHAPES[axes])
    flat = nn.Flatten()(inputs)
    positions = inputs[0, 0].numel()
    for unit in range(inputs.shape[1]):
        block = flat[:, unit * positions : (unit + 1) * positions]
        assert torch.equal(block, inputs[:, unit].flatten(1))
    assert pass_module(nn.Flatten(), Layout(axes)) == Layout(0, blocks=True)


def test_features_are_no_blocks_and_blocks_stay_so() -> None:
    assert Layout(0).flattened() == Layout(0)
    assert Layout(0, True).flattened() == Layout(0, True)


# --------------------------------------------------------------------------------- functions


class Written(nn.Module):
    """A network that applies functions to what a layer gives."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.body = nn.Identity(), body

    def forward(self, x: Tensor) -> Any:
        return self.body(self.layer(x))


def after(body: Callable[[Any], Any], layout: Layout) -> Layout | None:
    """Where the units of a layer lie after the functions of a body; None: they end there."""
    graph = fx.Tracer().trace(Written(body))
    (node,) = (node for node in graph.nodes if node.op == "call_module")
    return _follow(node, layout)


def _follow(node: fx.Node, layout: Layout) -> Layout | None:
    ends: list[Layout | None] = []
    for user in node.users:
        if user.op == "output":
            return layout
        passed = pass_function(user, node, layout, {})
        if passed is not None:
            ends.append(_follow(user, passed))
    return next((end for end in ends if end is not None), None)


def callers(name: str) -> Iterator[Callable[[Any], Any]]:
    """Everything of torch with a name that can be called with a tensor."""
    if hasattr(F, name):
        yield lambda x: getattr(F, name)(x)
    if hasattr(torch, name):  # torch.dropout has no defaults
        more = (0.5, True) if name == "dropout" else ()
        yield lambda x: getattr(torch, name)(x, *more)
    if hasattr(Tensor, name):
        yield lambda x: getattr(x, name)()


@pytest.mark.parametrize("name", sorted(operations.ELEMENTWISE_NAMES))
def test_functions_keep_zeros_and_their_place(name: str) -> None:
    axes = int(name[-2]) if name[-2:] in ("1d", "2d", "3d") else 2
    found = list(callers(name))
    assert found
    for function in found:
        assert keeps_its_promise(function, numbers(*SHAPES[axes]))
        assert after(function, Layout(axes)) == Layout(axes)


@pytest.mark.parametrize("name", operations.POOL_NAMES)
def test_pools_as_functions(name: str) -> None:
    axes = int(name[-2])
    function: Callable[[Any], Any] = lambda x: getattr(F, name)(x, 2)  # noqa: E731
    assert keeps_its_promise(function, numbers(*SHAPES[axes]))
    assert after(function, Layout(axes)) == Layout(axes)
    with pytest.raises(Blocked, match="positions of a unit alone"):
        after(function, Layout(axes % 3 + 1))


@pytest.mark.parametrize(
    ("body", "before", "expected"),
    [
        (lambda x: F.relu(input=x), Layout(2), Layout(2)),
        (lambda x: x.tanh().relu_().clone().contiguous(), Layout(1), Layout(1)),
        (lambda x: x.mean(2), Layout(1), Layout(0)),
        (lambda x: x.mean(-1), Layout(1), Layout(0)),
        (lambda x: x.mean(dim=(3, 2)), Layout(2), Layout(0)),
        (lambda x: torch.mean(x, (2, 3, 4)), Layout(3), Layout(0)),
        (lambda x: x.mean((2, 3), True), Layout(2), Layout(2)),
        (lambda x: x.flatten(1, -1), Layout(2), Layout(0, True)),
        (lambda x: torch.flatten(x, start_dim=1, end_dim=-1), Layout(3), Layout(0, True)),
        (lambda x: torch.reshape(x, (x.shape[0], -1)), Layout(2), Layout(0, True)),
        (lambda x: x.view(x.size(0), -1), Layout(0), Layout(0)),
        (lambda x: x.reshape([x.size()[0], -1]), Layout(1), Layout(0, True)),
        (lambda x: F.hardtanh(x), Layout(2), Layout(2)),
        (lambda x: x.size(0), Layout(2), None),
        (lambda x: x.shape[0], Layout(2), None),
        (lambda x: x.size()[0], Layout(2), None),
    ],
)
def test_where_units_lie_after_a_function(
    body: Callable[[Any], Any], before: Layout, expected: Layout | None
) -> None:
    assert after(body, before) == expected


VIEW = "not of the form"
SIZE = "reads the number of units"
AXES = "other axes than the positions"


@pytest.mark.parametrize(
    ("body", "before", "text"),
    [
        (lambda x: x.mean(), Layout(2), AXES),
        (lambda x: x.mean(2), Layout(2), AXES),  # one of two
        (lambda x: x.mean((1, 2, 3)), Layout(2), AXES),
        (lambda x: x.mean(0), Layout(1), AXES),
        (lambda x: x.mean(1), Layout(0), "not known"),  # the units are the last axis
        (lambda x: x.flatten(), Layout(2), "not known"),
        (lambda x: torch.flatten(x, 2), Layout(2), "not known"),
        (lambda x: x.view(-1, 4), Layout(0), VIEW),
        (lambda x: x.view(x.size(0), 4, -1), Layout(2), VIEW),
        (lambda x: x.view(2, -1), Layout(2), VIEW),
        (lambda x: x.view(-1, x.size(0)), Layout(2), VIEW),
        (lambda x: x.view(x.size(1), -1), Layout(2), f"{VIEW}|{SIZE}"),
        (lambda x: x.size(1), Layout(2), SIZE),
        (lambda x: x.size(-1), Layout(0), SIZE),
        (lambda x: x.shape[1], Layout(2), SIZE),
        (lambda x: x.shape[1:], Layout(2), SIZE),
        (lambda x: x.size(), Layout(2), SIZE),
        (lambda x: x.T, Layout(0), r"reads \.T"),
        (lambda x: F.hardtanh(x, 0.1, 1.0), Layout(2), "from 0.1 to 1.0"),
        (lambda x: F.max_pool2d(x, 2, return_indices=True), Layout(2), "not known"),
        (lambda x: x - 1, Layout(2), "joins the units"),
        (lambda x: torch.stack([x, x]), Layout(2), "joins the units"),
        (lambda x: x @ x, Layout(0), "joins the units"),
        (lambda x: operator.iadd(x, 1), Layout(2), "joins the units"),
        (lambda x: torch.exp(x), Layout(2), "not zero at zero"),
        (lambda x: x.cos(), Layout(2), "not zero at zero"),
        (lambda x: x.softmax(-1), Layout(0), "not known"),
        (lambda x: x.transpose(1, 2), Layout(2), "not known"),
        (lambda x: x[:, 1:], Layout(2), "not known"),
        (lambda x: torch.relu(torch.zeros(3)) + x, Layout(2), "joins the units"),
    ],
)
def test_functions_that_block(body: Callable[[Any], Any], before: Layout, text: str) -> None:
    with pytest.raises(Blocked, match=text):
        after(body, before)


@pytest.mark.parametrize("name", ["exp", "cos", "sigmoid"])
def test_functions_said_not_to_be_zero_at_zero_are_not(name: str) -> None:
    assert float(getattr(torch, name)(torch.zeros(1))) != 0


def graph_of(body: Callable[[Any, Any, Any], Any]) -> tuple[fx.Node, dict[str, fx.Node]]:
    """The node of a layer, and all nodes by name, of a body that also sees the network."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Identity(), nn.Identity()

        def forward(self, x: Tensor) -> Any:
            return body(self.layer(x), self.other(x), x)

    nodes = {node.name: node for node in fx.Tracer().trace(Net()).nodes}
    return nodes["layer"], nodes


def test_the_size_of_a_batch_is_that_of_a_tensor_with_the_same_first_axis() -> None:
    for body in (
        lambda units, other, x: units.view(x.size(0), -1),
        lambda units, other, x: units.view(x.shape[0], -1),
        lambda units, other, x: units.view(other.size()[0], -1),
    ):
        layer, nodes = graph_of(body)
        origins = {layer: nodes["x"], nodes["other"]: nodes["x"]}
        assert pass_function(nodes["view"], layer, Layout(2), origins) == Layout(0, True)
        with pytest.raises(Blocked, match="need not be the number of examples here"):
            pass_function(nodes["view"], layer, Layout(2), {})
    for body in (
        lambda units, other, x: units.view(x.size(1), -1),
        lambda units, other, x: units.view(x.shape[1], -1),
        lambda units, other, x: units.view(x.dim(), -1),
        lambda units, other, x: units.view(x.stride()[0], -1),
    ):
        layer, nodes = graph_of(body)
        with pytest.raises(Blocked, match=VIEW):
            pass_function(nodes["view"], layer, Layout(2), {layer: nodes["x"]})


def test_units_that_are_not_what_a_function_acts_on() -> None:
    for body in (
        lambda units, other, x: F.dropout(other, units),
        lambda units, other, x: F.leaky_relu(x, negative_slope=units),
    ):
        layer, nodes = graph_of(body)
        (user,) = layer.users
        with pytest.raises(Blocked, match="not known"):
            pass_function(user, layer, Layout(2), {})
    layer, nodes = graph_of(lambda units, other, x: F.leaky_relu(units, other))
    with pytest.raises(Blocked, match="not known"):  # a slope that may be another for each
        pass_function(nodes["leaky_relu"], layer, Layout(2), {})


# ------------------------------------------------------------------------------ names and hooks


def relu(x: Tensor) -> Tensor:
    """Not what it is called."""
    return x + 1


fx.wrap("relu")


def test_functions_of_ones_own_are_told_from_those_of_torch() -> None:
    graph = fx.Tracer().trace(Written(lambda x: relu(F.relu(torch.tanh(x).relu()))))
    names = [name_of(node) for node in graph.nodes if node.op in ("call_function", "call_method")]
    assert names == ["tanh", "relu", "relu", f"{__name__}.relu"]
    with pytest.raises(Blocked, match="not known"):
        after(lambda x: relu(x), Layout(2))


def test_layers_with_hooks() -> None:
    assert why_hooked(nn.ReLU()) is None
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        layer = nn.ReLU()
        handle = getattr(layer, register)(lambda *arguments: None)
        assert "remove the hook" in str(why_hooked(layer))
        handle.remove()
        assert why_hooked(layer) is None
