r"""The dropout layers of a network: where they are, and what they do with noise.

A dropout layer multiplies what it gets by noise :math:`m` of mean 1 (and adds a number, to keep the
moments of a SELU network). All noise is made of uniform numbers u by

=============  =============================================================  ====================
noise          m                                                              variance of m
=============  =============================================================  ====================
``bernoulli``  :math:`[u \ge p] / (1-p)`                                      :math:`p/(1-p)`
``gaussian``   :math:`1 + \sqrt{\alpha}\,\Phi^{-1}(u)`, α = p/(1 − p)         :math:`p/(1-p)`
``alpha``      as ``nn.AlphaDropout``: dropped numbers go to SELU's limit     of the output: 1
=============  =============================================================  ====================

p is the chance that a number is dropped. (Srivastava et al., 2014, *Dropout*; Klambauer et al.,
2017, *Self-Normalizing Neural Networks*.) Noise acts on what a module gets as its input: on that
of a network's own dropout layers, or on that of chosen layers with weights. There m is one number
for each input feature, at all positions of an image or a sequence alike: a layer with weights W
then is one with weights W diag(m), a draw of a distribution over weights (Gal and Ghahramani, 2016,
*Dropout as a Bayesian Approximation*).

A network is never changed: hooks are there while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torchvision.ops import StochasticDepth

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import copy_network
from lightning_bnn.selection import Choice, choose, trainable_names
from lightning_bnn.stacked import call_network

__all__ = [
    "NOISES",
    "SHARING",
    "Change",
    "DropoutLayer",
    "Factors",
    "Noise",
    "Place",
    "Places",
    "add_noise",
    "check_called",
    "input_features",
    "inserted_layers",
    "multiply",
    "noise_shape",
    "own_layers",
    "place_of",
    "places_of",
    "row_count",
]  # fmt: skip

Noise = Literal["bernoulli", "gaussian", "alpha"]
Change = Callable[[int, int, Tensor], Tensor]
Factors = tuple[Tensor, ...]  # what inputs are multiplied by, and what is added then

# SELU's limit at minus infinity
_ALPHA = -1.7580993408473766
_NESTED = "use_nested_tensor"  # of nn.TransformerEncoder


def _bernoulli(u: Tensor, rate: float) -> Factors:
    return ((u >= rate).to(u.dtype).div_(1 - rate),)


def _gaussian(u: Tensor, rate: float) -> Factors:
    noise = torch.special.ndtri(u.clamp(2.0**-54 if u.dtype == torch.float64 else 2.0**-25))
    return (noise.mul_((rate / (1 - rate)) ** 0.5).add_(1),)


def _alpha(u: Tensor, rate: float) -> Factors:
    kept = (u >= rate).to(u.dtype)
    scale = ((1 - rate) * (1 + rate * _ALPHA**2)) ** -0.5
    return kept * scale, (1 - kept - rate) * (scale * _ALPHA)


# from uniform numbers and the rate: what inputs are multiplied by, and what is added then
NOISES: Mapping[str, Callable[[Tensor, float], Factors]] = {
    "bernoulli": _bernoulli,
    "gaussian": _gaussian,
    "alpha": _alpha,
}

# the axes along which the noise of an example differs; None is all
SHARING: Mapping[str, tuple[int, ...] | None] = {
    "elements": None,
    "channels": (0, 1),
    "examples": (),
    "features": (-1,),
    "channels 1d": (-2,),
    "channels 2d": (-3,),
    "channels 3d": (-4,),
}

# a network's own layers: the class whose forward it is, the noise, and how it is shared
_OWN: Sequence[tuple[type[nn.Module], Noise, str]] = [
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


@dataclass(frozen=True)
class DropoutLayer:
    """A place in a network where noise acts on the input of a module.

    Attributes:
        name: The module's name.
        rate: p, the chance that a number is dropped.
        noise: One of :data:`NOISES`.
        shared: One of :data:`SHARING`.
        weight: For dropout before a layer with weights, the name of these weights.
        units: For such dropout, the number of input features.

    Example:
        >>> layer = DropoutLayer("1", 0.5, "bernoulli", "elements")
        >>> multiply(torch.ones(3), *layer.factors(torch.tensor([0.1, 0.5, 0.9])))
        tensor([0., 2., 2.])
    """

    name: str
    rate: float
    noise: str
    shared: str
    weight: str | None = None
    units: int = 0

    def factors(self, uniform: Tensor) -> Factors:
        """What inputs are multiplied by, and what is added then, from uniform numbers."""
        return NOISES[self.noise](uniform, self.rate)


def multiply(inputs: Tensor, factor: Tensor, *added: Tensor) -> Tensor:
    """Inputs with noise, in their own precision."""
    noisy = inputs * factor.to(inputs.dtype)
    return noisy + added[0].to(inputs.dtype) if added else noisy


# ---------------------------------------------------------------- where they are


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
        for kind, noise, shared in _OWN:
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


# ---------------------------------------------------------------- running with noise


@contextmanager
def add_noise(net: nn.Module, layers: Sequence[DropoutLayer], change: Change) -> Iterator[None]:
    """Inside, ``change(layer, call, inputs)`` is what each layer gets instead of its inputs.

    Both are numbers: the layer's place in ``layers``, and how often it was called before. A
    network's own dropout layers do nothing else.

    Example:
        >>> net = nn.Sequential(nn.Dropout(0.5), nn.Flatten())
        >>> with add_noise(net, own_layers(net), lambda layer, call, inputs: 2 * inputs):
        ...     net(torch.ones(1, 2))
        tensor([[2., 2.]])
    """
    own = tuple(kind for kind, *_ in _OWN)
    modules = [net.get_submodule(layer.name) for layer in layers]
    silent = [module for module in modules if isinstance(module, own) and module.training]
    # in evaluation a Transformer makes tensors without a shape of what has a padding mask
    nested = [module for module in net.modules() if getattr(module, _NESTED, False) is True]
    handles = []
    for index, module in enumerate(modules):
        hook = _Hook(change, index)
        handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
    try:
        for module in silent:
            module.training = False
        for module in nested:
            setattr(module, _NESTED, False)
        yield
    finally:
        for module in silent:
            module.training = True
        for module in nested:
            setattr(module, _NESTED, True)
        for handle in handles:
            handle.remove()


class _Hook:
    """A hook before a module's forward that counts its calls."""

    def __init__(self, change: Change, index: int) -> None:
        self._change, self._index, self._calls = change, index, count()

    def __call__(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if arguments:
            first, *rest = arguments
            return (self._change(self._index, next(self._calls), first), *rest), keywords
        name = next(iter(keywords))
        changed = self._change(self._index, next(self._calls), keywords[name])
        return arguments, {**keywords, name: changed}


@dataclass(frozen=True)
class Place:
    """Where the examples lie in what a layer gets: the axis, and how many entries each has there.

    The axis is None where it is the same for all examples.
    """

    axis: int | None
    each: int = 1


def places_of(net: nn.Module, layers: Sequence[DropoutLayer], inputs: Any) -> Places:
    """Of each layer and call, where examples lie: found by running two and three copies of one.

    A network may exchange axes before a dropout layer, or lay positions and examples along one.

    Args:
        net: The network.
        layers: Its dropout layers.
        inputs: A batch.

    Example:
        >>> net = nn.Sequential(nn.Flatten(0, 1), nn.Dropout(0.5))
        >>> places_of(net, own_layers(net), torch.zeros(8, 5, 2))
        [[Place(axis=0, each=5)]]
    """
    net, rows = copy_network(net).eval(), row_count(inputs)
    seen: list[list[list[torch.Size]]] = []
    for copies in (2, 3):
        shapes: list[list[torch.Size]] = [[] for _ in layers]

        def look(
            layer: int, call: int, inputs: Tensor, shapes: list[list[torch.Size]] = shapes
        ) -> Tensor:
            shapes[layer].append(inputs.shape)
            return inputs

        def repeat(leaf: Any, copies: int = copies) -> Any:
            batched = isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == rows
            return leaf[:1].expand(copies, *leaf.shape[1:]) if batched else leaf

        with torch.no_grad(), add_noise(net, layers, look):
            call_network(net, {}, tree_map(repeat, _plain(inputs)))
        seen.append(shapes)
    return [
        [_place(*shapes) for shapes in zip(few, more, strict=True)]
        for few, more in zip(*seen, strict=True)
    ]


def check_called(net: nn.Module, layers: Sequence[DropoutLayer], places: Places) -> None:
    """Raise if dropout that was inserted has no effect, or if none has.

    A network may well have layers that it does not call, such as dropout of attention's weights,
    whose rate is read.

    Args:
        net: The network.
        layers: Its dropout layers.
        places: What :func:`places_of` found.
    """
    unused = [layer for layer, seen in zip(layers, places, strict=True) if not seen]
    if inserted := next((layer.name for layer in unused if layer.weight), None):
        raise ConfigurationError(
            f"{type(net).__name__} does not call {inserted!r}, so that dropout before it "
            "has no effect. Pass layers=, the weights of layers that it calls, such as "
            f"layers=['*.weight', '!{inserted}.weight']."
        )
    if unused and len(unused) == len(layers):
        raise ConfigurationError(
            f"{type(net).__name__} calls none of its dropout layers in evaluation mode, such as "
            f"{unused[0].name!r}, so that all draws would be the same. Train it with "
            "MCDropoutBNN(net, likelihood, layers='*.weight'), which inserts dropout."
        )


def _place(few: torch.Size, more: torch.Size) -> Place:
    differing = [axis for axis, (a, b) in enumerate(zip(few, more, strict=True)) if a != b]
    if not differing:
        return Place(None)
    return Place(differing[0], more[differing[0]] - few[differing[0]])


Places = list[list[Place]]  # of each layer, of each of its calls


def place_of(seen: Sequence[Place], call: int) -> Place:
    """Where examples lie in one of the calls of a layer; of more than were seen as in the last.

    Example:
        >>> place_of([Place(1)], 7), place_of([], 0)
        (Place(axis=1, each=1), Place(axis=0, each=1))
    """
    return seen[min(call, len(seen) - 1)] if seen else Place(0)


def _plain(inputs: Any) -> Any:
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def row_count(inputs: Any) -> int | None:
    """The number of examples: the common length of all tensors, or that of the first.

    Example:
        >>> row_count({"x": torch.zeros(3, 2), "mask": torch.zeros(3)})
        3
    """
    lengths = [
        len(leaf) for leaf in tree_leaves(_plain(inputs)) if isinstance(leaf, Tensor) and leaf.ndim
    ]
    return lengths[0] if lengths else None


def noise_shape(layer: DropoutLayer, shape: Sequence[int], axis: int | None) -> list[int]:
    """The shape of the noise of one example, with 1 where it is shared.

    Args:
        layer: The layer.
        shape: That of its inputs.
        axis: The axis of examples, along which all have the same.

    Example:
        >>> noise_shape(DropoutLayer("1", 0.5, "bernoulli", "channels"), (8, 3, 5, 5), 0)
        [1, 3, 1, 1]
    """
    axes = SHARING[layer.shared]
    own = range(len(shape)) if axes is None else [each % len(shape) for each in axes]
    return [n if i in own and i != axis else 1 for i, n in enumerate(shape)]
