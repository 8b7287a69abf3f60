"""What a user's network has: its tensors by name, its description, a clean copy of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch

from lightning_bnn.checks import check_kind, check_tensors
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import apply_to_collection, rank_zero_warn

__all__ = [
    "checked_masks",
    "copy_network",
    "describe",
    "first_difference",
    "in_network_order",
    "in_precision_of",
    "network_tensors",
    "plain_network",
    "warn_if_compiled",
]


def copy_network(net: nn.Module, shared: Iterable[Tensor] = ()) -> nn.Module:
    """A copy of a network; what a forward pass left on it is copied without its graph.

    Modules of ``torch.compile`` are not in it, but what they were compiled from: compiled code
    cannot be run with other weights, and the names of tensors would be others.

    Args:
        net: The network.
        shared: Tensors of it that the copy has, too, instead of copies.

    Example:
        >>> import torch
        >>> net = nn.Linear(2, 1)
        >>> net.activation = net(torch.ones(1, 2))
        >>> copy_network(net).activation.requires_grad
        False
    """
    known: dict[int, Any] = {**_left_on(net), **{id(tensor): tensor for tensor in shared}}
    for module in reversed(_compiled_modules(net)):  # the innermost first
        known[id(module)] = deepcopy(module._orig_mod, known)
    return deepcopy(net, known)


def plain_network(net: nn.Module) -> nn.Module:
    """The network that ``torch.compile`` was given, around the same tensors; any other as it is.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> list(plain_network(torch.compile(net)).state_dict())
        ['weight', 'bias']
    """
    if not _compiled_modules(net):
        return net
    return copy_network(net, [*net.parameters(), *net.buffers()])


def warn_if_compiled(net: nn.Module) -> None:
    """Say that compiled code is not used."""
    if _compiled_modules(net) or any(m._compiled_call_impl is not None for m in net.modules()):
        rank_zero_warn(
            "net= was given to torch.compile. The network is run as it was before, with other "
            "weights in each step, for which its compiled code cannot be used: it is no faster. "
            "Names and weights are those of the plain network. Leave torch.compile out.",
            category=UserWarning,
        )


def _compiled_modules(net: nn.Module) -> list[Any]:
    # by name: to import the class takes seconds where nothing is compiled
    return [module for module in net.modules() if type(module).__name__ == "OptimizedModule"]


def describe(net: nn.Module) -> list[list[Any]]:
    """Name and shape of every parameter and saved buffer of a network, in order."""
    return [[name, list(tensor.shape)] for name, tensor in network_tensors(net).items()]


def network_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Every parameter and saved buffer of a network, each once, under its first name."""
    check_kind("net", net, nn.Module, "a torch.nn.Module")
    net = plain_network(net)
    saved = set(net.state_dict())
    buffers = {name: buffer for name, buffer in net.named_buffers() if name in saved}
    return {**dict(net.named_parameters()), **buffers}


def in_network_order(net: nn.Module, tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    """The same tensors in the order in which the network has them, names and shapes checked.

    The order decides which number of the noise meets which weight, and a file does not keep it.
    """
    own = network_tensors(net)
    check_tensors(what, tensors)
    for name, tensor in tensors.items():
        if name not in own:
            raise ConfigurationError(
                f"{what} names {name!r}, which is not a parameter or saved buffer of the network. "
                f"Its names begin with {list(own)[:3]}; a tied weight goes by its first name."
            )
        if tensor.shape != own[name].shape:
            raise ConfigurationError(
                f"{what} has {name!r} in the shape {list(tensor.shape)}; the network has it in "
                f"{list(own[name].shape)}."
            )
    return {name: tensors[name] for name in own if name in tensors}


def in_precision_of(tensors: Mapping[str, Tensor], net: nn.Module, inputs: Any) -> Any:
    """Inputs whose floating-point tensors have the precision of a network's weights.

    A trainer does the same in a fit with ``precision="64-true"`` or ``"bf16-true"``. Where weights
    are of several precisions, the inputs stay as they are.

    Args:
        tensors: The weights that the network is run with; others of its tensors do not count.
        net: The network.
        inputs: A tensor, or a collection of tensors.

    Example:
        >>> net = nn.Linear(2, 1).double()
        >>> in_precision_of(dict(net.named_parameters()), net, torch.zeros(1, 2)).dtype
        torch.float64
    """
    weights = [tensors[name] for name, _ in net.named_parameters() if name in tensors]
    dtypes = {weight.dtype for weight in weights if weight.is_floating_point()}
    if len(dtypes) != 1:
        return inputs
    (dtype,) = dtypes
    return apply_to_collection(
        inputs, Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )


def checked_masks(net: nn.Module, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The masks as booleans, if each is one of a tensor of the network.

    Example:
        >>> checked_masks(nn.Linear(2, 1), {"weight": torch.tensor([[0, 1]])})
        {'weight': tensor([[False,  True]])}
    """
    check_kind("masks", masks, Mapping, "a mapping of names to tensors")
    for name, mask in masks.items():
        if not isinstance(mask, Tensor):
            raise ConfigurationError(
                f"The mask of {name!r} is a tensor of True and False; got {type(mask).__name__}."
            )
        if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
            raise ConfigurationError(
                f"The mask of {name!r} holds other numbers than 0 and 1 ({mask.dtype}). A mask "
                "says which weights stay; pass scores to lightning_bnn.pruning.pruning_masks."
            )
    ordered = in_network_order(net, masks, "masks")
    return {name: mask.detach().bool().clone() for name, mask in ordered.items()}


def first_difference(one: Sequence[Sequence[Any]], other: Sequence[Sequence[Any]]) -> str | None:
    """Where two descriptions of networks first differ, or None.

    Example:
        >>> first_difference(describe(nn.Linear(2, 3)), describe(nn.Linear(2, 3, bias=False)))
        "tensor 1 is 'bias' of shape [3], but missing"
    """
    for index, (left, right) in enumerate(zip_longest(one, other)):
        if left != right:
            ends = ["missing" if x is None else f"{x[0]!r} of shape {x[1]}" for x in (left, right)]
            return f"tensor {index} is {ends[0]}, but {ends[1]}"
    return None


def _left_on(net: nn.Module) -> dict[int, Tensor]:
    """Copies, by identity, of the tensors that forward passes left on a network and its modules.

    Those of the members that ran stacked have an axis of members. None has a graph.
    """
    copies = {}
    for module in net.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor):
                plain = value
                while functorch.is_functorch_wrapped_tensor(plain):
                    plain = functorch.get_unwrapped(plain)
                if plain is not value or not value.is_leaf:
                    copies[id(value)] = plain.detach().clone()
    return copies
