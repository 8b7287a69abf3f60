"""The graph of a network by ``torch.fx``, in evaluation mode, and what it tells without inputs.

Two facts decide whether units can be followed, and a graph without example inputs does not state
them: whose first axis a tensor has, since ``view(x.size(0), -1)`` is a Flatten only if ``x`` has as
many examples as what is viewed; and how many axes there are, since a ``BatchNorm1d`` normalises the
second of three axes, and the units of a ``Linear`` are the last. :func:`find_axes` carries both
from operation to operation; an operation that is not known begins a new first axis.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import copy_network
from lightning_bnn.resize import LAYERS

__all__ = [
    "ELEMENTWISE",
    "Axes",
    "check_same_graph",
    "find_axes",
    "first_size_of",
    "is_leaf",
    "name_of",
    "option",
    "spread",
    "trace",
    "why_hooked",
]

# Names are those of modules and functions alike, as name_of gives them: nn.LeakyReLU and
# F.leaky_relu are "leakyrelu". These act on each number by itself, and zero in is zero out.
ELEMENTWISE = {
    "relu", "relu6", "leakyrelu", "rrelu", "gelu", "silu", "mish", "tanh", "elu", "celu", "selu",
    "hardswish", "softsign", "tanhshrink", "softshrink", "hardshrink", "identity", "contiguous",
    "clone", "dropout", "dropout1d", "dropout2d", "dropout3d",
}  # fmt: skip
_SAME_AXES = ELEMENTWISE | {
    "linear", "batchnorm", "batchnorm1d", "layernorm", "groupnorm", "rmsnorm", "localresponsenorm",
    "alphadropout", "featurealphadropout", "prelu", "hardtanh", "sigmoid", "hardsigmoid",
    "logsigmoid", "softplus", "exp", "log", "sqrt", "abs", "square", "sin", "cos", "neg", "pow",
    "clamp", "float", "double", "half", "to", "typeas", "detach",
}  # fmt: skip
_BROADCAST = {
    "add", "sub", "mul", "div", "truediv", "iadd", "isub", "imul", "itruediv"
}  # fmt: skip
_LIBRARIES = ("torch.nn.modules.", "torch.nn.functional", "torch._C._nn", "_operator", "builtins")


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # subclasses of layers too, so that an obstacle can name them
        return isinstance(m, LAYERS) or super().is_leaf_module(m, module_qualified_name)


def is_leaf(net: nn.Module) -> bool:
    """Whether a network is a single layer, whose inside is not traced.

    Example:
        >>> is_leaf(nn.Linear(2, 1)), is_leaf(nn.Sequential(nn.Linear(2, 1)))
        (True, False)
    """
    return _Tracer().is_leaf_module(net, "")


def trace(net: nn.Module) -> fx.Graph:
    """The graph of a network; tensors that its code makes are left on the network.

    Example:
        >>> [node.name for node in trace(nn.Sequential(nn.Linear(2, 1), nn.ReLU())).nodes]
        ['input_1', '_0', '_1', 'output']
    """
    return _Tracer().trace(net)


def check_same_graph(net: nn.Module, smaller: nn.Module, layers: Sequence[str]) -> None:
    """Raise unless two networks do the same operations with the same numbers.

    A graph has plain numbers where a ``forward`` computes with them in Python. Where such a number
    is the size of a layer, a network of other sizes computes something else from the same weights.

    Args:
        net: A network that can be traced.
        smaller: The same one with smaller layers.
        layers: The names of the layers that are smaller.

    Raises:
        ConfigurationError: They do not, or the smaller one cannot be traced.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> smaller = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> check_same_graph(net, smaller, ["0", "2"])
    """
    before, change = _operations(net), None
    try:
        after = _operations(smaller)
    except Exception as error:  # whatever the network's own code raises
        change, after = f"the smaller network fails with {type(error).__name__}: {error}", []
    for (words, value), (other, smaller_value) in zip(before, after, strict=False):
        if change is None and words != other:  # both end with the output
            change = f"{words} becomes {other}"
        if change is None and not _same(value, smaller_value):
            change = f"the tensor {words}, which its code makes, becomes another one"
    if change is not None:
        raise ConfigurationError(
            "compact() would change what the network computes. Its forward uses the size of a "
            f"layer that gets smaller ({', '.join(map(repr, layers))}) as a number: {change}. Keep "
            "such a number as an attribute of the network that does not follow the layer, protect "
            "the layer when pruning, or use the pruned posterior as it is, which predicts the same."
        )


def _operations(net: nn.Module) -> list[tuple[str, Any]]:
    """Each operation of a network in words, with the value of each tensor that is looked up."""
    net = copy_network(net).eval()
    with torch.random.fork_rng(devices=[]):  # noise that is made while tracing is always the same
        nodes = trace(net).nodes
    return [
        (_words(node), attrgetter(str(node.target))(net) if node.op == "get_attr" else None)
        for node in nodes
    ]


def _words(node: fx.Node) -> str:
    inputs = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
    target = node.target if isinstance(node.target, str) else node.target.__name__
    return f"{node.name!r}, {target}({', '.join(inputs)})"


def _same(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return type(value) is type(other)
    same = (value.shape, value.dtype) == (other.shape, other.dtype)
    return same and bool(((value == other) | ((value != value) & (other != other))).all())  # NaN


# ---------------------------------------------------------------------------- what a node calls


def name_of(node: fx.Node, layer: nn.Module | None = None) -> str:
    """What a node calls: in lower case and without underscores if it is torch's, else in full.

    Args:
        node: The node.
        layer: The module that it calls, if it calls one.

    Example:
        >>> graph = trace(nn.Sequential(nn.LeakyReLU()))
        >>> [name_of(node, nn.LeakyReLU()) for node in graph.nodes if node.op == "call_module"]
        ['leakyrelu']
    """
    if layer is None and isinstance(node.target, str):
        return node.target.lower().replace("_", "")  # a method
    called: Any = node.target if layer is None else type(layer)
    module = getattr(called, "__module__", None) or ""
    if module == "torch" or module.startswith(_LIBRARIES):
        return str(called.__name__).lower().replace("_", "")
    return f"{module}.{called.__name__}"


def option(node: fx.Node, layer: nn.Module | None, name: str, place: int, default: Any) -> Any:
    """An option of a call: a module's attribute, or an argument of a function or method."""
    if layer is not None:
        return getattr(layer, name)
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def spread(arguments: Sequence[Any]) -> list[Any]:
    """Sizes or axes that may be given one by one or as one list: ``view(2, 3)``, ``view((2, 3))``.

    Example:
        >>> spread((2, 3)), spread(((2, 3),))
        ([2, 3], [2, 3])
    """
    nested = len(arguments) == 1 and isinstance(arguments[0], (tuple, list))
    return list(arguments[0] if nested else arguments)


def first_size_of(size: Any) -> fx.Node | None:
    """The node whose first size a value is, as in ``x.size(0)`` or ``x.shape[0]``, or None."""
    if not isinstance(size, fx.Node) or size.op not in ("call_function", "call_method"):
        return None
    call, source = (name_of(size), *size.args[1:]), size.args[:1]
    if call == ("getitem", 0) and isinstance(source[0], fx.Node):  # of a whole shape
        size = source[0]
        whole = [(name_of(size), *size.args[1:])] if size.args else []
        source = size.args[:1] if whole in ([("getattr", "shape")], [("size",)]) else ()
    elif call != ("size", 0):
        return None
    return source[0] if source and isinstance(source[0], fx.Node) else None


def why_hooked(layer: nn.Module) -> str | None:
    """Why a layer with hooks cannot be followed, or None without them."""
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has a forward hook, which the graph does not show; remove the hook"
    return None


# ---------------------------------------------------------------------------------------- axes


@dataclass(frozen=True)
class Axes:
    """The axes of one tensor.

    Attributes:
        origin: The node whose first axis it has: an input of the network, or the last operation
            that is not known to keep the first axis.
        rank: The number of axes, or None where it cannot be told.
    """

    origin: fx.Node
    rank: int | None = None


def find_axes(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> dict[fx.Node, Axes]:
    """The axes of every tensor of a graph.

    Args:
        graph: The traced network.
        modules: Its layers, by the names that the graph has.

    Example:
        >>> net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(12, 1))
        >>> found = find_axes(trace(net), dict(net.named_modules()))
        >>> [(axes.origin.name, axes.rank) for axes in found.values()][:4]
        [('input_1', None), ('input_1', 3), ('input_1', 3), ('input_1', 2)]
    """
    axes: dict[fx.Node, Axes] = {}
    for node in graph.nodes:
        after = None
        if node.op.startswith("call_"):
            layer = modules[str(node.target)] if node.op == "call_module" else None
            if layer is None or (why_hooked(layer) is None and len(node.all_input_nodes) == 1):
                after = _axes_after(node, layer, axes)
        axes[node] = after or Axes(node)
    return axes


def _axes_after(
    node: fx.Node, layer: nn.Module | None, axes: Mapping[fx.Node, Axes]
) -> Axes | None:
    """The axes after an operation, or None if it is not known to keep the first."""
    name = name_of(node, layer)
    first = node.args[0] if node.args else node.kwargs.get("input")
    if name in _BROADCAST:
        return _joined(node.args, axes)
    if name in ("cat", "concat") and isinstance(first, (tuple, list)):
        joined, axis = _joined(first, axes), option(node, None, "dim", 1, 0)
        return joined if joined and (axis == -1 or _never_first([axis], joined.rank)) else None
    if not isinstance(first, fx.Node):
        return None
    before = axes[first]
    rank = before.rank
    if name in _SAME_AXES:
        return before
    if spatial := re.fullmatch(r"(?:conv|batchnorm|\w*pool)([123])d", name):
        return replace(before, rank=int(spatial[1]) + 2)  # examples and channels come in front
    if name == "embedding":
        return replace(before, rank=rank and rank + 1)
    if name == "flatten":
        start, end = (option(node, layer, *o) for o in (("start_dim", 1, 0), ("end_dim", 2, -1)))
        return replace(before, rank=2 if (start, end) == (1, -1) else None) if start > 0 else None
    if name in ("view", "reshape"):
        sizes = spread(node.args[1:])
        source = first_size_of(sizes[0]) if sizes else None
        keeps = source is not None and axes[source].origin is before.origin
        return Axes(before.origin if keeps else node, len(sizes) or None)
    if name in ("transpose", "permute"):
        order = spread(node.args[1:])
        if not order or not all(isinstance(axis, int) for axis in order):
            return None
        keeps = order[0] == 0 if name == "permute" else _never_first(order, rank)
        return Axes(before.origin if keeps else node, len(order) if name == "permute" else rank)
    if name in ("mean", "sum", "amax", "amin"):
        chosen = spread([option(node, None, "dim", 1, None)])
        if not _never_first(chosen, rank):
            return None
        lost = 0 if option(node, None, "keepdim", 2, False) else len(chosen)
        return replace(before, rank=rank and rank - lost)
    if name == "getitem" and isinstance(node.args[1], tuple) and node.args[1][0] == slice(None):
        index = node.args[1]  # a choice such as x[:, -1] leaves the first axis alone
        plain = rank is not None and all(isinstance(place, (int, slice)) for place in index)
        lost = sum(isinstance(place, int) for place in index)
        return replace(before, rank=rank - lost if rank is not None and plain else None)
    return None


def _joined(operands: Sequence[Any], axes: Mapping[fx.Node, Axes]) -> Axes | None:
    """Tensors of the same first axis, put together; the network's own tensors are broadcast."""
    nodes = [operand for operand in operands if isinstance(operand, fx.Node)]
    joined = [axes[node] for node in nodes if node.op != "get_attr"]
    if not joined or any(other.origin is not joined[0].origin for other in joined):
        return None
    same = len(joined) == len(nodes) and all(other == joined[0] for other in joined)
    return joined[0] if same else replace(joined[0], rank=None)


def _never_first(chosen: Sequence[Any], rank: int | None) -> bool:
    """Whether none of these axes is the first; counted from the end, that needs their number."""
    if not all(isinstance(axis, int) for axis in chosen):
        return False
    return all((axis + rank if rank and axis < 0 else axis) > 0 for axis in chosen)
