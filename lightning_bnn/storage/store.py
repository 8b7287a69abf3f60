"""The on-disk format of posteriors: named sets of tensors and one JSON manifest.

Layout of a stored posterior::

    <directory>/manifest.json
    <directory>/blobs/<name>-<first 16 hex digits of the sha256>.safetensors

A *blob* is a named set of tensors that is read as a whole: one draw, or the mean of a Gaussian.
The manifest (see :mod:`lightning_bnn.storage.manifest`) names every blob with its size and
sha256, and holds a hash of itself. Every byte of every file is therefore covered by a hash. Tensors
with many zeros, as pruning leaves them, are stored without these (see
:mod:`lightning_bnn.storage.sparse`).

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

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.storage.blobs import (
    compressed,
    describe_tensors,
    pieces_of,
    read_blob,
    sha256_of,
)
from lightning_bnn.storage.files import TEMPORARY, Files, open_directory
from lightning_bnn.storage.manifest import (
    BLOB_FILE,
    BLOB_NAME,
    FORMAT,
    MANIFEST,
    SPARSE_VERSION,
    VERSION,
    decode,
    encode,
    json_value,
    package_versions,
)

__all__ = ["Stored", "read", "write"]


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
        >>> import torch
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
                tensors = dict(blob.items())
                packed, sparse = compressed(tensors)
                pieces = pieces_of(packed)
                sha256, size = sha256_of(pieces), sum(map(len, pieces))
                file = f"{name}-{sha256[:16]}.safetensors"
                entries.append({"name": name, "file": file, "bytes": size, "sha256": sha256})
                entries[-1]["tensors"] = describe_tensors(tensors)
                if sparse:
                    entries[-1]["sparse"] = sparse
                    body["version"] = SPARSE_VERSION
                files.put(f"blobs/{file}", *pieces)
                del tensors, packed, pieces  # the next blob must not be held together with this one
            files.put(MANIFEST, encode(body))
        except BaseException:
            # A failed put of the manifest may still have arrived (a lost reply): look first.
            with suppress(OSError, ValueError, KeyError):
                there = files.get(MANIFEST)
                _remove_others(files, json.loads(there)["blobs"] if there else [])
            raise
        with suppress(OSError):  # the new posterior is in place; the next write cleans again
            _remove_others(files, entries)


def _remove_others(files: Files, entries: Sequence[Mapping[str, Any]]) -> None:
    """Remove the blobs that a manifest does not name, and what crashes have left behind."""
    named = {entry["file"] for entry in entries}
    for file in files.names("blobs"):
        if TEMPORARY.fullmatch(file) or (BLOB_FILE.fullmatch(file) and file not in named):
            files.remove(f"blobs/{file}")
    for file in filter(TEMPORARY.fullmatch, files.names()):
        files.remove(file)


def read(directory: str | os.PathLike[str]) -> Stored:
    """Read and check the manifest of a stored posterior; tensors are read by :meth:`Stored.load`.

    Args:
        directory: Where :func:`write` put it: a local directory or an fsspec URL.

    Raises:
        PosteriorFormatError: There is no posterior, or it is damaged, newer, or a pickle.

    Example:
        >>> import torch
        >>> write("memory://doc", kind="draws", blobs={"0": {"w": torch.ones(2)}}, fields={"n": 3})
        >>> stored = read("memory://doc")
        >>> stored.kind, stored.fields, stored.blob_names
        ('draws', {'n': 3}, ['0'])
    """
    files = open_directory(directory)
    data = None if files.is_file() else files.get(MANIFEST)
    if data is None:
        raise PosteriorFormatError(_why_nothing_to_read(files))
    return Stored(files, decode(data, str(files)))


def _why_nothing_to_read(files: Files) -> str:
    if not files.exists():
        return f"{files} does not exist. Pass the directory that was given to posterior.save()."
    held = "a file" if files.is_file() else f"a directory with {files.names()[:10]}"
    return (
        f"{files} is {held}; a posterior is a directory that holds {MANIFEST}. Pass the one that "
        "was given to posterior.save(). A pickle (.pt, .ckpt) can run any code and is never "
        "loaded: load it into its network yourself, then save a posterior."
    )


def _refuse_to_replace_others(files: Files) -> None:
    """Do not write over a file, or over a manifest.json of some other program."""
    if files.is_file():
        raise ConfigurationError(f"{files} is a file; a posterior is saved to a directory.")
    try:
        other = json.loads(files.get(MANIFEST) or b"")
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


class Stored:
    """A stored posterior whose manifest was checked and whose tensors are still on the disk.

    Made by :func:`read`.

    Attributes:
        kind: What the posterior is.
        fields: The JSON fields given to :func:`write`.
        files: Where it lies.
        blob_names: The blobs, in the order written.

    Example:
        >>> import torch
        >>> write("memory://doc", kind="draws", blobs={"0": {"w": torch.ones(2)}}, fields={"n": 3})
        >>> read("memory://doc").entry("0")["tensors"]
        {'w': {'dtype': 'float32', 'shape': [2]}}
    """

    def __init__(self, files: Files, manifest: dict[str, Any]) -> None:
        self.files = files
        self._entries: dict[str, dict[str, Any]] = {e["name"]: e for e in manifest["blobs"]}
        self.kind: str = manifest["kind"]
        self.fields: dict[str, Any] = manifest["fields"]
        self.blob_names: list[str] = list(self._entries)

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
