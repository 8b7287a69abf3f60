"""Small networks for configuration files and examples.

A strategy takes any ``nn.Module``; these only save a YAML user a Python file. They are plain
networks, with nothing Bayesian in them.
"""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import torch
from torch import Tensor, nn

from lightning_bnn.checks import check_whole
from lightning_bnn.errors import ConfigurationError

__all__ = ["MLP", "ConvNet", "Polynomial", "sequential"]


def sequential(layers: list[nn.Module]) -> nn.Sequential:
    """An ``nn.Sequential`` from a list, the form in which YAML can hold layers.

    Args:
        layers: The layers, from input to output.

    Example:
        >>> sequential([nn.Linear(2, 3), nn.ReLU()])
        Sequential(
          (0): Linear(in_features=2, out_features=3, bias=True)
          (1): ReLU()
        )
    """
    return nn.Sequential(*layers)


class MLP(nn.Sequential):
    """A fully connected network, which flattens its input first.

    Args:
        inputs: Numbers in one example, such as 784 for an image of 28 by 28 pixels.
        hidden: Width of each hidden layer; ``[]`` for a linear model.
        outputs: Numbers that the network gives for one example.
        activation: Class of the nonlinearity between layers.

    Example:
        >>> import torch
        >>> net = MLP(64, [32, 32], 10, activation=nn.Tanh)
        >>> net(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
        >>> [name for name, _ in net.named_parameters()][:2]
        ['1.weight', '1.bias']
    """

    def __init__(
        self,
        inputs: int,
        hidden: list[int],
        outputs: int,
        activation: type[nn.Module] = nn.ReLU,
    ) -> None:
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise([inputs, *hidden, outputs]):
            layers += [nn.Linear(before, after), activation()]
        super().__init__(*layers[:-1])


class ConvNet(nn.Module):
    """A small convolutional network for small square images, in the manner of LeNet.

    Two blocks of convolution (3 by 3, padded), nonlinearity and max pooling (2 by 2), each with
    its own number of channels; then one hidden and one output layer.

    Args:
        channels: Channels of the input: 1 for grey, 3 for colour.
        size: Height and width of the input, at least 4: 8 for digits, 28 for MNIST.
        outputs: Numbers that the network gives for one example.
        widths: Channels after the first and the second convolution.
        hidden: Width of the hidden layer.
        activation: Class of the nonlinearity.

    Raises:
        ConfigurationError: If the image is too small.

    Example:
        >>> import torch
        >>> ConvNet(channels=1, size=8, outputs=10)(torch.zeros(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """

    def __init__(
        self,
        channels: int = 1,
        size: int = 28,
        outputs: int = 10,
        widths: tuple[int, int] = (16, 32),
        hidden: int = 128,
        activation: type[nn.Module] = nn.ReLU,
    ) -> None:
        super().__init__()
        self.arguments = {
            "channels": channels, "size": size, "outputs": outputs, "widths": list(widths),
            "hidden": hidden, "activation": activation,
        }  # fmt: skip
        if size < 4:
            raise ConfigurationError(
                f"ConvNet halves the image twice and needs size >= 4; got size={size}. Use MLP."
            )
        first, second = widths
        self.features = nn.Sequential(
            nn.Conv2d(channels, first, 3, padding=1),
            activation(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            activation(),
            nn.MaxPool2d(2),
        )
        self.head = MLP(second * (size // 2 // 2) ** 2, [hidden], outputs, activation)

    def forward(self, images: Tensor) -> Tensor:
        """Outputs for a batch of images, ``(B, channels, size, size)``."""
        return self.head(self.features(images))


class Polynomial(nn.Module):
    """All products of at most ``order`` inputs, without the constant: features, no weights.

    Args:
        inputs: Numbers in one example.
        order: The highest total degree.

    Example:
        >>> import torch
        >>> Polynomial(inputs=2, order=2)(torch.tensor([[2.0, 3.0]]))
        tensor([[2., 3., 4., 6., 9.]])
        >>> Polynomial(order=3).features
        3
    """

    def __init__(self, inputs: int = 1, order: int = 2) -> None:
        super().__init__()
        self.arguments = {"inputs": inputs, "order": order}
        places = range(check_whole("inputs", inputs, 1))
        degrees = range(1, check_whole("order", order, 1) + 1)
        self._terms = [t for n in degrees for t in combinations_with_replacement(places, n)]

    @property
    def features(self) -> int:
        """How many there are."""
        return len(self._terms)

    def forward(self, inputs: Tensor) -> Tensor:
        """The features of a batch, ``(B,)`` or ``(B, inputs)``."""
        columns = inputs.reshape(len(inputs), -1)
        if columns.shape[1] != self.arguments["inputs"]:
            raise ConfigurationError(
                f"Polynomial was made for inputs={self.arguments['inputs']}; got "
                f"{columns.shape[1]} numbers in an example. Pass inputs={columns.shape[1]}."
            )
        return torch.stack([columns[:, list(term)].prod(1) for term in self._terms], 1)
