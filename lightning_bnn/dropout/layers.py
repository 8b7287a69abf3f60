"""Where a network has dropout: its own layers, or before its layers with weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from lightning_bnn.dropout.noise import DropoutLayer, Noise
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.selection import Choice, choose, trainable_names

__all__ = ["OWN", "input_features", "inserted_layers", "own_layers"]

# a network's own layers: the class whose forward it is, the noise, and how it is shared
OWN: Sequence[tuple[type[nn.Module], Noise, str]] = [
    (nn.Dropout, "bernoulli", "elements"),
    (nn.Dropout1d, "bernoulli", "channels"),
    (nn.Dropout2d, "bernoulli", "channels"),
    (nn.Dropout3d, "bernoulli", "channels"),
    (nn.AlphaDropout, "alpha", "elements"),
    (nn.FeatureAlphaDropout, "alpha", "channels"),
    (StochasticDepth, "bernoulli", "examples"),
]

_BEFORE: Sequence[tuple[tuple[type[nn.Module], ...], str]] = [
    ((nn.Linear,), "features"),
    ((nn.Conv1d, nn.ConvTranspose1d), "channels 1d"),
    ((nn.Conv2d, nn.ConvTranspose2d), "channels 2d"),
    ((nn.Conv3d, nn.ConvTranspose3d), "channels 3d"),
]


def own_layers(net: nn.Module) -> list[DropoutLayer]:
    """A network's own dropout layers, also those whose rate is 0.

    Dropout that is no layer of its own cannot be seen: in attention's weights, between the layers
    of an ``nn.LSTM``, or as a function in a ``forward``.

    Example:
        >>> own_layers(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.2), nn.Linear(3, 1)))[0].rate
        0.2
    """
    layers = []
    for name, module in net.named_modules():
        for kind, noise, shared in OWN:
            if isinstance(module, kind):
                if type(module).forward is not kind.forward:
                    raise ConfigurationError(
                        f"{name!r} is a {type(module).__name__}, a {kind.__name__} with a forward "
                        f"of its own, whose noise cannot be controlled. Put nn.{kind.__name__} in "
                        "its place."
                    )
                rate: Any = module.p
                if not 0 <= rate < 1:
                    raise ConfigurationError(
                        f"The dropout layer {name!r} drops all of its inputs (p={rate}). Give it a "
                        "rate below 1, or take it out."
                    )
                layers.append(DropoutLayer(name, float(rate), noise, shared))
    return layers


def inserted_layers(
    net: nn.Module, choice: Choice, rate: float, noise: Noise = "bernoulli"
) -> list[DropoutLayer]:
    """Dropout before layers with weights that are trained: Linear, Conv and ConvTranspose.

    Args:
        net: The network.
        choice: Which of their weights, as for :func:`lightning_bnn.selection.select`; None: all
            but those of the first layer of the network, whose inputs are the data.
        rate: p of each.
        noise: One of :data:`NOISES`.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> [layer.name for layer in inserted_layers(net, None, 0.1)]
        ['2']
        >>> [layer.name for layer in inserted_layers(net, "*.weight", 0.1)]
        ['0', '2']
    """
    trainable = trainable_names(net)  # a frozen layer is no part of what is inferred
    names = {id(net.get_parameter(name)): name for name in trainable}
    found: dict[str, DropoutLayer] = {}
    for name, module in net.named_modules():
        weight = names.get(id(getattr(module, "weight", None)))
        # attention reads the weights of its last projection without calling it
        if weight is None or isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            continue
        for kinds, shared in _BEFORE:
            if isinstance(module, kinds):
                units = getattr(module, "in_features", getattr(module, "in_channels", 0))
                found[name] = DropoutLayer(name, rate, noise, shared, weight, units)
    if not found:
        raise ConfigurationError(
            f"{type(net).__name__} has no layer before which dropout can be inserted: no Linear, "
            "Conv or ConvTranspose that it calls and trains. Put nn.Dropout layers into the "
            "network."
        )
    if choice is not None:
        weights = [str(layer.weight) for layer in found.values()]
        chosen = choose(net, weights, choice, "dropped", "weight of a Linear or Conv layer")
        return [layer for layer in found.values() if layer.weight in chosen]
    # a network may own a parameter beside its layers, such as a class token
    first = next(
        (
            name for name, module in net.named_modules()
            if list(module.parameters(recurse=False)) and not list(module.children())
        ),
        None,
    )  # fmt: skip
    return [layer for name, layer in found.items() if name != first] or list(found.values())


def input_features(module: nn.Module) -> Tensor:
    """Which of its input features each weight of a layer multiplies, in the weight's shape.

    Example:
        >>> input_features(nn.Linear(3, 2))
        tensor([[0, 1, 2],
                [0, 1, 2]])
        >>> input_features(nn.Conv1d(4, 2, kernel_size=1, groups=2)).flatten(1)
        tensor([[0, 1],
                [2, 3]])
    """
    layer: Any = module
    shape = layer.weight.shape
    features = torch.arange(getattr(layer, "in_features", getattr(layer, "in_channels", 0)))
    if not getattr(layer, "transposed", False):  # else the first axis is that of the inputs
        groups = getattr(layer, "groups", 1)
        features = features.view(groups, -1).repeat_interleave(shape[0] // groups, 0)
    return features.view(*features.shape, *[1] * (len(shape) - features.dim())).expand(shape)
