"""Channel groups: the tensors that lose entries together when a unit is removed.

A unit is an output feature of a ``Linear`` or an output channel of a convolution. The network's
graph (``torch.fx``, evaluation mode) is walked once, from its inputs to its outputs:

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
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import copy_network
from lightning_bnn.resize import (
    BATCH_NORMS,
    CONVOLUTIONS,
    LAYERS,
    is_depthwise,
    why_not_resizable,
)

__all__ = ["Group", "Groups", "Reader", "Source", "check_same_graph", "find_groups"]

# Names are those of modules and functions alike, as _name_of gives them: nn.LeakyReLU and
# F.leaky_relu are "leakyrelu". These act on each number by itself, and zero in is zero out.
ELEMENTWISE = {
    "relu", "relu6", "leakyrelu", "rrelu", "gelu", "silu", "mish", "tanh", "elu", "celu", "selu",
    "hardswish", "softsign", "tanhshrink", "softshrink", "hardshrink", "identity", "contiguous",
    "clone", "dropout", "dropout1d", "dropout2d", "dropout3d",
}  # fmt: skip
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
    if _Tracer().is_leaf_module(net, ""):  # a single layer: its units are the outputs
        return Groups(outputs=_weighted(net))
    net = copy_network(net).eval()  # a forward pass may leave things on the network
    try:
        graph = _Tracer().trace(net)
    except Exception as error:  # whatever the network's own code raises when it is traced
        raise ConfigurationError(
            f"torch.fx cannot trace {type(net).__name__} to find its units "
            f'({type(error).__name__}: {error}). Prune single weights, with unit="weight".'
        ) from error
    return _Walk(net, graph).run()


def check_same_graph(net: nn.Module, smaller: nn.Module) -> None:
    """Raise unless two networks do the same operations with the same numbers.

    A graph has plain numbers where a ``forward`` computes with them in Python. Where such a number
    is the size of a layer, a network of other sizes computes something else from the same weights.

    Args:
        net: A network that can be traced.
        smaller: The same one with smaller layers.

    Raises:
        ConfigurationError: They do not, or the smaller one cannot be traced.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> check_same_graph(net, nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    """
    try:
        pairs = zip(_operations(net), _operations(smaller), strict=False)  # both end with outputs
        change = next((f"{old} becomes {new}" for old, new in pairs if old != new), None)
    except Exception as error:  # whatever the network's own code raises
        change = f"the smaller network fails with {type(error).__name__}: {error}"
    if change is not None:
        raise ConfigurationError(
            "compact() would change what the network computes: its forward uses the size of a "
            f"layer that gets smaller as a number: {change}. Keep such a number as an attribute of "
            "the network, protect the layer when pruning, or use the pruned posterior as it is, "
            "which predicts the same."
        )


def _operations(net: nn.Module) -> list[str]:
    """Each operation of a network in words, with the values of the tensors that it looks up."""
    net = copy_network(net).eval()
    with torch.random.fork_rng(devices=[]):  # noise that is made while tracing is always the same
        nodes = _Tracer().trace(net).nodes
    tensors = {n: attrgetter(str(n.target))(net) for n in nodes if n.op == "get_attr"}
    values = {node: f" {list(tensor.shape)} {tensor}" for node, tensor in tensors.items()}
    return [f"{node.format_node()}{values.get(node, '')}" for node in nodes]


# ------------------------------------------------------------------------------------ the graph


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # subclasses of layers too, so that an obstacle can name them
        return isinstance(m, LAYERS) or super().is_leaf_module(m, module_qualified_name)


def _name_of(node: fx.Node, layer: nn.Module | None = None) -> str:
    """What a node calls: in lower case and without underscores if it is torch's, else in full."""
    called: Any = node.target if layer is None else type(layer)
    name = called if isinstance(called, str) else called.__name__  # str: a method
    module = getattr(called, "__module__", None) or "torch"
    if module.partition(".")[0] in ("torch", "_operator", "builtins"):
        return str(name).lower().replace("_", "")
    return f"{module}.{name}"


def _option(node: fx.Node, layer: nn.Module | None, name: str, place: int, default: Any) -> Any:
    """An option of a call: a module's attribute, or an argument of a function or method."""
    if layer is not None:
        return getattr(layer, name)
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _spread(arguments: Any) -> list[Any]:
    """Sizes or axes that may be given one by one or as one list: ``view(2, 3)``, ``view((2, 3))``.

    Example:
        >>> _spread((2, 3)), _spread(((2, 3),))
        ([2, 3], [2, 3])
    """
    nested = len(arguments) == 1 and isinstance(arguments[0], (tuple, list))
    return list(arguments[0] if nested else arguments)


def _is_shape(node: Any) -> bool:
    """Whether a node is all sizes of a tensor: ``x.shape`` or ``x.size()``."""
    if not isinstance(node, fx.Node) or not node.op.startswith("call_"):
        return False
    return (_name_of(node), *node.args[1:]) in (("getattr", "shape"), ("size",))


def _rows_of(size: Any) -> Any:
    """Whose number of rows a value is, as in ``x.size(0)`` and ``x.shape[0]``; None: no one's."""
    if isinstance(size, fx.Node) and size.op.startswith("call_") and size.args[1:] == (0,):
        given: Any = size.args[0]
        if _name_of(size) == "size":
            return given
        if _name_of(size) == "getitem" and _is_shape(given):
            return given.args[0]
    return None


# ------------------------------------------------------------------------------------ the walk


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
        calls = [str(node.target) for node in graph.nodes if node.op == "call_module"]
        self.called = set(calls)
        # a tensor that belongs to one layer, which is called once, is counted twice
        owners = [*self.modules.values(), *(self.modules[name] for name in calls)]
        self.uses = Counter(id(tensor) for module in owners for tensor in _tensors(module))
        self.uses += Counter(
            id(attrgetter(str(node.target))(net)) for node in graph.nodes if node.op == "get_attr"
        )
        self.units: dict[fx.Node, _Units] = {}
        self.groups: list[Group] = []
        self.obstacles: dict[str, str] = {}
        self.before_weights: set[fx.Node] = set()  # nodes with weights, or with such after them
        for node in reversed(graph.nodes):
            layer = self._layer(node)
            weights = layer is not None and any(p.ndim > 1 for p in layer.parameters())
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
                layer = self.modules[name]
                reason = why_not_resizable(layer) or "no layer that can be followed feeds it"
                if name not in self.called:
                    reason = "it is not called by itself in evaluation mode"
                groups.obstacles[name] = _at(name, f"{type(layer).__name__}: {reason}")
        return groups

    def _produce(self, node: fx.Node) -> _Units | None:
        """The units that begin at a node, if it calls a layer that has some."""
        layer, name = self._layer(node), str(node.target)
        if layer is None or not isinstance(layer, _PRODUCERS) or is_depthwise(layer):
            return None
        reason = self._why_fixed(layer)
        if reason is not None:
            self.obstacles[name] = _at(name, f"{type(layer).__name__}: {reason}")
            return None
        group = Group(len(layer.get_parameter("weight")), [name])
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
        name = _name_of(node, layer)
        if layer is None and name in ("size", "getattr"):
            # the number of examples may be read, and sizes that are not used; others will change
            read = node.users if _is_shape(node) else {node: None}
            if any(size.users and _rows_of(size) is None for size in read):
                raise _Blocked("it reads the number of units, a size beside it, or an attribute")
            return None
        if layer is None and name in ("view", "reshape") and node.args[0] is carrying[0]:
            return self._view(node, carrying[0])
        if name in _SUMS and len(carrying) == len(node.args) == 2:
            in_place = name in ("iadd", "isub") or str(node.target).endswith("_")
            if in_place and len(carrying[0].users) > 1:
                raise _Blocked("it adds in place to a tensor that is also used elsewhere")
            return self._sum(units, self.units[carrying[1]])
        if layer is not None and (reason := _why_hooked(layer)):
            raise _Blocked(reason)
        first = node.args[0] if node.args else node.kwargs.get("input")
        if first is not carrying[0] or len(node.all_input_nodes) > 1:
            raise _Blocked(_UNKNOWN)
        return _act(node, layer, name, units)

    def _read(self, node: fx.Node, layer: nn.Module, units: _Units) -> _Units | None:
        """Units at a layer with weights: they go through a companion, and end in a reader."""
        name, group = str(node.target), units.group
        reason = self._why_fixed(layer)
        if reason is not None:
            raise _Blocked(reason)
        axes = CONVOLUTIONS.get(type(layer), BATCH_NORMS.get(type(layer), 0))
        if isinstance(layer, nn.BatchNorm1d) and not units.axes:
            axes = 0  # it takes features as well as channels of a sequence
        if axes != units.axes:
            raise _Blocked("it does not read along the axis of the units")
        sizes = ("num_features", "in_features", "in_channels")
        inputs: int = next(getattr(layer, size) for size in sizes if hasattr(layer, size))
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
        """A view of the form (x.size(0), -1), which is a Flatten if x has the same rows."""
        sizes = _spread(node.args[1:])
        rows = _rows_of(sizes[0]) if len(sizes) == 2 and sizes[1] == -1 else None
        if rows is None:
            raise _Blocked("a view other than (x.size(0), -1) may fix the number of units")
        before = viewed
        while before is not rows:
            layer = self._layer(before)
            # what carries units has the rows of its input, and so has a plain layer
            known = layer is not None and type(layer) in LAYERS and _why_hooked(layer) is None
            if before not in self.units and not known:
                raise _Blocked(f"the first size of {rows.name!r} need not be the number of rows")
            before = before.all_input_nodes[0]
        return self.units[viewed].flattened()

    def _why_fixed(self, layer: nn.Module) -> str | None:
        """Why a layer's size cannot change in this network, or None."""
        reason = why_not_resizable(layer) or _why_hooked(layer)
        if reason is None and any(self.uses[id(tensor)] > 2 for tensor in _tensors(layer)):
            return "it is called more than once, or its tensors are also used elsewhere"
        return reason

    def _layer(self, node: fx.Node) -> nn.Module | None:
        return self.modules[str(node.target)] if node.op == "call_module" else None

    def _words(self, node: fx.Node) -> str:
        layer = self._layer(node)
        if layer is not None:
            return f"{str(node.target)!r}, {type(layer).__name__}"
        return str(getattr(node.target, "__name__", node.target))


def _act(node: fx.Node, layer: nn.Module | None, name: str, units: _Units) -> _Units:
    """The units after an operation on one tensor, without weights for each unit."""
    if name in ELEMENTWISE or (name == "prelu" and getattr(layer, "num_parameters", 0) == 1):
        return units
    if name in _POOLS:
        if _POOLS[name] != units.axes:
            raise _Blocked("it does not pool over the positions of a unit alone")
        return units
    if name == "flatten":
        start, end = (_option(node, layer, *o) for o in (("start_dim", 1, 0), ("end_dim", 2, -1)))
        if (start, end) == (1, -1):
            return units.flattened()
    if name == "mean" and units.axes:
        axes, rank = _spread([_option(node, None, "dim", 1, None)]), units.axes + 2
        whole = all(isinstance(axis, int) for axis in axes)
        if not whole or sorted(axis % rank for axis in axes) != list(range(2, rank)):
            raise _Blocked("it averages over other axes than the positions of a unit")
        return units if _option(node, None, "keepdim", 2, False) else replace(units, axes=0)
    raise _Blocked(_UNKNOWN)


def _why_hooked(layer: nn.Module) -> str | None:
    """Why a layer with hooks cannot be followed, or None without them."""
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has a forward hook, which the graph does not show; remove the hook"
    return None


def _at(layer: str, reason: str) -> str:
    return f"{layer!r} (at {reason})"


def _weighted(net: nn.Module) -> list[str]:
    """The modules that own a parameter with two or more axes."""
    return [
        name
        for name, module in net.named_modules()
        if any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    ]


def _tensors(module: nn.Module) -> list[Tensor]:
    tensors = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in tensors if tensor is not None]
