"""What can be told about the axes of the tensors in a traced network.

Two things decide whether units can be followed, and a graph without example inputs does not say
them outright: whose first axis a tensor has, since ``view(x.size(0), -1)`` is a Flatten only if
``x`` has as many examples as what is viewed; and how many axes there are, since a ``BatchNorm1d``
normalises the second of three axes, and the units of a ``Linear`` are the last. Both are carried
from operation to operation; an operation that is not known begins a new first axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from lightning_bnn.pruning.operations import (
    ELEMENTWISE,
    ELEMENTWISE_NAMES,
    POOL_NAMES,
    POOLS,
    arguments,
    first_size_of,
    name_of,
    why_hooked,
)
from lightning_bnn.resize import BATCH_NORMS, CONVOLUTIONS

__all__ = ["Axes", "find_axes"]

# Layers and functions that give a tensor of the axes that they got, beside those that keep a zero.
_SAME: tuple[type[nn.Module], ...] = (
    nn.Linear, nn.BatchNorm1d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm,
    nn.Hardtanh, nn.PReLU, nn.Sigmoid, nn.Hardsigmoid, nn.LogSigmoid, nn.Softplus,
)  # fmt: skip
_SAME_NAMES = {
    "sigmoid", "softplus", "logsigmoid", "hardsigmoid", "hardtanh", "exp", "log", "sqrt", "abs",
    "square", "sin", "cos", "neg", "pow", "clamp", "layer_norm", "group_norm", "batch_norm",
    "float", "double", "half", "to", "type_as", "detach",
}  # fmt: skip
_JOINS = {
    "add", "sub", "mul", "div", "truediv", "iadd", "isub", "imul", "itruediv", "add_", "sub_",
    "mul_", "div_",
}  # fmt: skip
_REDUCTIONS = {"mean", "sum", "amax", "amin"}


@dataclass(frozen=True)
class Axes:
    """The axes of one tensor.

    Attributes:
        origin: The node whose first axis it has: an input of the network, or the last operation
            that is not known to keep the first axis.
        count: The number of axes, or None where it cannot be told.
    """

    origin: fx.Node
    count: int | None = None

    def with_count(self, count: int | None) -> Axes:
        """The same first axis, and another number of axes."""
        return Axes(self.origin, count)


def find_axes(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> dict[fx.Node, Axes]:
    """The axes of every tensor of a graph.

    Args:
        graph: The traced network.
        modules: Its layers, by the names that the graph has.

    Example:
        >>> net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))
        >>> found = find_axes(fx.Tracer().trace(net), dict(net.named_modules()))
        >>> [(axes.origin.name, axes.count) for axes in found.values()][:4]
        [('input_1', None), ('input_1', 3), ('input_1', 3), ('input_1', 2)]
    """
    found: dict[fx.Node, Axes] = {}
    for node in graph.nodes:
        axes = None
        if node.op == "call_module":
            before = node.args[0] if node.args else None
            if len(node.all_input_nodes) == 1 and isinstance(before, fx.Node):
                axes = _after_module(modules[str(node.target)], found[before])
        elif node.op in ("call_function", "call_method"):
            axes = _after_function(node, found)
        found[node] = Axes(node) if axes is None else axes
    return found


def _after_module(layer: nn.Module, before: Axes) -> Axes | None:
    """The axes after a layer, or None if it is not known to keep the first."""
    kind = type(layer)
    if why_hooked(layer) is not None:
        return None
    if kind in _SAME or kind in ELEMENTWISE:
        return before
    for known in (CONVOLUTIONS, BATCH_NORMS, POOLS):
        if kind in known:
            return before.with_count(known[kind] + 2)  # examples and channels come in front
    if isinstance(layer, nn.Flatten) and layer.start_dim > 0:
        return before.with_count(2 if (layer.start_dim, layer.end_dim) == (1, -1) else None)
    if kind is nn.Embedding and before.count is not None:
        return before.with_count(before.count + 1)
    return before.with_count(None) if kind is nn.Embedding else None


def _after_function(node: fx.Node, found: Mapping[fx.Node, Axes]) -> Axes | None:
    """The axes after a function or a method, or None if it is not known to keep the first."""
    name = name_of(node)
    first = node.args[0] if node.args else node.kwargs.get("input")
    if name in _JOINS:
        return _joined(list(node.args), found)
    if name in ("cat", "concat") and isinstance(first, (tuple, list)):
        (axis,) = arguments(node, ("dim", 0))
        joined = _joined(list(first), found)
        return joined if joined and (axis == -1 or _never_first([axis], joined.count)) else None
    if not isinstance(first, fx.Node):
        return None
    before = found[first]
    if name in _SAME_NAMES or name in ELEMENTWISE_NAMES:
        return before
    if name in POOL_NAMES:
        return before.with_count(POOL_NAMES[name] + 2)
    if name == "flatten":
        start, end = arguments(node, ("start_dim", 0), ("end_dim", -1))
        whole = before.with_count(2 if (start, end) == (1, -1) else None)
        return whole if isinstance(start, int) and start > 0 else None
    if name in ("view", "reshape"):
        return _viewed(node, before, found)
    if name in ("transpose", "permute"):
        return _permuted(node, name, before)
    if name in _REDUCTIONS:
        return _reduced(node, before)
    return _indexed(node, before) if name == "getitem" else None


def _joined(operands: list[Any], found: Mapping[fx.Node, Axes]) -> Axes | None:
    """Tensors of the same first axis, put together; the network's own tensors are broadcast."""
    nodes = [operand for operand in operands if isinstance(operand, fx.Node)]
    axes = [found[node] for node in nodes if node.op != "get_attr"]
    if not axes or any(one.origin is not axes[0].origin for one in axes):
        return None
    same = len(axes) == len(nodes) and all(one.count == axes[0].count for one in axes)
    return axes[0] if same else axes[0].with_count(None)


def _viewed(node: fx.Node, before: Axes, found: Mapping[fx.Node, Axes]) -> Axes | None:
    sizes: Any = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    source = first_size_of(sizes[0]) if sizes else None
    keeps = source is not None and found[source].origin is before.origin
    return Axes(before.origin if keeps else node, len(sizes) or None)


def _permuted(node: fx.Node, name: str, before: Axes) -> Axes | None:
    order: Any = node.args[1:]
    if len(order) == 1 and isinstance(order[0], (tuple, list)):
        order = order[0]
    if len(order) < 2 or not all(isinstance(axis, int) for axis in order):
        return None
    keeps = order[0] == 0 if name == "permute" else _never_first(order, before.count)
    count = len(order) if name == "permute" else before.count
    return Axes(before.origin if keeps else node, count)


def _reduced(node: fx.Node, before: Axes) -> Axes | None:
    chosen, keeps = arguments(node, ("dim", None), ("keepdim", False))
    chosen = [chosen] if isinstance(chosen, int) else chosen
    if not isinstance(chosen, (tuple, list)) or not _never_first(chosen, before.count):
        return None
    count = None if before.count is None else before.count - (0 if keeps else len(chosen))
    return before.with_count(count)


def _indexed(node: fx.Node, before: Axes) -> Axes | None:
    """A choice such as ``x[:, -1]``, which leaves the first axis alone."""
    index = node.args[1]
    if not isinstance(index, tuple) or index[0] != slice(None):
        return None
    if before.count is None or not all(isinstance(one, (int, slice)) for one in index):
        return before.with_count(None)
    return before.with_count(before.count - sum(isinstance(one, int) for one in index))


def _never_first(chosen: Any, count: int | None) -> bool:
    """Whether none of these axes is the first; counted from the end, that needs their number."""
    if not all(isinstance(axis, int) for axis in chosen):
        return False
    axes = [axis + count if count is not None and axis < 0 else axis for axis in chosen]
    return all(axis > 0 for axis in axes)
