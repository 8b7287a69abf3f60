"""Sealed JSON: one object that ends with its own hash, as manifests and records are.

It is compact ASCII JSON with the keys ``format`` and ``version``, what the format adds and, last,
``sha256``: the hash of the same JSON without this key. It is checked byte for byte before anything
in it is believed. A good hash does not mean that this package wrote it, so that contents are
checked, too.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_bnn.errors import ConfigurationError, PosteriorFormatError

__all__ = ["MANIFEST", "VERSION", "encode", "json_value", "package_versions", "require", "unseal"]

MANIFEST = "manifest.json"
VERSION = 1


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
    check: Callable[[Mapping[str, Any]], None],
    newest: int = VERSION,
) -> dict[str, Any]:
    """Check a sealed JSON object: its format and version, its hash, then its contents.

    Args:
        data: What :func:`encode` gave.
        where: How to name the file in errors.
        expected: The format that it must have.
        check: Raises a ``KeyError``, ``TypeError`` or ``ValueError`` at wrong contents.
        newest: The last version that is known of this format; the first is 1.
    """
    try:
        sealed = json.loads(data)
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
        check(sealed)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PosteriorFormatError(
            f"{where} has a good hash but wrong contents ({type(error).__name__}: {error}). It was "
            f"not written by lightning-bnn; nothing was loaded."
        ) from error
    return sealed


def require(condition: object, what: str, value: object) -> None:
    """Raise a ``ValueError`` that shows the value, unless the condition holds."""
    if not condition:
        raise ValueError(f"{what}: {value!r:.200}")
