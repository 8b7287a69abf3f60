"""How a member is made: functions travel to the workers, live objects do not.

A *recipe* builds the strategy, the data and the options of the trainer inside the process that
trains. A factory may take ``members`` (the numbers to train), ``seed`` (the root of all seeds) and
``folder`` (where this attempt may write), each by its name; it is given those that it takes and
that are not bound by ``functools.partial``. What makes the data is given only what has no default:
the seed of a split must not change with that of the members.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import pl
from lightning_bnn.strategies.base import Strategy

__all__ = ["Factories", "Parts", "Recipe", "factory_name"]

GIVEN = ("members", "seed", "folder")


@dataclass
class Parts:
    """What a recipe makes.

    Attributes:
        strategy: The strategy that trains the members.
        data: A data module, or what else ``Trainer.fit`` takes as training data.
        trainer: Options of the trainer.
        shared: Whether the loggers and callbacks in them are the same for all members, so that what
            they write has to be kept apart.
    """

    strategy: Strategy
    data: Any
    trainer: dict[str, Any]
    shared: bool = True

    def training_data(self) -> Any:
        """The training loader, outside of a fit."""
        if not isinstance(self.data, pl.LightningDataModule):
            return self.data
        self.data.prepare_data()
        self.data.setup("fit")
        return self.data.train_dataloader()


class Recipe(Protocol):
    """Builds the parts of a unit; has to be picklable."""

    def build(self, members: Sequence[int], seed: int, folder: str) -> Parts:
        """Make all parts anew, with the global generators as they are."""

    def build_strategy(self, members: Sequence[int], seed: int) -> Strategy:
        """Make the strategy alone, where there may be no data."""

    def description(self) -> dict[str, Any]:
        """What tells this recipe from another, as JSON."""

    def trainer_options(self) -> Mapping[str, Any]:
        """Options of the trainer that are known before; none if a function gives them."""


@dataclass(frozen=True)
class Factories:
    """A recipe of functions.

    Args:
        make_bnn: Makes the strategy.
        make_datamodule: Makes a data module or a training loader.
        trainer: Options of ``Trainer``, or a function that gives them.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn import DeepEnsemble
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> def make_bnn(members, seed):
        ...     return DeepEnsemble(lambda: nn.Linear(2, 1), Gaussian(0.1), members=members,
        ...                         seed=seed)
        >>> parts = Factories(make_bnn, list, {"max_epochs": 3}).build([4], seed=0, folder="")
        >>> len(parts.strategy.member_posteriors()), parts.trainer
        (1, {'max_epochs': 3})
    """

    make_bnn: Callable[..., Any]
    make_datamodule: Callable[..., Any]
    trainer: Mapping[str, Any] | Callable[..., Mapping[str, Any]]

    def __post_init__(self) -> None:
        for name, factory in vars(self).items():
            if name == "trainer" and isinstance(factory, Mapping):
                continue
            if not callable(factory) or isinstance(factory, Strategy):
                raise ConfigurationError(
                    f"{name}= is a function that makes it{' or a mapping' * (name == 'trainer')}, "
                    f"as live objects do not travel to the workers; got {type(factory).__name__}."
                )
            _check_signature(name, factory)

    @property
    def takes_members(self) -> bool:
        """Whether the strategy is told which members to train."""
        return "members" in inspect.signature(self.make_bnn).parameters

    def build(self, members: Sequence[int], seed: int, folder: str) -> Parts:
        """Make all parts anew, with the global generators as they are."""
        strategy = self.build_strategy(members, seed, folder)
        given = {"members": list(members), "seed": seed, "folder": folder}
        data = _call(self.make_datamodule, given, only_needed=True)
        if not callable(self.trainer):
            return Parts(strategy, data, dict(self.trainer))
        return Parts(strategy, data, dict(_call(self.trainer, given)), shared=False)

    def build_strategy(self, members: Sequence[int], seed: int, folder: str = "") -> Strategy:
        """Make the strategy alone, where there may be no data."""
        strategy = _call(self.make_bnn, {"members": list(members), "seed": seed, "folder": folder})
        if not isinstance(strategy, Strategy):
            raise ConfigurationError(
                f"{factory_name(self.make_bnn)} returns a {type(strategy).__name__}; a launch "
                "needs a strategy, such as DeepEnsemble, SGMCMC or VariationalBNN."
            )
        return strategy

    def description(self) -> dict[str, Any]:
        """The names of the functions, with what is bound to them."""
        return {"bnn": _described(self.make_bnn), "data": _described(self.make_datamodule)}

    def trainer_options(self) -> Mapping[str, Any]:
        """The options, unless a function gives them."""
        return {} if callable(self.trainer) else self.trainer


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except ValueError:  # a builtin
        return {}


def _check_signature(name: str, factory: Callable[..., Any]) -> None:
    for parameter in _parameters(factory).values():
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        needed = parameter.default is parameter.empty and not several
        if needed and parameter.name not in GIVEN:
            raise ConfigurationError(
                f"{name}={factory_name(factory)} needs {parameter.name!r}; a factory is called "
                f"with those of {', '.join(GIVEN)} that it takes by name. Give it a default, or "
                "bind it with functools.partial."
            )


def _call(factory: Callable[..., Any], given: Mapping[str, Any], only_needed: bool = False) -> Any:
    bound = factory.keywords if isinstance(factory, partial) else {}
    taken = {
        name: given[name]
        for name, parameter in _parameters(factory).items()
        if name in GIVEN and name not in bound
        if not (only_needed and parameter.default is not parameter.empty)
    }
    return factory(**taken)


def _described(factory: Callable[..., Any]) -> str:
    """The name of a function, and of a partial the plain values that are bound to it."""
    if not isinstance(factory, partial):
        return factory_name(factory)
    plain = (bool, int, float, str, type(None), Path)
    bound = [("", value) for value in factory.args]
    bound += [(f"{key}=", value) for key, value in sorted(factory.keywords.items())]
    values = [f"{key}{value!r}" for key, value in bound if isinstance(value, plain)]
    return factory_name(factory) + (f"({', '.join(values)})" if values else "")


def factory_name(factory: Any) -> str:
    """Module and name of a function; of a partial, those of the function in it.

    Example:
        >>> from functools import partial
        >>> factory_name(partial(sorted, reverse=True))
        'builtins.sorted'
    """
    inner = getattr(factory, "func", factory)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{getattr(inner, '__module__', type(inner).__module__)}.{name}"
