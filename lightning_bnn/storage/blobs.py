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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.storage import sparse
from lightning_bnn.storage.files import Files, Piece
from lightning_bnn.storage.manifest import DTYPES, dtype_name

__all__ = [
    "check_storable",
    "compressed",
    "describe_tensors",
    "pieces_of",
    "read_blob",
    "sha256_of",
]

# what safetensors calls them, in the order of DTYPES
_CODES = dict(
    zip(
        DTYPES.values(),
        ("F64", "F32", "F16", "BF16", "BOOL", "I64", "I32", "I16", "I8", "U8"),
        strict=True,
    )
)


def pieces_of(tensors: Mapping[str, Tensor], blob: str) -> list[Piece]:
    """The pieces of the file that holds these tensors; joined they are the whole of it.

    Args:
        tensors: Any dense tensors.
        blob: How to name the set in errors.

    Example:
        >>> pieces = pieces_of({"w": torch.ones(2)}, "doc")
        >>> safetensors.torch.load(b"".join(pieces))
        {'w': tensor([1., 1.])}
    """
    for name, tensor in tensors.items():
        check_storable(name, tensor, blob)
    header: dict[str, Any] = {}
    pieces: list[Piece] = []
    end = 0
    # the widest numbers first: then every tensor starts at a multiple of its own width
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        start, end = end, end + tensor.numel() * tensor.element_size()
        code = _CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": [*tensor.shape], "data_offsets": [start, end]}
        if end > start:
            pieces.append(_flat_on_cpu(tensor).view(torch.uint8).numpy().data)
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *pieces]


def compressed(
    tensors: Mapping[str, Tensor], blob: str
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The tensors as they are to be stored, and the number of values of each that is sparse.

    Args:
        tensors: Any dense tensors.
        blob: How to name the set in errors.

    Example:
        >>> stored, values = compressed({"a": torch.zeros(2000), "b": torch.ones(2000)}, "doc")
        >>> list(stored), values
        (['.values.a', '.gaps.a', 'b'], {'a': 0})
    """
    stored: dict[str, Tensor] = {}
    values: dict[str, int] = {}
    for name, tensor in tensors.items():
        check_storable(name, tensor, blob)
        names = _part_names(name)
        encoded = None if tensors.keys() & {*names} else sparse.encode(_flat_on_cpu(tensor))
        if encoded is None:
            stored[name] = tensor
        else:
            stored.update(zip(names, encoded, strict=True))
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
    files: Files,
    entry: Mapping[str, Any],
    device: torch.device | str = "cpu",
    known_good: bool = False,
) -> dict[str, Tensor]:
    """Read one blob: check the hash of its bytes, then every dtype and shape.

    Args:
        files: Where it lies.
        entry: Its ``file``, ``bytes``, ``sha256``, ``tensors`` and, where some are sparse,
            ``sparse``, as a manifest has them.
        device: Where the tensors go.
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
    if len(data) != entry["bytes"]:
        raise PosteriorFormatError(
            f"{where} is damaged: expected {entry['bytes']} bytes, found {len(data)}. "
            f"Restore it from a copy."
        )
    if not known_good and (found := hashlib.sha256(data).hexdigest()) != entry["sha256"]:
        raise PosteriorFormatError(
            f"{where} was altered: expected sha256 {entry['sha256']}, found {found}. "
            f"Restore it from a copy."
        )
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # the decoder has no one class of errors
        raise PosteriorFormatError(f"{where} is not a safetensors file: {error}") from error
    for key, count in entry.get("sparse", {}).items():
        tensors[key] = _expanded(tensors, key, count, entry["tensors"][key]["shape"], where)
    promised, held = entry["tensors"], describe_tensors(tensors)
    for key in sorted(promised.keys() | held.keys()):
        if promised.get(key) != held.get(key):
            raise PosteriorFormatError(
                f"{where}: the manifest promises tensor {key!r} as {promised.get(key)}, the "
                f"file has {held.get(key)}. The posterior was put together from different ones."
            )
    return {key: tensors[key].to(device) for key in promised}


def check_storable(name: str, tensor: Tensor, blob: str) -> None:
    """Raise a ConfigurationError if a tensor cannot be part of a blob.

    Example:
        >>> check_storable("w", torch.zeros(1, dtype=torch.complex64), "doc")
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: Tensor 'w' of blob 'doc' is torch.complex64; ...
    """
    where = f"Tensor {name!r} of blob {blob!r}"
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ConfigurationError(
            f"{where} is {tensor.layout} on {tensor.device}; only dense tensors that hold "
            f"numbers can be stored. Use to_dense(), or materialise it."
        )
    if tensor.dtype not in _CODES:
        raise ConfigurationError(
            f"{where} is {tensor.dtype}; the dtypes that can be stored are "
            f"{', '.join(DTYPES)}. Convert it first."
        )


def _flat_on_cpu(tensor: Tensor) -> Tensor:
    """The form in which a tensor's bytes can be written."""
    dense = tensor.detach().cpu().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,))  # a single number may have another stride


def _part_names(name: str) -> tuple[str, str]:
    """Under which names the values and the gaps of a sparse tensor lie in a file."""
    return f".values.{name}", f".gaps.{name}"


def _expanded(
    tensors: dict[str, Tensor], name: str, count: int, shape: Sequence[int], where: str
) -> Tensor:
    """A sparse tensor of a file, whose two parts are taken out of the file's tensors."""
    values, gaps = (tensors.pop(part, None) for part in _part_names(name))
    try:
        if name in tensors or values is None or gaps is None:
            raise ValueError("the file has no values or no gaps for it, or holds it whole as well")
        if values.shape != (count,):
            raise ValueError(f"{count} values are promised, {list(values.shape)} are there")
        return sparse.decode(values, gaps, shape)
    except ValueError as error:
        raise PosteriorFormatError(
            f"{where}: the sparse tensor {name!r} of the shape {list(shape)} is wrong: {error}. It "
            "was not written by lightning-bnn, or put together from different posteriors."
        ) from error
