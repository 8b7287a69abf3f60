"""Channel groups: the tensors that lose entries together when a unit is removed.

A unit is an output feature of a ``Linear`` or an output channel of a convolution. The network's
graph is walked once, from its inputs to its outputs:

* a ``Linear`` or a convolution *produces* units;
* operations that act on each unit by itself and keep a zero at zero carry them on;
* BatchNorms and depthwise convolutions do so too, with entries or a filter for each unit: these
  *companions* lose what belongs to the unit;
* a sum ties the units of its operands: all their producers are one group;
* a ``Linear`` or a convolution *reads* units.

A unit that is zero in every forward pass, or that no reader reads, can then be taken out of every
tensor of its group. Units that reach the network's outputs stay, and so do those that reach an
operation which is not known: an obstacle says which, and why. ``BatchNorm1d`` after a ``Linear`` is
taken as one of features, of inputs with two axes, examples and features.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import copy_network
from lightning_bnn.pruning.graph import (
    ELEMENTWISE,
    first_axes,
    first_size_of,
    is_leaf,
    name_of,
    option,
    spread,
    trace,
    why_hooked,
)
from lightning_bnn.resize import (
    BATCH_NORMS,
    CONVOLUTIONS,
    LAYERS,
    is_depthwise,
    why_not_resizable,
)

__all__ = ["Group", "Groups", "Reader", "Source", "find_groups"]

_PRODUCERS: tuple[type[nn.Module], ...] = (nn.Linear, *CONVOLUTIONS)
_POOLS = {
    f"{kind}pool{axes}d": axes
    for kind in ("max", "avg", "adaptivemax", "adaptiveavg")
    for axes in (1, 2, 3)
}
_SUMS = {"add", "iadd", "sub", "isub"}
_UNKNOWN = "it is not known to act on each unit by itself and to keep a zero at zero"


@dataclass(frozen=True, eq=False)
class Source:
    """Where the units of a tensor are from.

    Attributes:
        layer: Their producer, or the companion that they passed; None: they are a sum.
        per_unit: How many consecutive entries of a companion belong to one unit: one, or after a
            Flatten as many as a channel had positions.
        inputs: What the companion or the sum was applied to; a producer has none.
    """

    layer: str | None
    per_unit: int = 1
    inputs: tuple[Source, ...] = ()


@dataclass(frozen=True)
class Reader:
    """A layer that reads units, how many consecutive inputs a unit has in it, and whence."""

    name: str
    per_unit: int
    source: Source


@dataclass(eq=False)
class Group:
    """Units that are removed together.

    Attributes:
        units: How many there are.
        producers: The layers whose outputs they are, more than one where these are added.
        companions: The layers with entries for each unit, and how many.
        readers: The layers that read them.
        output: Whether they reach the network's outputs.
        obstacle: The operation at which they cannot be followed, and why not.
    """

    units: int
    producers: list[str]
    companions: dict[str, int] = field(default_factory=dict)
    readers: list[Reader] = field(default_factory=list)
    output: bool = False
    obstacle: str | None = None

    @property
    def entries(self) -> dict[str, int]:
        """The layers whose outputs shrink with the units, and their entries for each unit."""
        return {**dict.fromkeys(self.producers, 1), **self.companions}


@dataclass
class Groups:
    """What becomes of each layer of a network that has weights with two or more axes.

    Attributes:
        removable: The groups whose units can be removed, in the order of the calls.
        outputs: The layers whose units are the network's outputs, and stay.
        obstacles: Why the units of the others cannot be removed, by the name of the layer.
    """

    removable: list[Group] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    obstacles: dict[str, str] = field(default_factory=dict)


def find_groups(net: nn.Module) -> Groups:
    """Follow the units of every ``Linear`` and convolution of a network.

    Raises:
        ConfigurationError: ``torch.fx`` cannot trace the network.

    Example:
        >>> groups = find_groups(nn.Sequential(
        ...     nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)))
        >>> [group] = groups.removable
        >>> group.entries, [(reader.name, reader.per_unit) for reader in group.readers]
        ({'0': 1, '1': 1}, [('4', 9)])
        >>> groups.outputs
        ['4']
    """
    net = copy_network(net).eval()  # a forward pass may leave things on the network
    if is_leaf(net):  # its units are the outputs
        if why_not_resizable(net) is None:
            return Groups(outputs=[""])
        reason = f"{type(net).__name__}: it is the whole network"
        return Groups(obstacles={name: _at(name, reason) for name in _weighted(net)})
    try:
        graph = trace(net)
    except Exception as error:  # whatever the network's own code raises when it is traced
        raise ConfigurationError(
            f"torch.fx cannot trace {type(net).__name__} to find its units "
            f'({type(error).__name__}: {error}). Prune single weights, with unit="weight".'
        ) from error
    return _Walk(net, graph).run()


class _Blocked(Exception):
    """An operation that cannot be followed; the message says why."""


@dataclass(frozen=True)
class _Units:
    """The units that a tensor carries, and where they lie in it.

    Attributes:
        group: Whose units they are.
        source: Where they are from.
        axes: How many spatial axes come after that of the units; 0: the units are the last axis.
        blocks: Whether a Flatten has put the positions of each unit one after the other, so that a
            unit is a block of consecutive numbers.
    """

    group: Group
    source: Source
    axes: int
    blocks: bool = False

    def flattened(self) -> _Units:
        return replace(self, axes=0, blocks=bool(self.axes) or self.blocks)


class _Walk:
    """One walk through a graph."""

    def __init__(self, net: nn.Module, graph: fx.Graph) -> None:
        self.net, self.graph, self.modules = net, graph, dict(net.named_modules())
        self.calls = Counter(str(n.target) for n in graph.nodes if n.op == "call_module")
        self.attributes = {str(n.target) for n in graph.nodes if n.op == "get_attr"}
        self.owners = Counter(id(t) for m in self.modules.values() for t in _tensors(m).values())
        self.first_axes = first_axes(graph, self.modules)
        self.units: dict[fx.Node, _Units] = {}
        self.groups: list[Group] = []
        self.obstacles: dict[str, str] = {}
        self.before_weights: set[fx.Node] = set()  # nodes with weights, or with such after them
        for node in reversed(graph.nodes):
            layer = self._layer(node)
            weights = layer is not None and any(p.ndim > 1 for p in layer.parameters())
            weights |= any(source.op == "get_attr" for source in node.all_input_nodes)
            if weights or any(user in self.before_weights for user in node.users):
                self.before_weights.add(node)

    def run(self) -> Groups:
        for node in self.graph.nodes:
            carrying = [source for source in node.all_input_nodes if source in self.units]
            after = None
            try:
                if carrying:
                    after = self._carry(node, carrying)
            except _Blocked as why:
                for group in (self.units[source].group for source in carrying):
                    if node not in self.before_weights:
                        group.output = True  # which stay, whatever is done to them
                    elif group.obstacle is None:
                        group.obstacle = f"{self._words(node)}: {why}"
            after = after or self._produce(node)
            if after is not None:
                self.units[node] = after
        groups = Groups(obstacles=self.obstacles)
        for group in self.groups:
            if group.obstacle is not None:
                groups.obstacles |= {name: _at(name, group.obstacle) for name in group.producers}
            elif group.output or not group.readers:
                groups.outputs += group.producers
            else:
                groups.removable.append(group)
        known = {name for group in groups.removable for name in group.entries}
        for name in _weighted(self.net):
            if name not in {*known, *groups.outputs, *groups.obstacles}:
                groups.obstacles[name] = self._explain(name)
        return groups

    # ------------------------------------------------------------------------ operations

    def _produce(self, node: fx.Node) -> _Units | None:
        """The units that begin at a node, if it calls a layer that has some."""
        layer, name = self._layer(node), str(node.target)
        if layer is None or not isinstance(layer, _PRODUCERS) or is_depthwise(layer):
            return None
        reason = self._why_fixed(name)
        if reason is not None:
            self.obstacles[name] = _at(name, f"{type(layer).__name__}: {reason}")
            return None
        group = Group(_size(layer, "out"), [name])
        self.groups.append(group)
        return _Units(group, Source(name), CONVOLUTIONS.get(type(layer), 0))

    def _carry(self, node: fx.Node, carrying: list[fx.Node]) -> _Units | None:
        """The units after an operation on tensors that carry some; None: they end there.

        Raises:
            _Blocked: It does not act on each unit by itself, or is not known to.
        """
        units = self.units[carrying[0]]
        if node.op == "output":
            for source in carrying:
                self.units[source].group.output = True
            return None
        layer = self._layer(node)
        if isinstance(layer, LAYERS):
            return self._read(node, layer, units)
        name = name_of(node, layer)
        if layer is None and name in ("size", "getattr"):
            _check_size(node, name)
            return None
        if layer is None and name in ("view", "reshape") and node.args[0] is carrying[0]:
            return self._view(node, carrying[0])
        if name in _SUMS and len(carrying) == len(node.args) == 2:
            in_place = name in ("iadd", "isub") or str(node.target).endswith("_")
            if in_place and len(carrying[0].users) > 1:
                raise _Blocked("it adds in place to a tensor that is also used elsewhere")
            return self._sum(units, self.units[carrying[1]])
        if layer is not None and (reason := why_hooked(layer)):
            raise _Blocked(reason)
        first = node.args[0] if node.args else node.kwargs.get("input")
        if first is not carrying[0] or len(node.all_input_nodes) > 1:
            raise _Blocked(_UNKNOWN)
        return _act(node, layer, name, units)

    def _read(self, node: fx.Node, layer: nn.Module, units: _Units) -> _Units | None:
        """Units at a layer with weights: they go through a companion, and end in a reader."""
        name, group = str(node.target), units.group
        reason = self._why_fixed(name)
        if reason is not None:
            raise _Blocked(reason)
        axes = CONVOLUTIONS.get(type(layer), BATCH_NORMS.get(type(layer), 0))
        if isinstance(layer, nn.BatchNorm1d) and not units.axes:
            axes = 0  # it takes features as well as channels of a sequence
        if axes != units.axes:
            raise _Blocked("it does not read along the axis of the units")
        inputs = _size(layer, "in")
        if inputs % group.units or (inputs != group.units and not units.blocks):
            raise _Blocked(f"it reads {inputs} inputs, which are not those of {group.units} units")
        per_unit = inputs // group.units
        if type(layer) in BATCH_NORMS or is_depthwise(layer):
            group.companions[name] = per_unit
            return replace(units, source=Source(name, per_unit, (units.source,)))
        group.readers.append(Reader(name, per_unit, units.source))
        return None

    def _sum(self, units: _Units, other: _Units) -> _Units:
        """Units that are added to others: from here on, and from their producers, they are one."""
        kept, gone = sorted((units.group, other.group), key=self.groups.index)
        same_place = (units.axes, units.blocks) == (other.axes, other.blocks)
        if kept.units != gone.units or not same_place:
            raise _Blocked(_UNKNOWN)
        if kept is not gone:
            kept.producers += gone.producers
            kept.companions |= gone.companions
            kept.readers += gone.readers
            kept.output |= gone.output
            kept.obstacle = kept.obstacle or gone.obstacle
            self.groups.remove(gone)
            for node, carried in self.units.items():
                if carried.group is gone:
                    self.units[node] = replace(carried, group=kept)
        return replace(units, group=kept, source=Source(None, 1, (units.source, other.source)))

    def _view(self, node: fx.Node, viewed: fx.Node) -> _Units:
        """A view of the form (examples, -1), which is a Flatten."""
        sizes = spread(node.args[1:])
        source = first_size_of(sizes[0]) if len(sizes) == 2 and sizes[1] == -1 else None
        if source is None:
            raise _Blocked("a view other than (x.size(0), -1) may fix the number of units")
        if self.first_axes[source] is not self.first_axes[viewed]:
            raise _Blocked(f"the first size of {source.name!r} need not be the number of rows here")
        return self.units[viewed].flattened()

    # --------------------------------------------------------------------------- reasons

    def _why_fixed(self, name: str) -> str | None:
        """Why a layer's size cannot change in this network, or None."""
        layer = self.modules[name]
        reason = why_not_resizable(layer) or why_hooked(layer)
        if reason is not None:
            return reason
        if self.calls[name] > 1:
            return f"it is called {self.calls[name]} times"
        if any(self.owners[id(tensor)] > 1 for tensor in _tensors(layer).values()):
            return "it shares a tensor with another layer"
        if self._used_outside(name):
            return "its tensors are also used outside of it"
        return None

    def _explain(self, name: str) -> str:
        """Why a layer with weights produces no units."""
        layer = self.modules[name]
        around = [call for call in self.calls if name.startswith(f"{call}.")]
        if around:
            layer = self.modules[around[0]]
            reason: str | None = f"it lies inside of {around[0]!r}, which is not followed"
        elif name not in self.calls:
            reason = "it is not called as a layer in evaluation mode"
        elif is_depthwise(layer):
            reason = "a depthwise convolution loses channels only with the layer that feeds it"
        else:
            reason = why_not_resizable(layer)
        return _at(name, f"{type(layer).__name__}: {reason}")

    def _used_outside(self, name: str) -> bool:
        prefix = f"{name}." if name else ""
        return any(f"{prefix}{key}" in self.attributes for key in _tensors(self.modules[name]))

    def _layer(self, node: fx.Node) -> nn.Module | None:
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def _words(self, node: fx.Node) -> str:
        layer = self._layer(node)
        if layer is not None:
            return f"{str(node.target)!r}, {type(layer).__name__}"
        return str(getattr(node.target, "__name__", node.target))


def _act(node: fx.Node, layer: nn.Module | None, name: str, units: _Units) -> _Units:
    """The units after an operation on one tensor, without weights for each unit."""
    if name in ELEMENTWISE:
        return units
    if name == "prelu" and getattr(layer, "num_parameters", 0) == 1:
        return units
    if name in _POOLS:
        if _POOLS[name] != units.axes:
            raise _Blocked("it does not pool over the positions of a unit alone")
        return units
    if name == "flatten":
        start, end = (option(node, layer, *o) for o in (("start_dim", 1, 0), ("end_dim", 2, -1)))
        if (start, end) == (1, -1):
            return units.flattened()
    if name == "mean" and units.axes:
        axes, rank = spread([option(node, None, "dim", 1, None)]), units.axes + 2
        whole = all(isinstance(axis, int) for axis in axes)
        if not whole or sorted(axis % rank for axis in axes) != list(range(2, rank)):
            raise _Blocked("it averages over other axes than the positions of a unit")
        return units if option(node, None, "keepdim", 2, False) else replace(units, axes=0)
    raise _Blocked(_UNKNOWN)


def _check_size(node: fx.Node, name: str) -> None:
    """The number of examples may be read; the number of units will change."""
    if name == "getattr" and node.args[1] != "shape":
        raise _Blocked(f"it reads .{node.args[1]}")
    read: list[tuple[Any, fx.Node]] = [(index, node) for index in node.args[1:] if name == "size"]
    if not read:
        read = [(u.args[1] if name_of(u) == "getitem" else None, u) for u in node.users]
    for index, reader in read:
        if index is None or (index != 0 and reader.users):
            raise _Blocked("it reads the number of units, or a size beside it")


def _at(layer: str, reason: str) -> str:
    return f"{layer!r} (at {reason})"


def _weighted(net: nn.Module) -> list[str]:
    """The modules that own a parameter with two or more axes."""
    return [
        name
        for name, module in net.named_modules()
        if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    ]


def _size(layer: Any, side: str) -> int:
    """The number of a layer's inputs (``"in"``) or outputs (``"out"``)."""
    if type(layer) in BATCH_NORMS:
        return int(layer.num_features)
    return int(getattr(layer, f"{side}_{'features' if type(layer) is nn.Linear else 'channels'}"))


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in tensors.items() if tensor is not None}
