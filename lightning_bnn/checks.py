"""Checks of options, with one wording for all: what was expected, what was given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from lightning_bnn.errors import ConfigurationError

__all__ = ["check_factory", "check_number", "check_option", "check_whole", "is_whole", "printable"]


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


def check_option(name: str, value: Any, options: Sequence[str]) -> None:
    """Raise unless the value of an option is one of the given words.

    Example:
        >>> check_option("mode", "fast", ["auto", "loop"])
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: mode= is 'auto' or 'loop'; got 'fast'.
    """
    if value not in options:
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


def printable(text: str) -> str:
    r"""One line of text for a terminal, of whoever wrote it: what is no letter or sign is escaped.

    Example:
        >>> print(printable("node\x1b[2J-7\n"))
        node\x1b[2J-7\n
    """
    return "".join(
        sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text
    )
