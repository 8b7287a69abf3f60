"""How an object is made again, as JSON: a class or function of a known package, and its arguments.

A recipe is read without running anybody's code: only names of an allow-list are looked up
(``torch.nn``, torchvision's models, this package's networks, and what other modules of this package
add by :func:`allow`), and all arguments are plain values or recipes. The forms:

========================================  ========================================================
a number, a string, None, a list          itself
``{"of": name, "with": arguments}``       what the class or function gives with these arguments
``{"of": name, "partial": arguments}``    ``functools.partial`` of it
``{"of": name}``                          the class or function itself
``{"of": name, "children": recipes}``     an ``nn.Sequential`` of modules, by name
``{"entries": [[key, value], ...]}``      a mapping
========================================  ========================================================

A network has a recipe only if what it makes was seen to be the same: the modules, their options,
and the names and shapes of all tensors.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType, UnionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from lightning_bnn import nets
from lightning_bnn.errors import PosteriorFormatError
from lightning_bnn.network import describe

__all__ = ["allow", "bounded", "make", "network_recipe", "recipe"]

_KNOWN: dict[str, Any] = {}
_PLAIN = (bool, int, float, str, type(None))


def allow(module: ModuleType, kind: type | UnionType) -> None:
    """Let recipes name the classes of a module that are of a kind.

    Lazy layers are left out: they have no shapes that could be compared with those of a file.
    """
    for name, value in vars(module).items():
        if name.startswith("_") or not isinstance(value, type):
            continue
        if issubclass(value, kind) and not issubclass(value, LazyModuleMixin):
            _KNOWN.setdefault(f"{module.__name__}.{name}", value)


allow(nn, nn.Module)
allow(nets, nn.Module)
# they copy whatever they are given as often as a number says
del _KNOWN["torch.nn.TransformerEncoder"], _KNOWN["torch.nn.TransformerDecoder"]


class bounded(TorchFunctionMode):
    """Within it, what takes more than so many calls of torch is given up.

    A number in a recipe can ask for any number of layers.

    Args:
        calls: The most.

    Example:
        >>> layers = {"input_size": 1, "hidden_size": 1, "num_layers": 10**9}
        >>> with torch.device("meta"), bounded(1000):
        ...     make({"of": "torch.nn.LSTM", "with": layers})
        Traceback (most recent call last):
        lightning_bnn.errors.PosteriorFormatError: torch.nn.LSTM cannot be made with ...
    """

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise PosteriorFormatError("it takes more than a network of its size would")
        return func(*args, **(kwargs or {}))


def _torchvision_models() -> dict[str, Any]:
    from torchvision import models  # slow: only where a recipe may name one of them

    names = models.list_models(module=models)
    return {f"torchvision.models.{name}": models.get_model_builder(name) for name in names}


def recipe(value: Any) -> Any:
    """The recipe of an object, or None of one that has no recipe.

    Example:
        >>> recipe(partial(nn.Linear, 2, out_features=3))
        {'of': 'torch.nn.Linear', 'partial': {'in_features': 2, 'out_features': 3}}
        >>> recipe(nn.Dropout(0.2))
        {'of': 'torch.nn.Dropout', 'with': {'p': 0.2}}
    """
    try:
        return _recipe(value)
    except _NoRecipe:
        return None


def network_recipe(net: nn.Module) -> dict[str, Any] | None:
    """The recipe of a network, if it was seen to make the same network.

    Example:
        >>> network_recipe(nn.Sequential(nn.Flatten(), nn.Linear(2, 1)))["of"]
        'torch.nn.Sequential'
        >>> from torchvision.models import resnet18
        >>> network_recipe(resnet18(num_classes=3))
        {'of': 'torchvision.models.resnet18', 'with': {'num_classes': 3}}
    """
    if type(net).__module__.startswith("torchvision.models"):
        candidates = _torchvision_recipes(net)
    else:
        candidates = [made] if (made := recipe(net)) is not None else []
    for candidate in candidates:
        try:
            with torch.device("meta"):
                same = _anatomy(make(candidate)) == _anatomy(net)
        except Exception:  # options that do not go together: whatever the constructor raises
            continue
        if same:
            return candidate
    return None


def make(made: Any) -> Any:
    """What a recipe makes.

    Raises:
        PosteriorFormatError: It names something that is not on the list, or is no recipe.

    Example:
        >>> make({"of": "torch.nn.Linear", "with": {"in_features": 2, "out_features": 1}})
        Linear(in_features=2, out_features=1, bias=True)
        >>> make({"of": "subprocess.call", "with": {"args": "id"}})
        Traceback (most recent call last):
        lightning_bnn.errors.PosteriorFormatError: 'subprocess.call' is not on the list of what ...
    """
    if isinstance(made, _PLAIN):
        return made
    if isinstance(made, list):
        return [make(part) for part in made]
    if not isinstance(made, Mapping) or not ({"of", "entries"} & set(made)):
        raise PosteriorFormatError(f"A recipe was expected; got {made!r:.80}.")
    if "entries" in made:
        return {key: make(value) for key, value in _pairs(made["entries"])}
    name = str(made["of"])
    models = name.startswith("torchvision.models.")
    known = (_torchvision_models() if models else _KNOWN).get(name)
    if known is None:
        raise PosteriorFormatError(
            f"{name!r:.80} is not on the list of what may be made from a file: torch.nn, "
            "torchvision.models and lightning_bnn. Make it yourself and pass it."
        )
    if models and set(made.get("with", {})) != {"num_classes"}:
        raise PosteriorFormatError(
            f"A model of torchvision is made with num_classes alone; got {made!r:.80}."
        )
    given = {key: _made_parts(made[key]) for key in ("children", "partial", "with") if key in made}
    if any("device" in arguments for arguments in given.values()):  # it is tried without memory
        raise PosteriorFormatError(f"A device was not expected; got {made!r:.80}.")
    if "children" in given:
        if not all(isinstance(child, nn.Module) for child in given["children"].values()):
            raise PosteriorFormatError(f"Modules were expected; got {made['children']!r:.80}.")
        if any("." in name or not name for name in given["children"]):
            raise PosteriorFormatError(f"Names of modules were expected; got {list(given)!r:.80}.")
        return nn.Sequential(OrderedDict(given["children"]))
    if "partial" in given:
        return partial(known, **given["partial"])
    if "with" not in given:
        return known
    arguments = given["with"]
    if name.startswith("torch.nn."):  # sizes are tuples there, which JSON does not have
        arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in arguments.items()}
    try:
        return known(**arguments)
    except Exception as error:  # whatever a constructor raises on arguments that cannot be
        raise PosteriorFormatError(
            f"{name} cannot be made with {arguments!r:.200}: {error}"
        ) from error


def _made_parts(parts: Any) -> dict[str, Any]:
    if not isinstance(parts, Mapping) or not all(isinstance(key, str) for key in parts):
        raise PosteriorFormatError(f"Recipes by name were expected; got {parts!r:.80}.")
    return {key: make(part) for key, part in parts.items()}


def _pairs(entries: Any) -> list[tuple[Any, Any]]:
    pairs = entries if isinstance(entries, list) else [entries]
    if not all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], _PLAIN) for p in pairs):
        raise PosteriorFormatError(f"Pairs of a key and a recipe were expected; got {pairs!r:.80}.")
    return [(key, value) for key, value in pairs]


class _NoRecipe(Exception):
    """There is no recipe of an object."""


def _name(known: Any) -> str:
    for name, value in _KNOWN.items():
        if value is known:
            return name
    raise _NoRecipe


def _recipe(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_recipe(part) for part in value]
    if isinstance(value, Mapping):
        return {"entries": [[_recipe(key), _recipe(part)] for key, part in value.items()]}
    if isinstance(value, partial):
        try:
            bound = inspect.signature(value.func).bind_partial(*value.args, **value.keywords)
        except (TypeError, ValueError):
            raise _NoRecipe from None
        arguments = {key: _recipe(part) for key, part in bound.arguments.items()}
        return {"of": _name(value.func), "partial": arguments}
    if isinstance(value, type) or inspect.isfunction(value):
        return {"of": _name(value)}
    if isinstance(value, nn.Module):
        everywhere = list(value.named_modules(remove_duplicate=False))
        if len(everywhere) > len(list(value.modules())):
            raise _NoRecipe  # a module in two places would be made twice
        if _is_sequential(value):
            children = {name: _recipe(child) for name, child in value.named_children()}
            return {"of": "torch.nn.Sequential", "children": children}
    return {"of": _name(type(value)), "with": _arguments(value)}


def _arguments(value: Any) -> dict[str, Any]:
    """The constructor's arguments of an object, which most keep under the same names."""
    kept = getattr(value, "arguments", None)
    if kept is None and hasattr(value, "config"):
        kept = value.config()
    if isinstance(kept, Mapping):
        return {name: _recipe(part) for name, part in kept.items()}
    arguments = {}
    # LSTM and the like hand all on to their base class, after their own name
    owner = nn.RNNBase if isinstance(value, nn.RNNBase) else type(value)
    for name, parameter in inspect.signature(owner).parameters.items():
        skipped = ("device", "dtype", "args", "kwargs", *(["mode"] if owner is nn.RNNBase else []))
        if name in skipped or name.startswith("_"):
            continue
        # where it is not kept it may be the default; the comparison of networks shows it
        part = getattr(value, name, parameter.default)
        if part is parameter.empty:
            raise _NoRecipe
        if isinstance(value, nn.Module) and name == "bias" and not isinstance(part, bool):
            part = part is not None
        if type(part) is not type(parameter.default) or part != parameter.default:
            arguments[name] = _recipe(part)
    return arguments


def _torchvision_recipes(net: nn.Module) -> list[dict[str, Any]]:
    """A recipe for each of torchvision's models of the same class."""
    last = [module for module in net.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    if not last:
        return []
    head = last[-1]
    classes = head.out_features if isinstance(head, nn.Linear) else head.out_channels
    return [
        {"of": name, "with": {"num_classes": classes}}
        for name, builder in _torchvision_models().items()
        if builder.__module__ == type(net).__module__
    ]


def _anatomy(net: nn.Module) -> tuple[Sequence[Any], Sequence[Any]]:
    """All that sets networks apart but the values of their tensors.

    These are the modules, by all their names, with everything that they keep: options, functions,
    hooks. What cannot be compared is like nothing else.
    """
    modules = [
        (name, nn.Sequential if _is_sequential(module) else type(module), _kept(vars(module)))
        for name, module in net.named_modules(remove_duplicate=False)
    ]
    return modules, describe(net)


# of every module: its parts, which have entries of their own, and in which mode it is; of LSTM and
# the like: its parameters once more; and what torch.compile notes on a module
_PARTS = {
    *("_parameters", "_buffers", "_modules", "training", "_flat_weights", "_flat_weight_refs"),
    *("_compiled_call_impl", "_is_torch_compile", "_compile_kwargs"),
}


def _kept(value: Any) -> Any:
    if isinstance(value, (*_PLAIN, torch.dtype)) or callable(value):
        return value
    if isinstance(value, Mapping):
        places = (k for k in value if k not in _PARTS and not str(k).startswith("_lightning_bnn"))
        return {key: _kept(value[key]) for key in places}
    if isinstance(value, list | tuple | set | frozenset):
        return [_kept(part) for part in (sorted(value) if isinstance(value, set) else value)]
    return object()


def _is_sequential(module: nn.Module) -> bool:
    """Whether an nn.Sequential of its children does what a module does."""
    return type(module) in (nn.Sequential, nets.MLP)
