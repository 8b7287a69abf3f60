"""The graph of a network by ``torch.fx``, in evaluation mode, and whether two are the same.

A graph has plain numbers where a network's ``forward`` computes with them in Python. Where such a
number is the size of a layer, a network with other sizes computes something else from the same
weights; this is seen when both are traced and compared operation by operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import copy_network
from lightning_bnn.pruning.operations import name_of
from lightning_bnn.resize import LAYERS

__all__ = ["check_same_graph", "is_leaf", "trace"]


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
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()  # noise that is made while tracing is the same in both
        one = copy_network(net).eval()
        nodes = list(trace(one).nodes)
        torch.set_rng_state(state)
        other = copy_network(smaller).eval()
        try:
            others = list(trace(other).nodes)
        except Exception as error:  # whatever the network's own code raises
            _refuse(layers, f"the smaller network fails with {type(error).__name__}: {error}")
    partner = dict(zip(nodes, others, strict=False))
    for mine, theirs in partner.items():  # both end with the output: more is another operation
        if (mine.op, name_of(mine)) != (theirs.op, name_of(theirs)):
            _refuse(layers, f"{_words(mine)} becomes {_words(theirs)}")
        arguments = (mine.args, mine.kwargs), (theirs.args, theirs.kwargs)
        if not _same(*arguments, partner):
            _refuse(layers, f"{_words(mine)} becomes {_words(theirs)}")
        if mine.op == "get_attr" and not _same_value(_value(one, mine), _value(other, theirs)):
            _refuse(layers, f"the tensor {mine.name!r}, which its code makes, becomes another one")


def _refuse(layers: Sequence[str], what: str) -> None:
    raise ConfigurationError(
        f"compact() would change what the network computes. Its forward uses the size of a layer "
        f"that gets smaller ({', '.join(map(repr, layers))}) as a number: {what}. Keep such a "
        "number as an attribute of the network that does not follow the layer, protect the layer "
        "when pruning, or use the pruned posterior as it is, which predicts the same."
    )


def _words(node: fx.Node) -> str:
    inputs = [*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())]
    return f"{node.name!r}, {name_of(node)}({', '.join(inputs)})"


def _same(mine: Any, theirs: Any, partner: Mapping[fx.Node, fx.Node]) -> bool:
    """Whether arguments are the same: numbers by value, nodes by their place in the graph."""
    if isinstance(mine, fx.Node):
        return partner[mine] is theirs
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, slice):
        ends = (theirs.start, theirs.stop, theirs.step)
        return _same((mine.start, mine.stop, mine.step), ends, partner)
    if isinstance(mine, (tuple, list)):
        pairs = zip(mine, theirs, strict=False)
        return len(mine) == len(theirs) and all(_same(*pair, partner) for pair in pairs)
    if isinstance(mine, Mapping):
        return list(mine) == list(theirs) and all(
            _same(value, theirs[key], partner) for key, value in mine.items()
        )
    return bool(mine == theirs) or bool(mine != mine and theirs != theirs)  # NaN is not itself


def _value(net: nn.Module, node: fx.Node) -> Any:
    value: Any = net
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


def _same_value(mine: Any, theirs: Any) -> bool:
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        return type(mine) is type(theirs)
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return False
    return bool(((mine == theirs) | ((mine != mine) & (theirs != theirs))).all())
