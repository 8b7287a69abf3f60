"""The manifest of a stored posterior: one JSON object that ends with its own hash (is *sealed*).

It is compact ASCII JSON with the keys ``format``, ``version``, ``kind``, ``fields``,
``written_by`` (package versions), ``blobs`` (``name``, ``file``, ``bytes``, ``sha256`` and the
``dtype`` and ``shape`` of every tensor) and, last, ``sha256``: the hash of the same JSON without
this key. A blob with tensors in sparse storage (see :mod:`lightning_bnn.storage.sparse`) has the
key ``sparse`` too, with the number of values of each of them; a manifest with such a blob has
version 2, every other has version 1. A manifest is checked byte for byte before anything in it is
believed, and then field by field, because a good hash does not mean that this package wrote it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_bnn.errors import ConfigurationError, PosteriorFormatError

__all__ = [
    "BLOB_FILE",
    "BLOB_NAME",
    "DTYPES",
    "FORMAT",
    "MANIFEST",
    "SPARSE_VERSION",
    "VERSION",
    "check_blob",
    "decode",
    "dtype_name",
    "encode",
    "json_value",
    "package_versions",
    "require",
    "unseal",
]

FORMAT = "lightning_bnn.posterior"
VERSION = 1
SPARSE_VERSION = 2
MANIFEST = "manifest.json"
BLOB_NAME = re.compile(r"[A-Za-z0-9_.-]+")
BLOB_FILE = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{16}\.safetensors")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as :data:`DTYPES` has it."""
    return str(dtype).removeprefix("torch.")


def package_versions() -> dict[str, str]:
    """The versions to note as the writer's."""
    try:
        version = importlib.metadata.version("lightning-bnn")
    except importlib.metadata.PackageNotFoundError:  # run from a copied source tree
        version = "unknown"
    return {"lightning_bnn": version, "torch": str(torch.__version__)}


def json_value(value: Any, where: str) -> Any:
    """Copy a JSON value, refusing what JSON would drop, change or not hold, by its place."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, (list, tuple)):
        return [json_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigurationError(f"{where} has the key {key!r}; JSON keys are strings.")
        return {key: json_value(item, f"{where}[{key!r}]") for key, item in value.items()}
    what = value if isinstance(value, float) else f"a {type(value).__name__}"
    raise ConfigurationError(
        f"{where} is {what}, which JSON cannot hold. Pass plain finite numbers, strings, None, "
        "lists and dicts, and tensors as blobs."
    )


def encode(body: Mapping[str, Any]) -> bytes:
    """Give the one byte string that a manifest with these contents is, its hash at the end."""
    compact = json.dumps(body, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(compact.encode("ascii")).hexdigest()
    return f'{compact[:-1]},"sha256":"{digest}"}}'.encode("ascii")


def decode(data: bytes, where: str) -> dict[str, Any]:
    """Check a manifest, from "is it ours" to its last field."""
    where = f"{where}: {MANIFEST}"
    return unseal(data, where, FORMAT, _check_contents, newest=SPARSE_VERSION)


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
    if type(version) is not int or not VERSION <= version <= newest:
        newer = type(version) is int and version > newest
        known = " and ".join(map(str, range(VERSION, newest + 1)))
        raise PosteriorFormatError(
            f"{where} has format version {version!r:.80}; this package reads version {known}. "
            + ("Update lightning-bnn." if newer else "It was not written by lightning-bnn.")
        )
    body = {key: value for key, value in sealed.items() if key != "sha256"}
    try:
        # Bytes, not values: 1e5 and 1E5 are the same number, but only one of them was written.
        intact = encode(body) == data
    except ValueError:  # NaN, which was never written
        intact = False
    if not intact:
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


def check_blob(entry: Mapping[str, Any]) -> None:
    """Raise unless a blob's file is a plain name, with a size, a hash and known tensors."""
    file, sha256 = entry["file"], entry["sha256"]
    require(BLOB_FILE.fullmatch(file), "not a plain blob file name", file)
    require(re.fullmatch("[0-9a-f]{64}", sha256), "bad sha256", sha256)
    require(type(entry["bytes"]) is int, "bytes is not a number", entry["bytes"])
    for key, tensor in entry["tensors"].items():
        require(tensor["dtype"] in DTYPES, f"dtype of {key!r} unknown", tensor["dtype"])
        shape_is_good = all(type(size) is int and 0 <= size < 2**63 for size in tensor["shape"])
        require(shape_is_good, f"bad shape of {key!r}", tensor["shape"])
    if "sparse" in entry:
        require(entry["sparse"], "sparse is empty", entry["sparse"])
        for key, count in entry["sparse"].items():
            dtype = DTYPES[entry["tensors"][key]["dtype"]]
            require(dtype.is_floating_point, f"{key!r} cannot be sparse", dtype)
            require(type(count) is int, f"bad number of values of {key!r}", count)


def _check_contents(manifest: Mapping[str, Any]) -> None:
    """Raise unless the manifest has every field, each of its type, and no path that leads away."""
    require(isinstance(manifest["kind"], str), "kind is not a string", manifest["kind"])
    for key in ("fields", "written_by"):
        require(isinstance(manifest[key], dict), f"{key} is not an object", manifest[key])
    require(isinstance(manifest["blobs"], list), "blobs is not a list", manifest["blobs"])
    names = [entry["name"] for entry in manifest["blobs"]]
    require(len(set(names)) == len(names), "a blob name twice", names)
    for entry in manifest["blobs"]:
        require(BLOB_NAME.fullmatch(entry["name"]), "bad blob name", entry["name"])
        check_blob(entry)
    sparse = [entry["name"] for entry in manifest["blobs"] if "sparse" in entry]
    expected = SPARSE_VERSION if sparse else VERSION
    require(manifest["version"] == expected, f"of another version, sparse: {sparse}", expected)
