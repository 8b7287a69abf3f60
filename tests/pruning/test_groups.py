"""Channel groups of networks written by hand, and why a layer cannot be followed.

Whatever is followed has to keep its promise on numbers: a unit of zeros stays one, and no unit is
felt in another.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, fx, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.pruning.groups import ELEMENTWISE, Group, Groups, check_same_graph, find_groups
from tests.nets import SequenceLSTM, SequenceTransformer, TokenEmbedding

SHAPES = {1: (2, 4, 6), 2: (2, 4, 6, 6), 3: (2, 4, 6, 6, 6)}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Between(nn.Module):
    """Two layers around a body that is given: of a convolution's four units if it has axes."""

    def __init__(self, body: Callable[[Any], Any], head: nn.Module, axes: int = 2) -> None:
        super().__init__()
        self.units = CONVOLUTIONS[axes](1, 4, 3) if axes else nn.Linear(3, 4)
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.units(x)))


def between(body: Callable[[Any], Any], positions: int = 9, axes: int = 2) -> Groups:
    return find_groups(Between(body, nn.Linear(4 * positions, 2), axes))


def read(group: Group) -> list[tuple[str, int]]:
    return [(reader.name, reader.per_unit) for reader in group.readers]


# --------------------------------------------------------------------------------- whole networks


def test_a_convolutional_network_with_a_depthwise_layer_and_two_heads() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(1, 6, 3)
            self.depth = nn.Conv2d(6, 6, 3, groups=6)
            self.norm = nn.BatchNorm2d(6)
            self.left, self.right = nn.Linear(6 * 4, 3), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = F.relu(self.one(x))
            left = self.left(torch.flatten(F.max_pool2d(self.norm(self.depth(x)), 2), 1))
            return left, self.right(F.adaptive_avg_pool2d(x, 1).flatten(1)).squeeze(-1)

    groups = find_groups(Net())
    [group] = groups.removable
    assert group.entries == {"one": 1, "depth": 1, "norm": 1}
    assert read(group) == [("left", 4), ("right", 1)]
    assert [reader.source.layer for reader in group.readers] == ["norm", "one"]
    assert (groups.outputs, groups.obstacles) == (["left", "right"], {})


def test_operations_on_outputs_are_no_obstacle() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mean, self.scale = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x).relu()
            return torch.cat([self.mean(x), F.softplus(self.scale(x))], -1).log_softmax(-1)

    groups = find_groups(Net())
    assert [group.producers for group in groups.removable] == [["body"]]
    assert read(groups.removable[0]) == [("mean", 1), ("scale", 1)]
    assert (groups.outputs, groups.obstacles) == (["mean", "scale"], {})


def test_channels_that_are_added_are_one_group() -> None:
    groups = find_groups(torchvision.models.resnet18(num_classes=3))
    producers = [group.producers for group in groups.removable]
    assert producers[0] == ["conv1", "layer1.0.conv2", "layer1.1.conv2"]
    assert producers[3] == ["layer2.0.conv1"]
    assert producers[4] == ["layer2.0.conv2", "layer2.0.downsample.0", "layer2.1.conv2"]
    assert groups.removable[0].companions == {"bn1": 1, "layer1.0.bn2": 1, "layer1.1.bn2": 1}
    assert ("layer2.0.downsample.0", 1) in read(groups.removable[0])
    assert (groups.outputs, groups.obstacles) == (["fc"], {})


def test_the_units_of_a_network_of_one_layer_are_its_outputs() -> None:
    assert find_groups(nn.Linear(2, 3)) == Groups(outputs=[""])


# ------------------------------------------------------------------------- operations, on numbers


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


def callers(name: str, *arguments: Any) -> Iterator[Callable[[Any], Any]]:
    """Everything of torch with a name: modules, functions and methods of tensors."""

    def spelled(place: Any) -> list[str]:
        names = [n for n in dir(place) if n.lower().replace("_", "") == name]
        return [n for n in names if not n.startswith("_")]

    for kind in spelled(nn):
        yield getattr(nn, kind)(*arguments).eval()
    for function in spelled(F):
        yield partial(_call, getattr(F, function), arguments)
    for method in spelled(Tensor):
        yield methodcaller(method, *arguments)
        if hasattr(torch, method):
            yield partial(_call, getattr(torch, method), arguments)
    if name == "dropout":
        yield partial(_call, torch.dropout, (0.5, True))  # it has no defaults


def _call(function: Callable[..., Tensor], arguments: tuple[Any, ...], x: Tensor) -> Tensor:
    return function(x, *arguments)


def flat(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if isinstance(function, nn.Module):
        return nn.Sequential(function, nn.Flatten())
    return lambda x: function(x).flatten(1)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_activations_keep_zeros_and_their_place(name: str) -> None:
    axes = int(name[-2]) if name[-2:] in ("1d", "2d", "3d") else 2
    found = list(callers(name))
    assert found
    for function in found:
        assert keeps_its_promise(function, numbers(*SHAPES[axes]))
        [group] = between(flat(function), axes=axes).removable
        assert read(group) == [("head", 9)]


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("kind", ["maxpool", "avgpool", "adaptivemaxpool", "adaptiveavgpool"])
def test_pools_over_the_positions_of_a_unit(kind: str, axes: int) -> None:
    found = list(callers(f"{kind}{axes}d", 2))
    assert len(found) >= 2  # the module and the function
    for function in found:
        assert keeps_its_promise(function, numbers(*SHAPES[axes]))
        assert read(between(flat(function), axes=axes).removable[0]) == [("head", 9)]
        for other in {0, 1, 2, 3} - {axes}:
            obstacle = between(flat(function), axes=other).obstacles["units"]
            assert "positions of a unit alone" in str(obstacle)


# ---------------------------------------------------------------- operations, between two layers

FOLLOWED: dict[str, tuple[Callable[[Any], Any], int, int]] = {
    # body, positions of a unit in the head, spatial axes
    "flatten": (lambda x: torch.flatten(x, 1), 9, 2),
    "method": (lambda x: x.tanh().relu_().clone().contiguous().flatten(1, -1), 9, 1),
    "by keyword": (lambda x: F.relu(input=x).flatten(1), 9, 2),
    "view": (lambda x: x.view(x.size(0), -1), 9, 2),
    "reshape": (lambda x: x.reshape(x.shape[0], -1), 9, 2),
    "view of a size": (lambda x: x.view((x.size()[0], -1)), 9, 2),
    "mean": (lambda x: x.mean((2, 3)), 1, 2),
    "mean of a sequence": (lambda x: x.mean(-1), 1, 1),
    "mean that keeps": (lambda x: F.silu(x).mean([-1, -2], keepdim=True).flatten(1), 1, 2),
    "pools": (lambda x: F.avg_pool2d(F.max_pool2d(F.gelu(x), 1), 1).flatten(1), 9, 2),
    "other sizes unused": (lambda x: (x.shape[1], x.view(x.shape[0], -1))[1], 9, 2),
    "prelu": (nn.Sequential(nn.PReLU(), nn.Flatten()), 9, 2),
    "flattened twice": (nn.Sequential(nn.Flatten(), nn.Flatten()), 9, 2),
    "residual": (lambda x: (x + x.relu() - x.tanh()).flatten(1), 9, 2),
    "in place": (lambda x: operator.iadd(x.relu(), x.tanh()).flatten(1), 9, 2),
    "residual after flattening": (lambda x: x.flatten(1) + x.relu().flatten(1), 9, 2),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_operations_that_are_followed(name: str) -> None:
    body, positions, axes = FOLLOWED[name]
    groups = between(body, positions, axes)
    [group] = groups.removable
    assert read(group) == [("head", positions)]
    assert group.producers == ["units"]


def relu(x: Tensor) -> Tensor:
    """Not what it is called."""
    return x + 1


fx.wrap("relu")


UNKNOWN = "not known to act on each unit by itself"
VIEW = "may fix the number of units"
SIZE = "it reads the number of units, a size beside it, or an attribute"
AXES = "other axes than the positions"
BLOCKED: dict[str, tuple[Callable[[Any], Any], int, str]] = {
    # body, spatial axes, why
    "sum with a number": (lambda x: (x + 1).flatten(1), 2, UNKNOWN),
    "sum of other places": (lambda x: x.flatten(1) + x.mean((2, 3)), 2, UNKNOWN),
    "sigmoid": (lambda x: x.sigmoid().flatten(1), 2, UNKNOWN),
    "scaled": (lambda x: (x * 2).flatten(1), 2, UNKNOWN),
    "concatenated": (lambda x: torch.cat([x, x], 1).flatten(1), 2, UNKNOWN),
    "product": (lambda x: x @ x, 0, UNKNOWN),
    "softmax": (lambda x: F.softmax(x, 1).flatten(1), 2, UNKNOWN),
    "layer norm": (nn.Sequential(nn.LayerNorm(3), nn.Flatten()), 2, UNKNOWN),
    "permuted": (lambda x: x.permute(0, 2, 3, 1).flatten(1), 2, UNKNOWN),
    "function of one's own": (lambda x: relu(x).flatten(1), 2, UNKNOWN),
    "flattened with examples": (lambda x: x.flatten(), 2, UNKNOWN),
    "fixed view": (lambda x: x.view(-1, 36), 2, VIEW),
    "view by stride": (lambda x: x.view(x.stride()[0], -1), 2, UNKNOWN),
    "channels read": (lambda x: x.view(x.shape[0], x.shape[1] * 9), 2, SIZE),
    "number of units": (lambda x: x.flatten(1) / x.size(1), 2, SIZE),
    "another attribute": (lambda x: x.mT.flatten(1), 2, SIZE),
    "whole shape": (lambda x: torch.zeros(x.shape).flatten(1), 2, SIZE),
    "mean over units": (lambda x: x.mean(1).flatten(1), 2, AXES),
    "mean over examples": (lambda x: x.mean(0), 1, AXES),
    "mean of features": (lambda x: x.mean(1), 0, UNKNOWN),
    "prelu of channels": (nn.Sequential(nn.PReLU(4), nn.Flatten()), 2, UNKNOWN),
    "indices of a function": (lambda x: F.max_pool2d(x, 1, return_indices=True)[0], 2, UNKNOWN),
    "wrong axis": (lambda x: x, 2, "axis of the units"),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_operations_that_are_not(name: str) -> None:
    body, axes, words = BLOCKED[name]
    groups = between(body, axes=axes)
    assert not groups.removable
    assert groups.outputs == ["head"]
    assert words in groups.obstacles["units"]


def test_a_tensor_that_becomes_a_sum_in_place_is_not_followed() -> None:
    """The graph shows no use of the sum, only of the tensor that has become it."""

    def alone(x: Any) -> Any:
        y = x.relu()
        y.add_(x.tanh())
        return y.flatten(1)

    def read_too(x: Any) -> Any:
        y = x.relu()
        z = y.add_(x.tanh())
        return (y + z).flatten(1)

    assert not between(alone).removable
    assert "in place to a tensor that is also used" in between(read_too).obstacles["units"]


class Sums(nn.Module):
    """The sum of a layer with one of another width or with the inputs; a layer as an option."""

    def __init__(self, add: str) -> None:
        super().__init__()
        self.add = add
        self.one, self.wide, self.head = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.add == "slope":
            return self.head(F.leaky_relu(x, negative_slope=self.one(x)))
        return self.head((x if self.add == "input" else self.wide(x)) + self.one(x))


@pytest.mark.parametrize(
    ("add", "words"),
    [
        ("input", {"one": UNKNOWN}),
        ("wide", {"one": UNKNOWN, "wide": UNKNOWN}),
        ("slope", {"one": UNKNOWN}),
    ],
)
def test_units_that_meet_something_else_are_not_followed(add: str, words: dict[str, str]) -> None:
    groups = find_groups(Sums(add))
    assert not groups.removable
    for layer, reason in words.items():
        assert reason in groups.obstacles[layer]


class Beside(nn.Module):
    """A sum, and what else happens to its second operand, before it or after it."""

    def __init__(self, then: Callable[[Any, Tensor], Any], first: bool) -> None:
        super().__init__()
        self.then, self.first = then, first
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head, self.side = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Any, Any]:
        one, two = self.one(x), self.two(x)
        beside = self.then(self, two) if self.first else None
        sum_ = self.head(one + two)
        return sum_, beside if self.first else self.then(self, two)


@pytest.mark.parametrize("first", [True, False])
def test_what_happens_to_one_operand_of_a_sum_holds_for_all(first: bool) -> None:
    [group] = find_groups(Beside(lambda net, two: net.side(two), first)).removable
    assert group.producers == ["one", "two"]
    assert {reader.name: reader.source.layer for reader in group.readers} == {
        "head": None, "side": "two"
    }  # fmt: skip
    for output in (lambda net, two: two, lambda net, two: two.softmax(-1)):
        shown = find_groups(Beside(output, first))
        assert (shown.removable, shown.outputs) == ([], ["one", "two", "head"])
    blocked = find_groups(Beside(lambda net, two: net.side(two.sigmoid()), first))
    assert not blocked.removable
    assert all("sigmoid" in blocked.obstacles[layer] for layer in ("one", "two"))


# --------------------------------------------------------------------------------------- obstacles


def shared() -> nn.Module:
    middle = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(4, 4), middle, nn.ReLU(), middle, nn.Linear(4, 1))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1))
    net[2].weight = net[0].weight
    return net


class UsedOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) @ self.one.weight


def hooked(register: str) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    getattr(net[1], register)(lambda *arguments: None)
    return net


class MyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Frames(nn.Module):
    """Takes (examples, frames, channels, height, width); its rows are examples or frames."""

    def __init__(self, rows: str) -> None:
        super().__init__()
        self.rows, self.conv = rows, nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(16 if rows == "frames" else 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.flatten(0, 1)
        units = torch.relu(self.conv(frames))
        return self.head(units.view((frames if self.rows == "frames" else x).size(0), -1))


TWICE = "it is called more than once, or its tensors are also used elsewhere"


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Frames("examples"), {"conv": "at view: the first size of 'x' need not be"}),
        (shared(), {"0": f"'1', Linear: {TWICE}", "1": TWICE}),
        (tied(), {"0": TWICE, "2": TWICE}),
        (UsedOutside(), {"one": TWICE}),
        (hooked("register_forward_hook"), {"0": "'1', ReLU: it has a forward hook"}),
        (hooked("register_forward_pre_hook"), {"0": "remove the hook"}),
        (nn.Sequential(nn.Linear(4, 4), MyLinear(4, 4), nn.Linear(4, 1)), {"0": "is a subclass"}),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 1, groups=2)), {"0": "2 groups"}),
        (nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.Conv2d(4, 1, 1)), {"0": "feeds it"}),
        (nn.Sequential(nn.Linear(4, 4), nn.MaxPool1d(2), nn.Linear(2, 1)), {"0": "alone"}),
        (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(5), nn.Linear(6, 1)),
         {"0": "reads 5 inputs, which are not those of 6 units"}),
        (nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(6, 1)), {"0": "reads 6 inputs"}),
        (nn.Sequential(nn.ConvTranspose2d(4, 3, 2), nn.Conv2d(3, 1, 1)), {"0": "not one of"}),
        (SequenceLSTM(2), {"lstm": "LSTM is not one of"}),
        (SequenceTransformer(2), {"encoder.layers.0.linear1": "it is not called by itself"}),
        (TokenEmbedding(2), {"embed": "Embedding is not one of"}),
    ],
)  # fmt: skip
def test_layers_that_are_not_followed(net: nn.Module, words: dict[str, str]) -> None:
    groups = find_groups(net)
    for layer, reason in words.items():
        assert reason in groups.obstacles[layer]
        assert not any(layer in group.producers for group in groups.removable)


def test_frames_in_the_batch_are_followed_where_rows_stay_rows() -> None:
    assert read(find_groups(Frames("frames")).removable[0]) == [("head", 4)]


def test_an_untraceable_network_is_quoted_and_left_as_it_was() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.one(x)
            return self.kept if x.sum() > 0 else x

    net = Net()
    with pytest.raises(
        ConfigurationError, match=r"cannot trace Net .*TraceError: .*unit=\"weight\""
    ):
        find_groups(net)
    assert not hasattr(net, "kept")
    assert net.training


# -------------------------------------------------------------------------------- the same graph


class Sized(nn.Module):
    """Two layers, and a body that is written with them."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.body = body
        self.one, self.two = nn.Linear(2, width), nn.Linear(width, 1)
        self.register_buffer("shift", torch.tensor([float("nan"), float("-inf")]))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.two(self.one(x).relu()))


def branch(net: Any, y: Tensor) -> Tensor:
    return y.tanh() if net.one.out_features > 5 else y.sigmoid()


def fails(net: Any, y: Tensor) -> Tensor:
    if net.two.in_features != 8:
        raise ValueError("expected eight")
    return y


READS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a number": (lambda net, y: y / net.two.in_features**0.5, "(%two, 2.82"),
    "by name": (lambda net, y: torch.sum(y, dim=net.one.out_features - 8), "{dim: 0}"),
    "a tensor": (lambda net, y: y * torch.full((1,), net.two.in_features), "tensor([8])"),
    "more operations": (lambda net, y: y.relu() if net.one.out_features == 8 else y, "return two"),
    "another operation": (branch, "target=tanh](args = (%two,), kwargs = {}) becomes "),
    "an error": (fails, "fails with ValueError: expected eight"),
}


@pytest.mark.parametrize("name", READS)
def test_a_size_that_is_read_as_a_number_is_found(name: str) -> None:
    body, words = READS[name]
    with pytest.raises(ConfigurationError) as caught:
        check_same_graph(Sized(body, 8), Sized(body, 3))
    for expected in (words, "compact() would change", "protect the layer"):
        assert expected in str(caught.value)
    check_same_graph(Sized(body, 8), Sized(body, 8))


def test_other_sizes_alone_are_no_difference() -> None:
    for body in (
        lambda net, y: y / net.one.in_features,  # a size that stays
        lambda net, y: y.nan_to_num(float("nan"))[..., :1] + net.shift,
        lambda net, y: y + torch.randn(3, 1),
    ):
        wide, narrow = Sized(body, 8), Sized(body, 3)
        before = torch.get_rng_state()
        check_same_graph(wide, narrow)
        assert torch.equal(torch.get_rng_state(), before)
        assert not any("constant" in key for key in (*vars(wide), *wide._buffers))
