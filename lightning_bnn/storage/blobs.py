"""Blobs: named sets of tensors as safetensors files, written without copies and read with checks.

A file is eight bytes that say how long the header is, the header (JSON: the dtype, the shape and
the place of every tensor) and the tensors' bytes. It is made as a list of pieces, of which the
tensors' are views of their own memory, so that a large draw is never held twice: safetensors' own
writer makes two copies, takes twice as long, and refuses weights that share memory. Files are read
by safetensors.

A tensor with many zeros may lie in a file as two: its values and its gaps (see
:mod:`lightning_bnn.storage.sparse`), under names that begin with a dot. The manifest names those
tensors, so that a file says nothing that is not checked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.storage import sparse
from lightning_bnn.storage.files import Files, Piece
from lightning_bnn.storage.manifest import CODES, dtype_name

__all__ = ["compressed", "describe_tensors", "pieces_of", "read_blob", "sha256_of"]


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
        code = CODES[dtype_name(tensor.dtype)]
        header[name] = {"dtype": code, "shape": [*tensor.shape], "data_offsets": [start, end]}
        if end > start:
            pieces.append(flat.view(torch.uint8).numpy().data)
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *pieces]


def compressed(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The tensors as they are to be stored, and the number of values of each that is sparse.

    Example:
        >>> stored, values = compressed({"a": torch.zeros(2000), "b": torch.ones(2000)})
        >>> list(stored), values
        (['.values.a', '.gaps.a', 'b'], {'a': 0})
    """
    stored: dict[str, Tensor] = {}
    values: dict[str, int] = {}
    for name, tensor in tensors.items():
        encoded = sparse.encode(_flat_on_cpu(name, tensor))
        if encoded is None:
            stored[name] = tensor
        else:
            stored.update(zip(_part_names(name), encoded, strict=True))
            values[name] = len(encoded[0])
    return stored, values


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
        name: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        for name, tensor in tensors.items()
    }


def read_blob(
    files: Files, entry: Mapping[str, Any], known_good: bool = False
) -> dict[str, Tensor]:
    """Read one blob: check the hash of its bytes, then every dtype and shape.

    Args:
        files: Where it lies.
        entry: Its ``file``, ``bytes``, ``sha256``, ``tensors`` and, where some are sparse,
            ``sparse``, as a manifest has them.
        known_good: Whether its hash was checked before, and need not be again.

    Raises:
        PosteriorFormatError: It is missing or damaged.
    """
    where = f"{files}: blobs/{entry['file']}"
    # The very bytes that were hashed are decoded: no second look at a file that may change.
    data = files.get(f"blobs/{entry['file']}")
    if data is None:
        raise PosteriorFormatError(
            f"{where} is missing. If the posterior was written over since it was opened, open it "
            f"again with Posterior.load; otherwise restore the file from a copy."
        )
    size = entry["bytes"]
    if len(data) != size or not (known_good or sha256_of([data]) == entry["sha256"]):
        raise PosteriorFormatError(
            f"{where} is damaged: expected {size} bytes of sha256 {entry['sha256']}, found "
            f"{len(data)} of another. Restore it from a copy."
        )
    try:
        tensors = safetensors.torch.load(data)
        for name in entry.get("sparse", {}):
            values, gaps = (tensors.pop(part) for part in _part_names(name))
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
    if dtype_name(tensor.dtype) not in CODES:
        raise ConfigurationError(
            f"Tensor {name!r} is {tensor.dtype}; the dtypes that can be stored are "
            f"{', '.join(CODES)}. Convert it first."
        )
    dense = tensor.detach().cpu().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,))  # a single number may have another stride


def _part_names(name: str) -> tuple[str, str]:
    """Under which names the values and the gaps of a sparse tensor lie in a file."""
    return f".values.{name}", f".gaps.{name}"
