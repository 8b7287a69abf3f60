"""Which weights of a network are Bayesian, and how they lie in one flat vector.

A choice is made on the names that ``net.named_parameters()`` gives: a weight that several layers
share has one name, the first. Frozen parameters (``requires_grad=False``) are constants and can
never be chosen.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.checks import call_function
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import plain_network

__all__ = [
    "Choice",
    "FlatLayout",
    "allow_functions",
    "allowed_modules",
    "last_layer",
    "look_in_current_folder",
    "named_function",
    "select",
    "without_normalisation",
]

# Functions come last: jsonargparse tries these in order, and would write a list as a function.
Choice = (
    str
    | Sequence[str | nn.Module | type[nn.Module]]
    | nn.Module
    | type[nn.Module]
    | Callable[[nn.Module], Iterable[str]]
    | None
)

_NORMALISATION = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


def trainable_names(net: nn.Module) -> list[str]:
    """The names of the parameters that may be trained, in the network's own order."""
    return [name for name, parameter in net.named_parameters() if parameter.requires_grad]


def last_layer(net: nn.Module) -> list[str]:
    """Choose the last module that has trainable weights of its own.

    Example:
        >>> last_layer(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
        ['2.weight', '2.bias']
    """
    # by identity: a weight that is tied to an earlier layer goes by that layer's name
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    chosen: list[str] = []
    for module in net.modules():
        own = [names[id(p)] for p in module.parameters(recurse=False) if p.requires_grad]
        chosen = own or chosen
    return chosen


def without_normalisation(net: nn.Module) -> list[str]:
    """Choose everything but the weights of normalisation layers.

    Example:
        >>> without_normalisation(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        ['0.weight', '0.bias']
    """
    excluded = normalisation(net)
    return [name for name in trainable_names(net) if name not in excluded]


def normalisation(net: nn.Module) -> set[str]:
    """The names of the parameters that belong to normalisation layers.

    Example:
        >>> sorted(normalisation(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))))
        ['1.bias', '1.weight']
    """
    inside = {
        id(parameter)
        for module in net.modules()
        if isinstance(module, _NORMALISATION)
        for parameter in module.parameters(recurse=False)
    }
    return {name for name, parameter in net.named_parameters() if id(parameter) in inside}


def select(net: nn.Module, choice: Choice = None) -> list[str]:
    """The names of the Bayesian parameters, in the network's own order.

    Args:
        net: The network.
        choice: ``None`` for all; a shell-style pattern of parameter names (``"fc.*"``); a
            pattern that begins with ``!`` takes names away again; a submodule of ``net``; a
            class of layers, such as ``nn.Linear``; a function of the network that returns names
            (:func:`last_layer`, :func:`without_normalisation`); or a list of patterns, submodules
            and classes, read from left to right.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
        >>> select(net, ["*", "!1.*", "!*.bias"])
        ['0.weight', '2.weight']
        >>> select(net, net[2])
        ['2.weight', '2.bias']
        >>> select(net, [nn.Linear, "!*.bias"])
        ['0.weight', '2.weight']
    """
    net = plain_network(net)
    names = trainable_names(net)
    if not any(p.is_floating_point() or p.is_complex() for p in net.parameters()):
        raise ConfigurationError(
            "Expected a network with parameters to infer, but none of its parameters is a "
            "floating-point tensor. If it is quantised, pass the network that it was made from."
        )
    if not names:
        raise ConfigurationError(
            "Expected a network with parameters to infer, but none of its parameters has "
            "requires_grad=True. Call net.requires_grad_(True), or freeze fewer layers."
        )
    for name in names:
        if (dtype := net.get_parameter(name).dtype).is_complex:
            raise ConfigurationError(
                f"The weights must be real numbers; {name!r} is {dtype}. Keep the real and the "
                "imaginary part as two parameters."
            )
    if choice is None:
        return names
    return choose(net, names, choice, "Bayesian", "trainable parameter")


def choose(net: nn.Module, names: Sequence[str], choice: Choice, role: str, sort: str) -> list[str]:
    """Those of given parameters that a choice takes, in the given order.

    Args:
        net: The network, frozen or not.
        names: The parameters to choose from.
        choice: As for :func:`select`, but for ``None``.
        role: What the chosen ones are, for the errors.
        sort: What sort of parameters there are to choose from, for the errors.

    Example:
        >>> net = nn.Linear(2, 1).requires_grad_(False)
        >>> choose(net, ["weight", "bias"], "b*", "protected", "parameter")
        ['bias']
    """
    if callable(choice) and not isinstance(choice, (nn.Module, type)):
        named = call_function(f"The choice of {role} weights", choice, net)
        if not isinstance(named, Iterable) or not all(isinstance(name, str) for name in named):
            raise ConfigurationError(
                f"The function that chooses {role} weights gives their names; got {named!r:.80}."
            )
        chosen = set(named)
    else:
        single = str, nn.Module, Tensor
        several = isinstance(choice, Iterable) and not isinstance(choice, single)
        rules: Any = choice if several else [choice]
        chosen = set()
        for rule in rules:
            chosen = _apply(net, names, chosen, rule, role, sort)
    unknown = sorted(chosen - set(names))
    if unknown:
        raise ConfigurationError(
            f"The choice of {role} weights names {unknown[0]!r}, which is not a {sort} of the "
            f"network. Its {sort}s begin with {list(names[:3])}."
        )
    if not chosen:
        raise ConfigurationError(
            f"The choice of {role} weights, {choice!r}, leaves no weight. The network's {sort}s "
            f"begin with {list(names[:3])}. A list that takes names away with '!' needs something "
            "to take them from, such as '*'."
        )
    return [name for name in names if name in chosen]


def _apply(
    net: nn.Module, names: Sequence[str], chosen: set[str], rule: Any, role: str, sort: str
) -> set[str]:
    """One rule of a choice: add the names that it matches, or take them away after ``!``."""
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        layers = [module for module in net.modules() if isinstance(module, rule)]
        if not layers:
            raise ConfigurationError(
                f"The network has no layer of the class {rule.__name__} that is chosen as {role}. "
                f"It has {sorted({type(module).__name__ for module in net.modules()})}."
            )
        rule = nn.ModuleList(layers)
    if isinstance(rule, nn.Module):
        inside = {id(parameter) for parameter in rule.parameters()}
        own = dict(net.named_parameters())
        matching = {name for name in names if id(own[name]) in inside}
        if not matching:
            raise ConfigurationError(
                f"The module {type(rule).__name__} chosen as {role} holds no {sort} of the "
                "network. Pass a submodule of the network that you give, such as net.fc."
            )
        return chosen | matching
    if not isinstance(rule, str):
        raise ConfigurationError(
            f"A choice of {role} weights is made of name patterns, submodules of the network and "
            f"classes of layers; got {rule!r}."
        )
    pattern = rule.removeprefix("!")
    matching = {name for name in names if fnmatchcase(name, pattern)}
    if not matching:
        raise ConfigurationError(
            f"The pattern {pattern!r} matches no {sort}. Their names begin with "
            f"{list(names[:3])}; patterns are shell-style, as in 'fc.*' or '*.weight'. A function "
            "of your own that a configuration names needs its module named by you: pass --import "
            "MODULE on the command line."
        )
    return chosen - matching if rule.startswith("!") else chosen | matching


class FlatLayout:
    """Named tensors as consecutive slices of one flat vector.

    Example:
        >>> layout = FlatLayout({"a": torch.zeros(2, 3), "b": torch.zeros(4)})
        >>> flat = layout.flatten({"a": torch.ones(2, 3), "b": torch.zeros(4)})
        >>> flat.shape, layout.views(flat)["a"].shape
        (torch.Size([10]), torch.Size([2, 3]))
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.names = list(tensors)
        self.shapes = [tensor.shape for tensor in tensors.values()]
        self.sizes = [tensor.numel() for tensor in tensors.values()]
        self.size = sum(self.sizes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One new flat vector with the values of ``tensors`` in the layout's order."""
        return torch.cat([tensors[name].detach().reshape(-1) for name in self.names])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The slices of ``flat`` under their names and in their shapes; no copy is made.

        Leading axes of ``flat`` stay in front: an (n, size) tensor gives stacked tensors.
        """
        lead = flat.shape[:-1]
        pieces = flat.split(self.sizes, dim=-1)
        return {
            name: piece.view(lead + shape)
            for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)
        }


# what a configuration may call to choose weights: ours, and what is in modules that the user named
_FUNCTIONS = {f"{__name__}.{each.__name__}": each for each in (last_layer, without_normalisation)}
_MODULES: dict[str, ModuleType] = {}


def allow_functions(module: str) -> None:
    """Import a module that the user has named, and let configurations name its functions.

    A configuration alone cannot: it may be somebody else's, and what it names would be called.

    Args:
        module: Its dotted name, also of a file in the current folder.

    Raises:
        ConfigurationError: There is no such module.
    """
    look_in_current_folder()
    try:
        _MODULES[module] = importlib.import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"--import {module}: the module cannot be imported ({error}). Name it as an import "
            "statement does, from the current folder or of an installed package."
        ) from error


def look_in_current_folder() -> None:
    """Let a configuration that the user has named name modules of the user's own project.

    It is looked in last, so that no file hides an installed package.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def allowed_modules() -> tuple[str, ...]:
    """The modules that the user has named, for a process that does the same work elsewhere."""
    return tuple(_MODULES)


def named_function(name: Any) -> Callable[..., Any] | None:
    """The function that a name such as ``lightning_bnn.selection.last_layer`` stands for, if any.

    Nothing is imported for it: it is one of this module, or of those that the user has named (see
    :func:`allow_functions`).

    Example:
        >>> named_function("lightning_bnn.selection.last_layer").__name__
        'last_layer'
        >>> named_function("os.system") is None  # a pattern of parameter names, as fc.weight is
        True
    """
    if not isinstance(name, str) or name in _FUNCTIONS:
        return _FUNCTIONS.get(name) if isinstance(name, str) else None
    module, _, attribute = name.rpartition(".")
    function = getattr(_MODULES.get(module), attribute, None) if attribute else None
    return function if callable(function) else None
