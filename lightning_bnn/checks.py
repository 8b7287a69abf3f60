"""Checks of options, with one wording for all: what was expected, what was given."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from lightning_bnn.errors import ConfigurationError

__all__ = [
    "call_function",
    "check_device",
    "check_factory",
    "check_flag",
    "check_kind",
    "check_number",
    "check_option",
    "check_path",
    "check_probability",
    "check_tensors",
    "check_whole",
    "is_whole",
    "numbers_of",
    "printable",
]


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number; True and False are none.

    Example:
        >>> is_whole(3), is_whole(3.0), is_whole(True)
        (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int) -> int:
    """The value of an option, if it is a whole number of at least ``least``.

    Example:
        >>> check_whole("every", 0.5, 1)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: every= is a whole number, at least 1; got 0.5.
    """
    if not is_whole(value) or value < least:
        raise ConfigurationError(f"{name}= is a whole number, at least {least}; got {value!r}.")
    if value >= 2**63:
        raise ConfigurationError(f"{name}= is a whole number below 2**63; got {value!r}.")
    return int(value)


def check_number(name: str, value: Any, *, positive: bool = True) -> float:
    """The value of an option, if it is a finite number greater than 0 (or at least 0).

    Example:
        >>> check_number("lr", "0.1")
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: lr= is a number greater than 0; got '0.1'.
    """
    real = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not real or value < 0 or (positive and value == 0):
        bound = "greater than 0" if positive else "of at least 0"
        raise ConfigurationError(f"{name}= is a number {bound}; got {value!r}.")
    return float(value)


def numbers_of(values: Any) -> list[float]:
    """The numbers of a list, an array or a tensor of one axis; none if it is anything else.

    Example:
        >>> numbers_of((1, 0.5)), numbers_of([1, None]), numbers_of("12")
        ([1.0, 0.5], [], [])
    """
    if isinstance(values, (str, bytes, Mapping)):
        return []
    try:
        return [float(one) for one in values]
    except (TypeError, ValueError, RuntimeError, LookupError):
        return []


def check_probability(name: str, value: Any) -> float:
    """The value of an option, if it is a number strictly between 0 and 1.

    Example:
        >>> check_probability("level", 90)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: level= is a number between 0 and 1; got 90.
    """
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not 0 < value < 1:
        raise ConfigurationError(f"{name}= is a number between 0 and 1; got {value!r}.")
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    """The value of an option, if it is True or False, or 1 or 0.

    Example:
        >>> check_flag("learn", "no")
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: learn= is True or False; got 'no'.
    """
    if not isinstance(value, bool | np.bool_) and not (is_whole(value) and value in (0, 1)):
        raise ConfigurationError(f"{name}= is True or False; got {value!r:.80}.")
    return bool(value)


def check_path(name: str, value: Any) -> str:
    """The value of an option, if it is a path or a text, as a text.

    Example:
        >>> check_path("directory", 3)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: directory= is a path or a URL; got 3.
    """
    if not isinstance(value, str | os.PathLike):
        raise ConfigurationError(f"{name}= is a path or a URL; got {value!r:.80}.")
    return str(os.fspath(value))


def check_device(value: Any) -> torch.device:
    """A device, if this machine has it.

    Example:
        >>> check_device("gpu")
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: device= is one of this machine, such as 'cpu'; ...
    """
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as error:
        raise ConfigurationError(
            f"device= is one of this machine, such as 'cpu'; got {value!r:.80}."
        ) from error
    return device


def check_kind(name: str, value: Any, kind: type, what: str) -> None:
    """Raise unless the value of an option is of a kind.

    Example:
        >>> check_kind("family", 3, dict, "a mapping, such as {}")
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: family= is a mapping, such as {}; got int.
    """
    if not isinstance(value, kind):
        raise ConfigurationError(f"{name}= is {what}; got {type(value).__name__}.")


def check_tensors(name: str, value: Any) -> None:
    """Raise unless a value is a mapping of names to tensors.

    Example:
        >>> check_tensors("mean", {"weight": 3.0})
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: mean is a mapping of names to tensors; got ...
    """
    if not isinstance(value, Mapping) or not all(
        isinstance(v, torch.Tensor) for v in value.values()
    ):
        raise ConfigurationError(f"{name} is a mapping of names to tensors; got {value!r:.80}.")


def check_option(name: str, value: Any, options: Sequence[str]) -> None:
    """Raise unless the value of an option is one of the given words.

    Example:
        >>> check_option("mode", "fast", ["auto", "loop"])
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: mode= is 'auto' or 'loop'; got 'fast'.
    """
    if not isinstance(value, str) or value not in options:
        *most, last = map(repr, options)
        raise ConfigurationError(f"{name}= is {', '.join(most)} or {last}; got {value!r}.")


_FACTORIES = {
    "optimizer": "partial(Adam, lr=1e-3)",
    "scheduler": "partial(StepLR, step_size=10)",
    "sampler": "partial(SGLD, lr=1e-3)",
}


def check_factory(name: str, value: Any, where: str = "") -> None:
    """Raise unless an option is a function that makes what it is called.

    Example:
        >>> check_factory("optimizer", 0.1)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: optimizer= is a function that makes the ...
    """
    if not callable(value):
        made = _FACTORIES[name]
        raise ConfigurationError(
            f"{name}= is a function that makes the {name}, as {made} does, and not the {name} "
            f"itself: each fit makes its own; got {value!r:.80}{where}."
        )


def call_function(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function that was passed as an option gives, if it takes these arguments.

    Example:
        >>> call_function("net", torch.nn.Linear)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: net= cannot be called with 0 arguments: ...
    """
    try:
        return function(*arguments)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # from within the function
        raise ConfigurationError(
            f"{name}= cannot be called with {len(arguments)} arguments: {error}."
        ) from error


def printable(text: str) -> str:
    r"""One line of text for a terminal, of whoever wrote it: what is no letter or sign is escaped.

    Example:
        >>> print(printable("node\x1b[2J-7\n"))
        node\x1b[2J-7\n
    """
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )
