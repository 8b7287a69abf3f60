"""Which weights are Bayesian, and the flat vector in which they lie."""

import pytest
import torch
from torch import nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.selection import (
    FlatLayout,
    last_layer,
    select,
    trainable_names,
    without_normalisation,
)


class Tied(nn.Module):
    """A language model's shape: the head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture
def net():
    return nn.Sequential(
        nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1)
    )


def test_all_by_default_in_the_networks_order(net):
    assert select(net) == [name for name, _ in net.named_parameters()]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("4.*", ["4.weight", "4.bias"]),
        ("?.bias", ["0.bias", "1.bias", "2.bias", "3.bias", "4.bias"]),
        ("[04].weight", ["0.weight", "4.weight"]),
        (["4.*", "0.*"], ["0.weight", "0.bias", "4.weight", "4.bias"]),
        (["*", "![13].*", "!*.bias"], ["0.weight", "2.weight", "4.weight"]),
        (
            ["*.weight", "!0.*", "0.weight", "!4.*"],
            ["0.weight", "1.weight", "2.weight", "3.weight"],
        ),
        (last_layer, ["4.weight", "4.bias"]),
        (without_normalisation, [f"{i}.{part}" for i in (0, 2, 4) for part in ("weight", "bias")]),
        (lambda net: ["2.bias"], ["2.bias"]),
    ],
)
def test_choices(net, choice, expected):
    assert select(net, choice) == expected


def test_submodules_and_patterns_together(net):
    assert select(net, net[2]) == ["2.weight", "2.bias"]
    assert select(net, [net[0], "4.bias", net[2], "!*.bias"]) == ["0.weight", "2.weight"]
    assert select(net, nn.ModuleList([net[0], net[4]])) == select(net, ["0.*", "4.*"])
    assert select(net, net) == select(net)


def test_frozen_weights_are_never_chosen(net):
    net[0].requires_grad_(False)
    net[4].weight.requires_grad_(False)
    names = ["1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias", "4.bias"]
    assert select(net) == trainable_names(net) == names
    assert select(net, "*.weight") == ["1.weight", "2.weight", "3.weight"]
    assert select(net, last_layer) == ["4.bias"]
    net[4].bias.requires_grad_(False)
    assert select(net, last_layer) == ["3.weight", "3.bias"]
    for choice in (net[0], "0.*", "!0.*", lambda net: ["0.weight"]):
        with pytest.raises(ConfigurationError, match=r"0|Linear"):
            select(net, choice)
    with pytest.raises(ConfigurationError, match=r"requires_grad_\(True\)"):
        select(net.requires_grad_(False))


def test_tied_weights_go_by_their_first_name():
    net = Tied()
    assert select(net) == ["embedding.weight", "norm.weight", "norm.bias"]
    assert select(net, last_layer) == select(net, net.head) == ["embedding.weight"]
    assert select(net, without_normalisation) == ["embedding.weight"]


def test_normalisation_of_every_kind():
    layers = [nn.BatchNorm2d(2), nn.InstanceNorm2d(2, affine=True), nn.GroupNorm(1, 2)]
    layers += [nn.LayerNorm(2), nn.RMSNorm(2), nn.SyncBatchNorm(2), nn.Conv2d(2, 2, 1, bias=False)]
    assert select(nn.Sequential(*layers), without_normalisation) == ["6.weight"]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("fc.*", r"'fc.\*' matches no trainable parameter. .*'0.weight'"),
        (["*", "!nrom.*"], r"'nrom.\*' matches no"),
        (["!0.*"], "leaves no weight.* such as '\\*'"),
        (["*", "!*"], "leaves no weight"),
        ([], "leaves no weight"),
        (lambda net: ["0.wieght"], "names '0.wieght', which is not a trainable"),
        (lambda net: [], "leaves no weight"),
        (nn.Linear(2, 3), "Linear chosen as Bayesian holds no trainable parameter of the network"),
        (3, "patterns, submodules of the network and classes of layers; got 3"),
        (["*", 3], "got 3"),
        (nn.ReLU(), "ReLU"),
    ],
)
def test_choices_that_cannot_be(net, choice, message):
    with pytest.raises(ConfigurationError, match=message):
        select(net, choice)


def test_flatten_and_views_are_inverse():
    tensors = {"b": torch.randn(4, 2).T, "a": torch.randn(()), "none": torch.randn(0, 3)}
    layout = FlatLayout(tensors)
    flat = layout.flatten(tensors)
    assert (layout.names, layout.sizes, layout.size) == (["b", "a", "none"], [8, 1, 0], 9)
    views = layout.views(flat)
    assert list(views) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(views[name], tensor)
        assert views[name].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    flat.zero_()
    assert tensors["a"] != 0  # flatten copied
