"""Running a network with noise at its dropout layers, and where examples lie in what these get.

A network is never changed: hooks are there while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.dropout.layers import OWN
from lightning_bnn.dropout.noise import DropoutLayer
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import copy_network
from lightning_bnn.stacked import call_network

__all__ = [
    "Change", "Place", "Places", "add_noise", "check_called", "place_of", "places_of", "row_count",
]  # fmt: skip

Change = Callable[[int, int, Tensor], Tensor]

_NESTED = "use_nested_tensor"  # of nn.TransformerEncoder


@contextmanager
def add_noise(net: nn.Module, layers: Sequence[DropoutLayer], change: Change) -> Iterator[None]:
    """Inside, ``change(layer, call, inputs)`` is what each layer gets instead of its inputs.

    Both are numbers: the layer's place in ``layers``, and how often it was called before. A
    network's own dropout layers do nothing else.

    Example:
        >>> from lightning_bnn.dropout import own_layers
        >>> net = nn.Sequential(nn.Dropout(0.5), nn.Flatten())
        >>> with add_noise(net, own_layers(net), lambda layer, call, inputs: 2 * inputs):
        ...     net(torch.ones(1, 2))
        tensor([[2., 2.]])
    """
    own = tuple(kind for kind, *_ in OWN)
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
        >>> from lightning_bnn.dropout import own_layers
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
