"""The on-disk format of posteriors: named sets of tensors and one JSON manifest.

Layout of a stored posterior::

    <directory>/manifest.json
    <directory>/blobs/<name>-<first 16 hex digits of the sha256>.safetensors

A *blob* is a named set of tensors that is read as a whole: one draw, or the mean of a Gaussian.
The manifest is a sealed JSON object (see :mod:`lightning_bnn.storage.manifest`) with the keys
``kind``, ``fields``, ``written_by`` (package versions) and ``blobs`` (``name``, ``file``,
``bytes``, ``sha256`` and the ``dtype`` and ``shape`` of every tensor). Every byte of every file is
therefore covered by a hash.

A blob is a safetensors file. It is made as a list of pieces, of which the tensors' are views of
their own memory, so that a large draw is never held twice: safetensors' own writer makes two
copies, takes twice as long, and refuses weights that share memory. Files are read by safetensors.

A tensor with many zeros, as pruning leaves them, lies in its file as two: its values and its gaps
(see :mod:`lightning_bnn.storage.sparse`), under names that begin with a dot. Its blob then has the
key ``sparse`` too, with the number of values of each such tensor; a manifest with such a blob has
version 2, every other has version 1.

A crash at any moment leaves the old contents or the new. Blobs are named by their contents, so a
new blob never takes the place of a different old one, and the manifest comes last:

1. each blob is written under a temporary name, flushed to the disk (``fsync``) and renamed;
2. the manifest likewise: its rename is the moment at which the new posterior replaces the old;
3. only then the files that the new manifest does not name are removed.

On remote storage (any fsspec URL) there are no temporaries: objects are put one by one, manifest
last, which is as safe where a PUT is atomic, as in object stores. Local writers wait for each
other; for remote storage, let one process write at a time.

Nothing here unpickles: tensors come from safetensors, and anything else is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.storage import sparse
from lightning_bnn.storage.files import TEMPORARY, Files, Piece, open_directory
from lightning_bnn.storage.manifest import (
    LIMIT,
    MANIFEST,
    SHAPE,
    VERSION,
    encode,
    json_value,
    package_versions,
    unseal,
)

__all__ = [
    "BLOB",
    "TENSORS",
    "Stored",
    "describe_tensors",
    "pieces_of",
    "read",
    "read_blob",
    "remove_unnamed",
    "sha256_of",
    "write",
]

FORMAT = "lightning_bnn.posterior"
SPARSE_VERSION = 2
BLOB_NAME = re.compile(r"[A-Za-z0-9_.-]+")
BLOB_FILE = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{16}\.safetensors")
# the dtypes that can be stored, and what safetensors calls them
CODES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"},
}
# the forms of what manifests and records say
BLOB = {"file": BLOB_FILE, "bytes": int, "sha256": re.compile("[0-9a-f]{64}")}
TENSORS = {"*": {"dtype": set(CODES), "shape": SHAPE}}
_MANIFEST = {
    "kind": str,
    "fields": dict,
    "blobs": [{**BLOB, "name": BLOB_NAME, "tensors": TENSORS, "sparse?": {"*": int}}],
}


# ---------------------------------------------------------------- blobs


def pieces_of(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """The pieces of the file that holds these tensors; joined they are the whole of it.

    Example:
        >>> pieces = pieces_of({"w": torch.ones(2)})
        >>> safetensors.torch.load(b"".join(pieces))
        {'w': tensor([1., 1.])}
    """
    header: dict[str, Any] = {}
    pieces: list[Piece] = []
    end = 0
    # the widest numbers first: then every tensor starts at a multiple of its own width
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        flat = _flat_on_cpu(name, tensor)
        start, end = end, end + flat.nbytes
        code = CODES[_dtype_name(tensor)]
        header[name] = {"dtype": code, "shape": [*tensor.shape], "data_offsets": [start, end]}
        if end > start:
            pieces.append(flat.view(torch.uint8).numpy().data)
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *pieces]


def sha256_of(pieces: Iterable[Piece]) -> str:
    """The hash of a file that consists of these pieces.

    Example:
        >>> sha256_of([b"ab", b"c"]) == hashlib.sha256(b"abc").hexdigest()
        True
    """
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The dtype and the shape of every tensor, as a manifest has them.

    Example:
        >>> describe_tensors({"w": torch.ones(2)})
        {'w': {'dtype': 'float32', 'shape': [2]}}
    """
    return {
        name: {"dtype": _dtype_name(tensor), "shape": list(tensor.shape)}
        for name, tensor in tensors.items()
    }


def read_blob(files: Files, entry: Mapping[str, Any], stamp: Any = None) -> dict[str, Tensor]:
    """Read one blob: check the hash of its bytes, then every dtype and shape.

    Args:
        files: Where it lies.
        entry: Its ``file``, ``bytes``, ``sha256``, ``tensors`` and, where some are sparse,
            ``sparse``, as a manifest has them.
        stamp: That of the file before its hash was found good. If it is the same after this
            reading, the hash is not computed again.

    Raises:
        PosteriorFormatError: It is missing or damaged.
    """
    where, size = f"{files}: blobs/{entry['file']}", entry["bytes"]
    # The very bytes that were hashed are decoded: no second look at a file that may change.
    data = files.get(f"blobs/{entry['file']}", limit=size + 1)
    if data is None:
        raise PosteriorFormatError(
            f"{where} is missing. If the posterior was written over since it was opened, open it "
            f"again with Posterior.load; otherwise restore the file from a copy."
        )
    known = stamp is not None and files.stamp(f"blobs/{entry['file']}") == stamp
    if len(data) != size or not (known or sha256_of([data]) == entry["sha256"]):
        given = f"more than {size}" if len(data) > size else f"{len(data)} of another"
        raise PosteriorFormatError(
            f"{where} is damaged: expected {size} bytes of sha256 {entry['sha256']}, found "
            f"{given}. Restore it from a copy."
        )
    try:
        tensors = safetensors.torch.load(data)
        for name in entry.get("sparse", {}):
            values, gaps = (tensors.pop(stored) for stored in _sparse_names(name))
            tensors[name] = sparse.decode(values, gaps, entry["tensors"][name]["shape"])
    except Exception as error:  # the decoder has no one class of errors
        raise PosteriorFormatError(f"{where} was not written by this package: {error}") from error
    promised, held = entry["tensors"], describe_tensors(tensors)
    if promised != held:
        raise PosteriorFormatError(
            f"{where}: the manifest promises the tensors {promised}, the file has {held}. The "
            "posterior was put together from different ones."
        )
    return {name: tensors[name] for name in promised}


def _flat_on_cpu(name: str, tensor: Tensor) -> Tensor:
    """The form in which a tensor's bytes can be written."""
    if _dtype_name(tensor) not in CODES:
        raise ConfigurationError(
            f"Tensor {name!r} is {tensor.dtype}; the dtypes that can be stored are "
            f"{', '.join(CODES)}. Convert it first."
        )
    dense = tensor.detach().cpu().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,))  # a single number may have another stride


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _sparse_names(name: str) -> tuple[str, str]:
    """Under which names the values and the gaps of a sparse tensor lie in a file."""
    return f".values.{name}", f".gaps.{name}"


# ---------------------------------------------------------------- writing


def write(
    directory: str | os.PathLike[str],
    *,
    kind: str,
    blobs: Mapping[str, Mapping[str, Tensor]],
    fields: Mapping[str, Any],
) -> None:
    """Write a posterior, in place of the one that may be there already: all of it or nothing.

    Blobs are taken from the mapping one at a time, so one that makes its draws on demand keeps
    memory small.

    Args:
        directory: A local directory (made if missing) or an fsspec URL such as ``s3://...``.
        kind: What the posterior is; the reader chooses a class by it.
        blobs: Blob name to tensors by name. Blob names use letters, digits and ``_ . -``.
        fields: Anything else worth keeping, as JSON: tuples come back as lists.

    Raises:
        ConfigurationError: A name, field or tensor cannot be stored. The old contents stay.

    Example:
        >>> write("memory://doc", kind="draws", blobs={"0": {"w": torch.ones(2)}}, fields={"n": 3})
        >>> read("memory://doc").load("0")
        {'w': tensor([1., 1.])}
    """
    for name in blobs:
        if not BLOB_NAME.fullmatch(name):
            raise ConfigurationError(
                f"A blob name becomes a file name: letters, digits and '_', '.', '-' only, but got "
                f"{name!r}. Rename it."
            )
    entries: list[dict[str, Any]] = []
    body = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "fields": json_value(fields, "fields"),
        "written_by": package_versions(),
        "blobs": entries,
    }
    files = open_directory(directory)
    _refuse_to_replace_others(files)
    with files.one_writer():
        try:
            for name, blob in blobs.items():
                entries.append(_write_blob(files, name, dict(blob.items())))
                if "sparse" in entries[-1]:
                    body["version"] = SPARSE_VERSION
            manifest = encode(body)
            if len(manifest) > LIMIT:
                raise ConfigurationError(
                    f"The manifest would have {len(manifest):,} bytes, of {len(entries)} blobs; at "
                    f"most {LIMIT:,} are read again. Save fewer draws in one directory."
                )
            files.put(MANIFEST, manifest)
        finally:
            # by the manifest that is there now: a put that failed may still have arrived
            with suppress(OSError, ValueError, KeyError):
                present = files.get(MANIFEST)
                kept = json.loads(present)["blobs"] if present else []
                remove_unnamed(files, {entry["file"] for entry in kept})


def _write_blob(files: Files, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write one blob; what the manifest says of it."""
    stored: dict[str, Tensor] = {}
    values: dict[str, int] = {}
    for key, tensor in tensors.items():
        encoded = sparse.encode(_flat_on_cpu(key, tensor))
        if encoded is None:
            stored[key] = tensor
        else:
            stored.update(zip(_sparse_names(key), encoded, strict=True))
            values[key] = len(encoded[0])
    pieces = pieces_of(stored)
    sha256 = sha256_of(pieces)
    file = f"{name}-{sha256[:16]}.safetensors"
    files.put(f"blobs/{file}", *pieces)
    entry = {"name": name, "file": file, "bytes": sum(map(len, pieces)), "sha256": sha256}
    entry["tensors"] = describe_tensors(tensors)
    return {**entry, "sparse": values} if values else entry


def remove_unnamed(files: Files, named: Collection[str]) -> None:
    """Remove all blobs but those with these file names, and what crashes have left behind."""
    blobs = [file for file in files.names("blobs") if BLOB_FILE.fullmatch(file)]
    temporary = [
        f"{folder}{file}"
        for folder in ("", "blobs/", "records/")
        for file in filter(TEMPORARY.fullmatch, files.names(folder))
    ]
    files.remove(*temporary, *(f"blobs/{file}" for file in blobs if file not in named))


def _refuse_to_replace_others(files: Files) -> None:
    """Do not write over a file, or over a manifest.json of some other program."""
    if files.is_file():
        raise ConfigurationError(f"{files} is a file; a posterior is saved to a directory.")
    try:
        other = json.loads(files.get(MANIFEST, LIMIT) or b"")
    except (ValueError, RecursionError):
        return  # nothing, or a damaged one: writing is what repairs it
    if not isinstance(other, dict) or other.get("format") != FORMAT:
        raise ConfigurationError(
            f"{files} holds a {MANIFEST} that is not of a posterior. Choose another directory, "
            f"or remove the file if nobody needs it."
        )
    if "stream" in other.get("fields", {}) and files.names("records"):
        raise ConfigurationError(
            f"{files} holds draws as they were taken, which a save would remove. Choose another "
            f"directory."
        )


# ---------------------------------------------------------------- reading


def read(directory: str | os.PathLike[str]) -> Stored:
    """Read and check the manifest of a stored posterior; tensors are read by :meth:`Stored.load`.

    Args:
        directory: Where :func:`write` put it: a local directory or an fsspec URL.

    Raises:
        PosteriorFormatError: There is no posterior, or it is damaged, newer, or a pickle.

    Example:
        >>> write("memory://doc", kind="draws", blobs={"0": {"w": torch.ones(2)}}, fields={"n": 3})
        >>> stored = read("memory://doc")
        >>> stored.kind, stored.fields, stored.blob_names
        ('draws', {'n': 3}, ['0'])
    """
    files = open_directory(directory)
    data = None if files.is_file() else files.get(MANIFEST, LIMIT + 1)
    if data is None and not files.exists():
        raise PosteriorFormatError(
            f"{files} does not exist. Pass the directory that was given to posterior.save()."
        )
    if data is None:
        held = "a file" if files.is_file() else f"a directory with {files.names()[:10]}"
        raise PosteriorFormatError(
            f"{files} is {held}; a posterior is a directory that holds {MANIFEST}. Pass the one "
            "that was given to posterior.save(). A pickle (.pt, .ckpt) can run any code and is "
            "never loaded: load it into its network yourself, then save a posterior."
        )
    where = f"{files}: {MANIFEST}"
    manifest = unseal(data, where, FORMAT, _MANIFEST, SPARSE_VERSION)
    if len({entry["file"] for entry in manifest["blobs"]}) < len(manifest["blobs"]):
        # what is read would have no bound by what lies on the disk
        raise PosteriorFormatError(
            f"{where} names a blob twice. It was not written by this package."
        )
    return Stored(files, manifest, data)


class Stored:
    """A stored posterior whose manifest was checked and whose tensors are still on the disk.

    Made by :func:`read`.

    Attributes:
        kind: What the posterior is.
        fields: The JSON fields given to :func:`write`.
        files: Where it lies.
        blob_names: The blobs, in the order written.

    Example:
        >>> write("memory://doc", kind="draws", blobs={"0": {"w": torch.ones(2)}}, fields={"n": 3})
        >>> read("memory://doc").entry("0")["tensors"]
        {'w': {'dtype': 'float32', 'shape': [2]}}
    """

    def __init__(self, files: Files, manifest: dict[str, Any], data: bytes) -> None:
        self.files, self._data = files, data
        self._entries: dict[str, dict[str, Any]] = {e["name"]: e for e in manifest["blobs"]}
        self.kind: str = manifest["kind"]
        self.fields: dict[str, Any] = manifest["fields"]
        self.blob_names: list[str] = list(self._entries)

    @cached_property
    def bytes(self) -> int:
        """The memory that all blobs take when they are read; on the disk zeros take less."""
        return sum(
            getattr(torch, tensor["dtype"]).itemsize * math.prod(tensor["shape"])
            for entry in self._entries.values()
            for tensor in entry["tensors"].values()
        )

    def part(self, prefix: str, kind: str, fields: dict[str, Any]) -> Stored:
        """The blobs whose names begin with ``prefix``, without it, as if saved by themselves."""
        own = [
            {**entry, "name": name.removeprefix(prefix)}
            for name, entry in self._entries.items()
            if name.startswith(prefix)
        ]
        return Stored(self.files, {"kind": kind, "fields": fields, "blobs": own}, self._data)

    def is_replaced(self) -> bool:
        """Whether another manifest has taken the place of this one, or it was removed."""
        return self.files.get(MANIFEST, LIMIT + 1) != self._data

    def entry(self, blob_name: str) -> dict[str, Any]:
        """What the manifest says of a blob: its file, size, hash and tensors."""
        if blob_name not in self._entries:
            raise PosteriorFormatError(
                f"The posterior in {self.files} has no blob {blob_name!r}; it has "
                f"{self.blob_names}."
            )
        return self._entries[blob_name]

    def load(self, blob_name: str) -> dict[str, Tensor]:
        """Read one blob: check the hash of its bytes, then every dtype and shape.

        Raises:
            PosteriorFormatError: There is no such blob, or it is damaged.
        """
        return read_blob(self.files, self.entry(blob_name))

    def load_if_present(self, blob_name: str) -> dict[str, Tensor]:
        """The tensors of a blob; none where an empty one was left out."""
        return self.load(blob_name) if blob_name in self._entries else {}
