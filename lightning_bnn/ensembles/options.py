"""Checks of options: whole numbers, and functions that make something for each member."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from torch import nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.random import isolated_random_state, member_seed

__all__ = ["build_network", "check_factories", "check_whole", "is_whole"]

_EXAMPLES = {"optimizer": "partial(Adam, lr=1e-3)", "scheduler": "partial(StepLR, step_size=10)"}


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; True and False are none.

    Example:
        >>> is_whole(3), is_whole(3.0), is_whole(True)
        (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise unless an option is a whole number, at least ``least``.

    Example:
        >>> check_whole("chunk", 2, least=1)
    """
    if not is_whole(value) or value < least:
        raise ConfigurationError(f"{name}= is a whole number, at least {least}; got {value!r}.")


def check_factories(name: str, value: Any, members: int) -> None:
    """Raise unless an option is None, a function for all members, or a list of one for each.

    Args:
        name: ``"optimizer"`` or ``"scheduler"``.
        value: What was given.
        members: M.

    Example:
        >>> check_factories("scheduler", None, members=3)
    """
    if value is None:
        return
    several = list(value) if isinstance(value, Sequence) else [value]
    if isinstance(value, Sequence) and len(several) != members:
        raise ConfigurationError(
            f"{name}= has {len(several)} entries for {members} members; give one for each, or one "
            "for all."
        )
    odd = next((place for place, one in enumerate(several) if not callable(one)), None)
    if odd is not None:
        where = f" in place {odd} of the list" if isinstance(value, Sequence) else ""
        raise ConfigurationError(
            f"{name}= makes the {name}, as {_EXAMPLES[name]} does; got {several[odd]!r:.80}{where}."
        )


def build_network(factory: Any, root: int, number: int) -> nn.Module:
    """The network of one member, as a function builds it under the member's seed.

    Example:
        >>> build_network(lambda: nn.Linear(2, 1), root=0, number=3)
        Linear(in_features=2, out_features=1, bias=True)
    """
    if not callable(factory):
        raise ConfigurationError(
            "net= is a network, or a function that builds one, such as lambda: MyNet(...); got "
            f"{factory!r:.80}."
        )
    with isolated_random_state(member_seed(root, number, "start")):
        made = factory()
    if not isinstance(made, nn.Module):
        raise ConfigurationError(
            f"net= gave {type(made).__name__} for member {number}; expected a network. Pass a "
            "function that builds one, such as lambda: MyNet(...)."
        )
    return made
