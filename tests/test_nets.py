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
    net = ConvNet(channels, size, outputs=6, widths=(2, 3), hidden=5, activation=nn.Softplus)
    assert net(torch.randn(2, channels, size, size)).shape == (2, 6)
    assert sum(isinstance(module, nn.Softplus) for module in net.modules()) == 3


def test_sequential_keeps_the_names_of_torch() -> None:
    layers = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)]
    net = sequential(layers)
    assert type(net) is nn.Sequential
    assert list(net.state_dict()) == list(nn.Sequential(*layers).state_dict())


def test_an_image_that_cannot_be_halved_twice() -> None:
    with pytest.raises(ConfigurationError, match="size=3"):
        ConvNet(size=3)
