"""Sealed JSON: one object that ends with its own hash, as manifests and records are.

It is compact ASCII JSON with the keys ``format`` and ``version``, what the format adds and, last,
``sha256``: the hash of the same JSON without this key. It is checked byte for byte before anything
in it is believed. A good hash does not mean that this package wrote it, so that contents are
checked, too, against a *form* (see :func:`check_form`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import re
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, get_args

import torch

from lightning_bnn.errors import ConfigurationError, PosteriorFormatError

__all__ = [
    "LIMIT", "MANIFEST", "SHAPE", "VERSION", "Form", "check_form", "checked", "encode",
    "json_value", "package_versions", "unseal",
]  # fmt: skip

MANIFEST = "manifest.json"
VERSION = 1
LIMIT = 2**26  # bytes of a sealed object: no more are read of a file that says to be one
_DEPTH = 200  # of objects and lists inside of each other
SHAPE: Literal["shape"] = "shape"
_MOST_AXES = 64

Form = Any


def check_form(value: Any, form: Form, where: str = "") -> None:
    """Raise a ``ValueError`` unless a value that was read from JSON has a form.

    Args:
        value: The value.
        form: ``str``, ``bool``, ``dict`` or ``list``; ``int``, a whole number from 0 on; ``float``,
            any finite number; ``object``, anything; ``float | None``, such a number or none;
            ``SHAPE``, that of a tensor which there can be; a pattern of a string; a set of possible
            values; ``[form]``, a list of such values; ``(form, form)``, a list of just these;
            ``{"key": form}``, an object, in which ``"key?"`` may be missing and ``"*"`` stands for
            all keys, and further keys do not matter.
        where: Of what it is a part.

    Example:
        >>> check_form({"name": "w", "shape": [2, -1]}, {"name": str, "shape": [int], "note?": str})
        Traceback (most recent call last):
        ValueError: shape[1] is expected to be a whole number from 0 on; got -1
    """
    if found := _misfit(value, form):
        path, expected, given = found
        place = f"{where}{path}".removeprefix(".") or "it"
        raise ValueError(f"{place} {expected}; got {given!r:.200}")


def _misfit(value: Any, form: Form) -> tuple[str, str, Any] | None:
    """The first part that has not its form: the way to it, what was expected, and what is there.

    There may be many parts: words are made where they are needed only.
    """
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return "", "is expected to be an object", value
        for key, part in form.items():
            name = key.removesuffix("?")
            if key == "*":
                for each, held in value.items():
                    if found := _misfit(held, part):
                        return f"[{each!r:.80}]{found[0]}", *found[1:]
            elif name in value:
                if found := _misfit(value[name], part):
                    return f".{name}{found[0]}", *found[1:]
            elif not key.endswith("?"):
                return "", f"has no {name!r}", sorted(value)
    elif isinstance(form, (list, tuple)):
        if not isinstance(value, list):
            return "", "is expected to be a list", value
        if isinstance(form, tuple) and len(form) != len(value):
            return "", f"is expected to have {len(form)} parts", value
        for index, held in enumerate(value):
            if found := _misfit(held, form[index] if isinstance(form, tuple) else form[0]):
                return f"[{index}]{found[0]}", *found[1:]
    elif isinstance(form, UnionType):
        return None if value is None else _misfit(value, get_args(form)[0])
    elif isinstance(form, re.Pattern):
        if not (isinstance(value, str) and form.fullmatch(value)):
            return "", f"is expected to be a text like {form.pattern}", value
    elif isinstance(form, (set, frozenset)):
        if type(value) not in (str, int) or value not in form:
            return "", f"is expected to be one of {sorted(form)}", value
    elif form is SHAPE:
        if not _is_shape(value):
            return "", "is expected to be the shape of a tensor", value
    elif form is int:
        if type(value) is not int or not 0 <= value < 2**63:
            return "", "is expected to be a whole number from 0 on", value
    elif form is float:
        if type(value) not in (int, float) or not abs(value) < 2**1023:  # no NaN either
            return "", "is expected to be a finite number", value
    elif not isinstance(value, form):
        return "", f"is expected to be {form.__name__}", value
    return None


def _is_shape(value: Any) -> bool:
    """Whether it is a list of whole numbers whose product is one that memory can be asked for."""
    if not isinstance(value, list) or len(value) > _MOST_AXES:  # the product is never a long one
        return False
    return all(type(n) is int and 0 <= n < 2**63 for n in value) and math.prod(value) < 2**63


def checked(value: Any, form: Form, where: str, part: str) -> Any:
    """The value, if it has a form.

    Args:
        value: Read from JSON whose hash is good.
        form: As for :func:`check_form`.
        where: How to name the file in errors.
        part: Of what in it it is the value.

    Raises:
        PosteriorFormatError: It has not.
    """
    try:
        check_form(value, form, part)
    except ValueError as error:
        raise _forged(where, error) from error
    return value


def _forged(where: str, error: Exception) -> PosteriorFormatError:
    return PosteriorFormatError(
        f"{where} has a good hash but wrong contents ({error}). It was not written by "
        "lightning-bnn; nothing was loaded."
    )


def package_versions() -> dict[str, str]:
    """The versions to note as the writer's."""
    try:
        version = importlib.metadata.version("lightning-bnn")
    except importlib.metadata.PackageNotFoundError:  # run from a copied source tree
        version = "unknown"
    return {"lightning_bnn": version, "torch": str(torch.__version__)}


def json_value(value: Any, where: str) -> Any:
    """The value as it comes back from JSON, tuples as lists.

    Raises:
        ConfigurationError: JSON cannot hold it.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{where} cannot be kept as JSON: {error}. Pass plain finite numbers, strings, None, "
            f"lists and dicts; got {value!r:.200}."
        ) from error


def encode(body: Mapping[str, Any]) -> bytes:
    """Give the one byte string that a sealed object with these contents is, its hash at the end."""
    compact = json.dumps(body, separators=(",", ":"))
    digest = hashlib.sha256(compact.encode("ascii")).hexdigest()
    return f'{compact[:-1]},"sha256":"{digest}"}}'.encode("ascii")


def unseal(
    data: bytes,
    where: str,
    expected: str,
    form: Form,
    newest: int = VERSION,
) -> dict[str, Any]:
    """Check a sealed JSON object: its format and version, its hash, then its contents.

    Args:
        data: What :func:`encode` gave; of a file, at most its first ``LIMIT + 1`` bytes.
        where: How to name the file in errors.
        expected: The format that it must have.
        form: What it must hold, as for :func:`check_form`.
        newest: The last version that is known of this format; the first is 1.
    """
    if len(data) > LIMIT:
        raise PosteriorFormatError(f"{where} has more than {LIMIT:,} bytes. It was not read.")
    try:
        sealed = json.loads(data)
        if _is_deeper(sealed, _DEPTH):
            raise ValueError(f"it is more than {_DEPTH} levels deep")
    except (ValueError, RecursionError) as error:
        raise PosteriorFormatError(
            f"{where} is not JSON ({error}); it has {len(data)} bytes and may be truncated. "
            f"Restore it from a copy."
        ) from error
    if not isinstance(sealed, dict) or sealed.get("format") != expected:
        given = sealed.get("format") if isinstance(sealed, dict) else sealed
        raise PosteriorFormatError(
            f"{where} is not of a posterior: expected the format {expected!r}, found {given!r:.80}."
        )
    version = sealed.get("version")
    if version not in range(VERSION, newest + 1):
        raise PosteriorFormatError(
            f"{where} has format version {version!r:.80}; this package reads up to version "
            f"{newest}. Update lightning-bnn."
        )
    body = {key: value for key, value in sealed.items() if key != "sha256"}
    # Bytes, not values: 1e5 and 1E5 are the same number, but only one of them was written.
    if encode(body) != data:
        raise PosteriorFormatError(
            f"{where} was altered: its sha256 is not that of its contents. Restore it from a copy."
        )
    try:
        check_form(sealed, form)
    except ValueError as error:
        raise _forged(where, error) from error
    return sealed


def _is_deeper(value: Any, levels: int) -> bool:
    held = [value]
    for _ in range(levels):
        held = [
            part
            for one in held
            if isinstance(one, (dict, list))
            for part in (one.values() if isinstance(one, dict) else one)
        ]
        if not held:
            return False
    return True
