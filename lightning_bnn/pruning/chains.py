"""Who feeds whom: which layers lose inputs when a unit of another layer is removed.

A unit is an output feature of a ``Linear`` or an output channel of a convolution. The network's
graph (``torch.fx``, in evaluation mode) is followed from each such layer, the *producer*, through
operations that act on each unit by itself and keep a zero at zero, up to the layers that read the
units, its *readers*. On the way lie *companions*, which have numbers or a filter of their own for
each unit: BatchNorms and depthwise convolutions. A unit that is zero in every forward pass, or that
no reader reads, can then be taken out of all of them.

What comes of a layer is one of three: it is followed, it gives the network's outputs (its units
stay), or there is an obstacle: an operation and a reason. ``BatchNorm1d`` after a ``Linear`` is
taken as one of features, of inputs with two axes, examples and features, unless the graph tells
that there are three (:mod:`lightning_bnn.pruning.axes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import copy_network
from lightning_bnn.pruning.axes import find_axes
from lightning_bnn.pruning.operations import (
    Blocked,
    Layout,
    name_of,
    pass_function,
    pass_module,
    why_hooked,
)
from lightning_bnn.pruning.tracing import is_leaf, trace
from lightning_bnn.resize import (
    BATCH_NORMS,
    CONVOLUTIONS,
    LAYERS,
    is_depthwise,
    why_not_resizable,
)

__all__ = ["Chain", "Chains", "Companion", "Obstacle", "Reader", "find_chains"]

_PRODUCERS: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS)


@dataclass(frozen=True)
class Companion:
    """A BatchNorm or depthwise convolution on the way of a producer's units.

    Attributes:
        name: The layer's name in the network.
        per_unit: How many consecutive entries of it belong to one unit: one, or after a Flatten
            as many as a channel had positions.
    """

    name: str
    per_unit: int = 1


@dataclass(frozen=True)
class Reader:
    """A layer that reads a producer's units.

    Attributes:
        name: The layer's name in the network.
        per_unit: How many consecutive inputs of it belong to one unit.
        through: The companions on the way to it, in order.
    """

    name: str
    per_unit: int = 1
    through: tuple[Companion, ...] = ()


@dataclass(frozen=True)
class Chain:
    """A producer whose units can be removed, how many it has, and their readers."""

    producer: str
    units: int
    readers: tuple[Reader, ...]

    @property
    def companions(self) -> tuple[Companion, ...]:
        """The companions on the way to any reader, each once."""
        return tuple(dict.fromkeys(one for reader in self.readers for one in reader.through))


@dataclass(frozen=True)
class Obstacle:
    """Why the units of a layer cannot be removed."""

    layer: str
    operation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.layer!r} (at {self.operation}: {self.reason})"


@dataclass
class Chains:
    """What comes of each layer of a network that has weights with two or more axes.

    Attributes:
        followed: The layers whose units can be removed, by name, in the order of the calls.
        outputs: Those whose units are the network's outputs, and stay.
        obstacles: Why the others cannot be followed, by name.
    """

    followed: dict[str, Chain] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    obstacles: dict[str, Obstacle] = field(default_factory=dict)


def find_chains(net: nn.Module) -> Chains:
    """Follow the units of every ``Linear`` and convolution of a network.

    Raises:
        ConfigurationError: ``torch.fx`` cannot trace the network.

    Example:
        >>> chains = find_chains(nn.Sequential(
        ...     nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)))
        >>> chains.followed["0"].readers
        (Reader(name='4', per_unit=9, through=(Companion(name='1', per_unit=1),)),)
        >>> chains.outputs
        ['4']
    """
    net = copy_network(net).eval()  # a forward pass may leave things on the network
    if is_leaf(net):  # its units are the outputs
        if why_not_resizable(net) is None:
            return Chains(outputs=[""])
        whole = "it is the whole network, and its inside is not followed"
        kind = type(net).__name__
        return Chains(obstacles={name: Obstacle(name, kind, whole) for name in _weighted(net)})
    try:
        graph = trace(net)
    except Exception as error:  # whatever the network's own code raises when it is traced
        raise ConfigurationError(
            f"The units of {type(net).__name__} cannot be removed: torch.fx cannot trace the "
            f"network ({type(error).__name__}: {error}). Prune single weights instead, with "
            'unit="weight", or write its forward without branches that depend on tensors.'
        ) from error
    return _Search(net, graph).run()


def _weighted(net: nn.Module) -> Iterator[str]:
    """The modules that own a parameter with two or more axes."""
    for name, module in net.named_modules():
        if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False)):
            yield name


class _Search:
    """The ways of all units through one graph."""

    def __init__(self, net: nn.Module, graph: fx.Graph) -> None:
        self.net = net
        self.modules = dict(net.named_modules())
        self.calls: dict[str, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                self.calls.setdefault(str(node.target), []).append(node)
        self.attributes = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
        self.axes = find_axes(graph, self.modules)
        self.origins = {node: axes.origin for node, axes in self.axes.items()}
        self.owners = Counter(id(t) for m in self.modules.values() for t in _tensors(m).values())

    def run(self) -> Chains:
        found = Chains()
        for name, nodes in self.calls.items():
            layer = self.modules[name]
            if not isinstance(layer, _PRODUCERS) or is_depthwise(layer):
                continue
            reason = self.why_fixed(name)
            if reason is not None:
                found.obstacles[name] = Obstacle(name, type(layer).__name__, reason)
                continue
            way = _Way(self, _units(layer))
            way.follow(nodes[0], Layout(CONVOLUTIONS.get(type(layer), 0)), ())
            if way.blocked is not None:
                found.obstacles[name] = Obstacle(name, *way.blocked)
            elif way.reaches_output or not way.readers:
                found.outputs.append(name)
            else:
                found.followed[name] = Chain(name, _units(layer), tuple(way.readers))
        companions = {one.name for chain in found.followed.values() for one in chain.companions}
        known = {*found.followed, *found.outputs, *found.obstacles, *companions}
        for name in _weighted(self.net):
            if name not in known:
                found.obstacles[name] = self._explain(name)
        return found

    def _explain(self, name: str) -> Obstacle:
        """Why a layer with weights is no producer."""
        layer = self.modules[name]
        around = [call for call in self.calls if name.startswith(f"{call}.")]
        if around:
            reason = f"it lies inside of {around[0]!r}, which is not followed"
            return Obstacle(name, type(self.modules[around[0]]).__name__, reason)
        if name not in self.calls:
            reason = "it is not called in a forward pass in evaluation mode"
            if self._used_outside(name):
                reason = "its weights are not those of a layer that is called"
        elif is_depthwise(layer):
            reason = "a depthwise convolution loses channels only with the layer that feeds it"
        else:
            reason = why_not_resizable(layer) or "it has no units that can be removed"
        return Obstacle(name, type(layer).__name__, reason)

    def why_fixed(self, name: str) -> str | None:
        """Why a layer's size cannot change in this network, or None."""
        layer = self.modules[name]
        reason = why_not_resizable(layer) or why_hooked(layer)
        if reason is not None:
            return reason
        if len(self.calls[name]) > 1:
            return f"it is called {len(self.calls[name])} times"
        if any(self.owners[id(tensor)] > 1 for tensor in _tensors(layer).values()):
            return "it shares a tensor with another layer"
        if self._used_outside(name):
            return "its tensors are also used outside of it"
        return None

    def _used_outside(self, name: str) -> bool:
        prefix = f"{name}." if name else ""
        return any(f"{prefix}{key}" in self.attributes for key in _tensors(self.modules[name]))

    def has_weights_from(self, start: fx.Node) -> bool:
        """Whether a layer with weights lies at this node or after it."""
        seen, waiting = {start}, [start]
        while waiting:
            node = waiting.pop()
            if any(source.op == "get_attr" for source in node.all_input_nodes):
                return True
            if node.op == "call_module":
                layer = self.modules[str(node.target)]
                if any(parameter.ndim > 1 for parameter in layer.parameters()):
                    return True
            waiting += [user for user in node.users if user not in seen]
            seen.update(node.users)
        return False


class _Way:
    """Where the units of one producer go."""

    def __init__(self, search: _Search, units: int) -> None:
        self.search, self.units = search, units
        self.readers: list[Reader] = []
        self.reaches_output = False
        self.blocked: tuple[str, str] | None = None

    def follow(self, node: fx.Node, layout: Layout, through: tuple[Companion, ...]) -> None:
        """Follow the units from a node to everything that uses it."""
        for user in node.users:
            if user.op == "output":
                self.reaches_output = True
                continue
            try:
                if user.op == "call_module":
                    self._module(user, node, layout, through)
                else:
                    after = pass_function(user, node, layout, self.search.origins)
                    if after is not None:
                        self.follow(user, after, through)
            except Blocked as why:
                # what happens to the network's outputs changes nothing: they all stay
                if not self.search.has_weights_from(user):
                    self.reaches_output = True
                elif self.blocked is None:
                    self.blocked = (self._words(user), str(why))

    def _module(
        self, user: fx.Node, node: fx.Node, layout: Layout, through: tuple[Companion, ...]
    ) -> None:
        name = str(user.target)
        layer = self.search.modules[name]
        if user.all_input_nodes != [node]:
            raise Blocked("it reads more than these units")
        if not isinstance(layer, LAYERS):
            reason = why_hooked(layer)
            if reason is not None:
                raise Blocked(reason)
            self.follow(user, pass_module(layer, layout), through)
            return
        reason = self.search.why_fixed(name)
        if reason is not None:
            raise Blocked(reason)
        per_unit = self._per_unit(layer, layout, self.search.axes[node].count)
        if type(layer) in BATCH_NORMS or is_depthwise(layer):
            self.follow(user, layout, (*through, Companion(name, per_unit)))
        else:
            self.readers.append(Reader(name, per_unit, through))

    def _per_unit(self, layer: nn.Module, layout: Layout, rank: int | None) -> int:
        """How many inputs of a layer belong to one unit; ``rank`` is the number of axes."""
        axes = CONVOLUTIONS.get(type(layer), BATCH_NORMS.get(type(layer), 0))
        if isinstance(layer, nn.BatchNorm1d) and not layout.axes:
            if rank is not None and rank != 2:
                raise Blocked("it normalises the second axis, and the units are the last of three")
            axes = 0  # it takes features as well as channels of a sequence
        if axes != layout.axes:
            raise Blocked("it does not read along the axis of the units")
        inputs = _inputs(layer)
        if inputs % self.units or (inputs != self.units and not layout.blocks):
            raise Blocked(f"it reads {inputs} inputs, which are not those of {self.units} units")
        return inputs // self.units

    def _words(self, node: fx.Node) -> str:
        if node.op != "call_module":
            return name_of(node)
        name = str(node.target)
        return f"{name!r}, {type(self.search.modules[name]).__name__}"


def _units(layer: Any) -> int:
    return int(layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def _inputs(layer: Any) -> int:
    if isinstance(layer, nn.Linear):
        return layer.in_features
    return int(layer.num_features if type(layer) in BATCH_NORMS else layer.in_channels)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}
