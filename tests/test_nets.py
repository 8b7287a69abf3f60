from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.nets import MLP, ConvNet, sequential


def test_mlp_is_the_layers_that_it_says() -> None:
    net = MLP(12, [5, 7], 2, activation=nn.Tanh)
    kinds = [type(layer) for layer in net]
    assert kinds == [nn.Flatten, nn.Linear, nn.Tanh, nn.Linear, nn.Tanh, nn.Linear]
    inputs = torch.randn(4, 3, 2, 2)
    first, second, last = net[1], net[3], net[5]
    expected = last(second(first(inputs.flatten(1)).tanh()).tanh())
    assert torch.equal(net(inputs), expected)


def test_mlp_without_hidden_layers_is_linear() -> None:
    net = MLP(3, [], 2)
    inputs = torch.randn(4, 3)
    assert torch.equal(net(inputs), nn.functional.linear(inputs, net[1].weight, net[1].bias))


@pytest.mark.parametrize("size", [4, 8, 11, 28])
@pytest.mark.parametrize("channels", [1, 3])
def test_convnet_takes_images_of_its_size(size: int, channels: int) -> None:
    net = ConvNet(channels=channels, size=size, outputs=6, widths=(2, 3), hidden=5)
    assert net(torch.randn(2, channels, size, size)).shape == (2, 6)


def test_convnet_is_not_linear_between_convolutions() -> None:
    torch.manual_seed(0)
    net = ConvNet(size=8, activation=nn.Softplus)
    assert sum(isinstance(module, nn.Softplus) for module in net.modules()) == 3


def test_sequential_keeps_the_names_of_torch() -> None:
    layers = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)]
    net = sequential(layers)
    assert type(net) is nn.Sequential
    assert list(net.state_dict()) == list(nn.Sequential(*layers).state_dict())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: MLP(0, [5], 2), "inputs="),
        (lambda: MLP(3, [5, 0], 2), "hidden="),
        (lambda: MLP(3, [5], 0), "outputs="),
        (lambda: ConvNet(size=3), "size=3"),
        (lambda: ConvNet(widths=(0, 3)), "widths="),
    ],
)
def test_sizes_that_cannot_be(make: object, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make()  # type: ignore[operator]
