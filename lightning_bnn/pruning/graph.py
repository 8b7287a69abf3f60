"""The graph of a network by ``torch.fx``, in evaluation mode, and what it tells without inputs.

One fact decides whether units can be followed, and a graph without example inputs does not state
it: whose first axis a tensor has, since ``view(x.size(0), -1)`` is a Flatten only if ``x`` has as
many examples as what is viewed. :func:`first_axes` carries it from operation to operation; an
operation that is not known begins a new first axis.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import copy_network
from lightning_bnn.resize import LAYERS

__all__ = [
    "ELEMENTWISE",
    "check_same_graph",
    "first_axes",
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
# These keep the first axis, where all tensors that they take have the same.
_KEEP_FIRST = ELEMENTWISE | {
    "linear", "batchnorm", "layernorm", "groupnorm", "rmsnorm", "localresponsenorm", "embedding",
    "prelu", "hardtanh", "sigmoid", "hardsigmoid", "logsigmoid", "softplus", "exp", "log", "sqrt",
    "abs", "square", "neg", "pow", "clamp", "float", "to", "detach", "add", "sub", "mul", "div",
    "truediv", "iadd", "isub", "imul", "itruediv",
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
    before = _operations(net)
    try:
        after = _operations(smaller)
        # both end with the output
        changes = [
            f"{old[0]} becomes {new[0] if new[0] != old[0] else 'another tensor'}"
            for old, new in zip(before, after, strict=False)
            if old != new
        ]
    except Exception as error:  # whatever the network's own code raises
        changes = [f"the smaller network fails with {type(error).__name__}: {error}"]
    if changes:
        raise ConfigurationError(
            "compact() would change what the network computes: its forward uses the size of a "
            f"layer that gets smaller ({', '.join(map(repr, layers))}) as a number: {changes[0]}. "
            "Keep such a number as an attribute of the network, protect the layer when pruning, or "
            "use the pruned posterior as it is, which predicts the same."
        )


def _operations(net: nn.Module) -> list[tuple[str, Any]]:
    """Each operation of a network in words, with the value of each tensor that is looked up."""
    net = copy_network(net).eval()
    with torch.random.fork_rng(devices=[]):  # noise that is made while tracing is always the same
        nodes = trace(net).nodes
    operations = []
    for node in nodes:
        value = attrgetter(str(node.target))(net) if node.op == "get_attr" else None
        if isinstance(value, Tensor):
            content = value.detach().cpu().flatten().view(torch.uint8)  # NaN is equal to NaN
            value = (value.shape, content.numpy().tobytes())
        inputs = [*map(str, node.args), *(f"{name}={item}" for name, item in node.kwargs.items())]
        target = node.target if isinstance(node.target, str) else node.target.__name__
        operations.append((f"{node.name!r}, {target}({', '.join(inputs)})", value))
    return operations


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


def first_axes(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> dict[fx.Node, fx.Node]:
    """For every tensor of a graph the node whose first axis it has.

    That is an input of the network, or the last operation that is not known to keep the first axis.

    Args:
        graph: The traced network.
        modules: Its layers, by the names that the graph has.

    Example:
        >>> net = nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.Flatten(), nn.Flatten(0))
        >>> [node.name for node in first_axes(trace(net), dict(net.named_modules())).values()]
        ['input_1', 'input_1', 'input_1', 'input_1', '_3', 'output']
    """
    origins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        origins[node] = node
        layer = modules[str(node.target)] if node.op == "call_module" else None
        if not node.op.startswith("call_") or (layer is not None and why_hooked(layer)):
            continue
        name = name_of(node, layer)
        taken = [source for source in node.all_input_nodes if source.op != "get_attr"]
        spatial = re.fullmatch(r"(conv|batchnorm|\w*pool)[123]d", name) is not None
        keeps = spatial or name in _KEEP_FIRST
        if name == "flatten":
            keeps = option(node, layer, "start_dim", 1, 0) > 0
        elif name in ("cat", "concat"):
            keeps = option(node, layer, "dim", 1, 0) > 0
        elif name in ("view", "reshape"):
            size = first_size_of(next(iter(spread(node.args[1:])), None))
            keeps, taken = size is not None, [source for source in (taken[0], size) if source]
        if keeps and len({origins[source] for source in taken}) == 1:
            origins[node] = origins[taken[0]]
    return origins
