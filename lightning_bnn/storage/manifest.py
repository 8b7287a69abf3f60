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
from typing import Any

import torch

from lightning_bnn.errors import ConfigurationError, PosteriorFormatError

__all__ = [
    "LIMIT", "MANIFEST", "VERSION", "Form", "check_form", "checked", "encode", "json_value",
    "package_versions", "unseal",
]  # fmt: skip

MANIFEST = "manifest.json"
VERSION = 1
LIMIT = 2**26  # bytes of a sealed object: no more are read of a file that says to be one
_DEPTH = 200  # of objects and lists inside of each other

Form = Any


def check_form(value: Any, form: Form, where: str = "") -> None:
    """Raise a ``ValueError`` unless a value that was read from JSON has a form.

    Args:
        value: The value.
        form: ``str``, ``bool``, ``dict`` or ``list``; ``int``, a whole number from 0 on; ``float``,
            any finite number; ``object``, anything; a pattern of a string; a set of possible
            values; ``[form]``, a list of such values; ``(form, form)``, a list of just these;
            ``{"key": form}``, an object, in which ``"key?"`` may be missing and ``"*"`` stands for
            all keys, and further keys do not matter.
        where: Of what it is a part.

    Example:
        >>> check_form({"name": "w", "shape": [2, -1]}, {"name": str, "shape": [int], "note?": str})
        Traceback (most recent call last):
        ValueError: shape[1] is expected to be a whole number from 0 on; got -1
    """
    where = where or "it"
    if isinstance(form, dict):
        _require(isinstance(value, dict), f"{where} is expected to be an object", value)
        for key, part in form.items():
            name = key.removesuffix("?")
            if key == "*":
                for each, held in value.items():
                    check_form(held, part, f"{where}[{each!r:.80}]")
            elif name in value:
                check_form(value[name], part, f"{where}.{name}".removeprefix("it."))
            else:
                _require(key.endswith("?"), f"{where} has no {name!r}", sorted(value))
    elif isinstance(form, (list, tuple)):
        _require(isinstance(value, list), f"{where} is expected to be a list", value)
        parts = form if isinstance(form, tuple) else form * len(value)
        _require(len(parts) == len(value), f"{where} is expected to have {len(parts)} parts", value)
        for index, (held, part) in enumerate(zip(value, parts, strict=True)):
            check_form(held, part, f"{where}[{index}]")
    elif isinstance(form, re.Pattern):
        fits = isinstance(value, str) and form.fullmatch(value) is not None
        _require(fits, f"{where} is expected to be a text like {form.pattern}", value)
    elif isinstance(form, (set, frozenset)):
        fits = type(value) in (str, int) and value in form
        _require(fits, f"{where} is expected to be one of {sorted(form)}", value)
    elif form is int:
        fits = type(value) is int and 0 <= value < 2**63
        _require(fits, f"{where} is expected to be a whole number from 0 on", value)
    elif form is float:
        number = type(value) in (int, float) and abs(value) < 2**1023 and math.isfinite(value)
        _require(number, f"{where} is expected to be a finite number", value)
    else:
        _require(isinstance(value, form), f"{where} is expected to be {form.__name__}", value)


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
        _require(not _is_deeper(sealed, _DEPTH), f"it is more than {_DEPTH} levels deep", sealed)
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
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


def _require(condition: object, what: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{what}; got {value!r:.200}")
