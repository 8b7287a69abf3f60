"""What the operations between layers do to the units of a layer.

An operation of a traced network can be followed if it acts on each element or on each channel by
itself, and if zero in is zero out: f(0) = 0. Then a unit that is zero stays zero, and no unit is
felt in another. Each such operation takes the units from one layout to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

__all__ = [
    "Blocked",
    "Layout",
    "arguments",
    "first_size_of",
    "name_of",
    "pass_function",
    "pass_module",
    "why_hooked",
]

ELEMENTWISE: tuple[type[nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.ELU, nn.CELU,
    nn.SELU, nn.Hardswish, nn.Softsign, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Identity,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
POOLS: dict[type[nn.Module], int] = {
    getattr(nn, f"{kind}Pool{axes}d"): axes
    for kind in ("Max", "Avg", "AdaptiveMax", "AdaptiveAvg")
    for axes in (1, 2, 3)
}
# as functions of torch and torch.nn.functional, and as methods of tensors
ELEMENTWISE_NAMES = {
    "relu", "relu_", "relu6", "leaky_relu", "rrelu", "gelu", "silu", "mish", "tanh", "tanh_", "elu",
    "celu", "selu", "hardswish", "softsign", "tanhshrink", "softshrink", "hardshrink", "dropout",
    "dropout1d", "dropout2d", "dropout3d", "contiguous", "clone",
}  # fmt: skip
POOL_NAMES = {
    f"{kind}_pool{axes}d": axes
    for kind in ("max", "avg", "adaptive_max", "adaptive_avg")
    for axes in (1, 2, 3)
}
_NOT_ZERO_AT_ZERO = {"sigmoid", "softplus", "logsigmoid", "hardsigmoid", "exp", "cos"}
_JOINS = {"add", "sub", "mul", "cat", "concat", "stack", "iadd", "isub", "imul", "matmul"}
_LIBRARIES = {"torch", "torch.nn.functional", "torch._C._nn", "_operator", "builtins"}


@dataclass(frozen=True)
class Layout:
    """Where the units of a layer lie in a tensor.

    Attributes:
        axes: How many spatial axes come after that of the units; 0: the units are the last axis.
        blocks: Whether a Flatten has put the positions of each unit one after the other, so that a
            unit is a block of consecutive numbers.
    """

    axes: int
    blocks: bool = False

    def flattened(self) -> Layout:
        """The layout after ``flatten(1)``."""
        return Layout(0, bool(self.axes) or self.blocks)


class Blocked(Exception):
    """An operation that cannot be followed; the message says why."""


def pass_module(layer: nn.Module, layout: Layout) -> Layout:
    """Where the units lie after an activation, a pooling layer or a Flatten.

    Raises:
        Blocked: It is another layer, or it does not act on each unit by itself.

    Example:
        >>> pass_module(nn.Flatten(), Layout(axes=2))
        Layout(axes=0, blocks=True)
    """
    kind = type(layer)
    if kind in ELEMENTWISE:
        return layout
    if kind in POOLS:
        return _pooled(POOLS[kind], bool(getattr(layer, "return_indices", False)), layout)
    if isinstance(layer, nn.Hardtanh):
        return _clamped(layer.min_val, layer.max_val, layout)
    if isinstance(layer, nn.PReLU) and layer.num_parameters == 1:
        return layout
    if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
        return layout.flattened()
    raise Blocked(_why(kind.__name__.lower()))


def pass_function(
    user: fx.Node, node: fx.Node, layout: Layout, origins: Mapping[fx.Node, fx.Node]
) -> Layout | None:
    """Where the units of ``node`` lie after a function or a method; None: they end there.

    Args:
        user: The function.
        node: What it is applied to.
        layout: Where the units lie before it.
        origins: The node whose first axis each has; one that is left out has its own.

    Raises:
        Blocked: It does not act on each unit by itself, or is not known to.
    """
    name = name_of(user)
    first = user.args[0] if user.args else user.kwargs.get("input")
    if name in ("size", "getattr") and first is node:
        _read_size(user)
        return None
    if name in ("view", "reshape") and first is node:
        return _viewed(user, node, layout, origins)
    if first is not node or user.all_input_nodes != [node]:
        raise Blocked(_why(name))
    if name in ELEMENTWISE_NAMES:
        return layout
    if name in POOL_NAMES:
        return _pooled(POOL_NAMES[name], bool(user.kwargs.get("return_indices")), layout)
    if name == "hardtanh":
        return _clamped(user.kwargs.get("min_val"), user.kwargs.get("max_val"), layout)
    if name == "flatten" and arguments(user, ("start_dim", 0), ("end_dim", -1)) == [1, -1]:
        return layout.flattened()
    if name == "mean" and layout.axes:
        return _averaged(user, layout)
    raise Blocked(_why(name))


def name_of(node: fx.Node) -> str:
    """The name of a function or method; of a function that is not torch's, with its module."""
    if isinstance(node.target, str):
        return node.target
    name, module = node.target.__name__, getattr(node.target, "__module__", None)
    return name if module in _LIBRARIES else f"{module}.{name}"


def first_size_of(size: Any) -> fx.Node | None:
    """The node whose first size a value is, as in ``x.size(0)`` or ``x.shape[0]``, or None."""
    if not isinstance(size, fx.Node) or not size.args:
        return None
    source: Any = size.args[0]
    if name_of(size) == "getitem":
        if size.args[1] != 0 or not isinstance(source, fx.Node) or not source.args:
            return None
        of_shape = name_of(source) == "getattr" and source.args[1] == "shape"
        if not of_shape and not (name_of(source) == "size" and len(source.args) == 1):
            return None
        source = source.args[0]
    elif name_of(size) != "size" or size.args[1:] != (0,):
        return None
    return source if isinstance(source, fx.Node) else None


def arguments(user: fx.Node, *names: tuple[str, Any]) -> list[Any]:
    """Arguments after the tensor, by place or by name, each with a default."""
    return [
        user.args[place] if len(user.args) > place else user.kwargs.get(name, default)
        for place, (name, default) in enumerate(names, start=1)
    ]


def why_hooked(layer: nn.Module) -> str | None:
    """Why a layer with hooks cannot be followed, or None without them."""
    if layer._forward_hooks or layer._forward_pre_hooks:
        return "it has a forward hook, which the graph does not show; remove the hook"
    return None


def _pooled(axes: int, indices: bool, layout: Layout) -> Layout:
    if indices:
        raise Blocked("it returns indices too")
    if axes != layout.axes:
        raise Blocked("it does not pool over the positions of a unit alone")
    return layout


def _clamped(low: Any, high: Any, layout: Layout) -> Layout:
    if not all(isinstance(bound, (int, float)) for bound in (low, high)) or not low <= 0 <= high:
        raise Blocked(f"its range from {low} to {high} does not keep a zero at zero")
    return layout


def _averaged(user: fx.Node, layout: Layout) -> Layout:
    """A mean over all spatial axes and no other."""
    axes, keeps = arguments(user, ("dim", None), ("keepdim", False))
    axes = [axes] if isinstance(axes, int) else axes
    rank = layout.axes + 2
    whole = list(range(2, rank))
    if not isinstance(axes, (tuple, list)) or sorted(axis % rank for axis in axes) != whole:
        raise Blocked("it averages over other axes than the positions of a unit")
    return layout if keeps else Layout(0)


def _viewed(
    user: fx.Node, node: fx.Node, layout: Layout, origins: Mapping[fx.Node, fx.Node]
) -> Layout:
    """A view of the form (examples, -1), which is a Flatten."""
    sizes: tuple[Any, ...] = user.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    source = first_size_of(sizes[0]) if len(sizes) == 2 and sizes[1] == -1 else None
    if source is None:
        raise Blocked("a view that is not of the form (x.size(0), -1) may fix the number of units")
    if origins.get(source, source) is not origins.get(node, node):
        raise Blocked(
            f"it views by the first size of {source.name!r}, which need not be the number of "
            "examples here, so that a unit may be spread over several of them"
        )
    return layout.flattened()


def _read_size(user: fx.Node) -> None:
    """The number of examples may be read; the number of units will change."""
    read: list[tuple[Any, fx.Node]]
    if name_of(user) == "size" and len(user.args) > 1:
        read = [(user.args[1], user)]
    elif name_of(user) == "size" or user.args[1] == "shape":
        read = [(u.args[1] if name_of(u) == "getitem" else None, u) for u in user.users]
    else:
        raise Blocked(f"it reads .{user.args[1]}")
    for index, reader in read:
        if index is None or (index != 0 and reader.users):
            raise Blocked("it reads the number of units, or a size beside it")


def _why(name: str) -> str:
    if name in _NOT_ZERO_AT_ZERO:
        return "it is not zero at zero, so that a removed unit would still be felt"
    if name in _JOINS:
        return "it joins the units with other values, as a residual connection does"
    return "it is not known to act on each unit by itself and to keep a zero at zero"
