"""The on-disk format of posteriors: named sets of tensors and one JSON manifest.

Layout of a stored posterior::

    <directory>/manifest.json
    <directory>/blobs/<name>-<first 16 hex digits of the sha256>.safetensors

A *blob* is a named set of tensors that is read as a whole: one draw, or the mean of a Gaussian.
The manifest is compact ASCII JSON with the keys ``format``, ``version``, ``kind``, ``fields``,
``written_by`` (package versions), ``blobs`` (``name``, ``file``, ``bytes``, ``sha256`` and the
``dtype`` and ``shape`` of every tensor) and, last, ``sha256``: the hash of the same JSON without
this key. Every byte of every file is therefore covered by a hash.

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
import importlib.metadata
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import fsspec
import safetensors.torch
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from lightning_bnn.errors import ConfigurationError, PosteriorFormatError

if sys.platform != "win32":
    import fcntl

__all__ = ["FORMAT", "VERSION", "Stored", "read", "write"]

FORMAT = "lightning_bnn.posterior"
VERSION = 1

_MANIFEST = "manifest.json"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_BLOB_FILE = re.compile(r"[A-Za-z0-9_.-]+-[0-9a-f]{16}\.safetensors")
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}")
_PICKLE_SUFFIXES = (".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".bin")
_NOT_A_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}


def write(
    directory: str | os.PathLike[str],
    *,
    kind: str,
    blobs: Mapping[str, Mapping[str, Tensor]],
    fields: Mapping[str, Any],
) -> None:
    """Write a posterior, in place of the one that may be there already: all of it or nothing.

    Blobs are taken from the mapping one at a time, and one blob at a time is held as bytes, so a
    mapping that makes its draws on demand keeps memory small.

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
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"A blob name becomes a file name: letters, digits and '_', '.', '-' only, but got "
                f"{name!r}. Rename it."
            )
    if not isinstance(kind, str) or not kind:
        raise ConfigurationError(f"kind must be a non-empty string, but got {kind!r}.")
    entries: list[dict[str, Any]] = []
    body = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "fields": _json_value(fields, "fields"),
        "written_by": {"lightning_bnn": _package_version(), "torch": str(torch.__version__)},
        "blobs": entries,
    }
    files = _open(directory)
    _refuse_to_replace_others(files)
    with files.one_writer():
        before = set(files.names("blobs"))
        created: list[str] = []
        manifest = b""
        try:
            for name in blobs:
                tensors = _storable(blobs[name], name)
                data = safetensors.torch.save(tensors)
                sha256 = hashlib.sha256(data).hexdigest()
                file = f"{name}-{sha256[:16]}.safetensors"
                described = {
                    key: {"dtype": _dtype_name(value), "shape": list(value.shape)}
                    for key, value in tensors.items()
                }
                entries.append({"name": name, "file": file, "bytes": len(data), "sha256": sha256})
                entries[-1]["tensors"] = described
                if file not in before:
                    created.append(file)
                files.put(f"blobs/{file}", data)
                del tensors, data  # the next blob must not be held together with this one
            manifest = _encode(body)
            files.put(_MANIFEST, manifest)
        except BaseException:
            # A failed put of the manifest may still have arrived (a lost reply): look first.
            with suppress(OSError):
                if not manifest or files.get(_MANIFEST) != manifest:
                    for file in created:
                        files.remove(f"blobs/{file}")
            raise
        named = {entry["file"] for entry in entries}
        with suppress(OSError):  # the new posterior is in place; the next write cleans again
            for file in files.names("blobs"):
                if _TEMPORARY.fullmatch(file) or (_BLOB_FILE.fullmatch(file) and file not in named):
                    files.remove(f"blobs/{file}")
            for file in filter(_TEMPORARY.fullmatch, files.names()):
                files.remove(file)


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
    files = _open(directory)
    data = None if files.is_file() else files.get(_MANIFEST)
    if data is None:
        raise PosteriorFormatError(_why_nothing_to_read(files))
    return Stored(files, _decode(data, str(files)))


def _json_value(value: Any, where: str) -> Any:
    """Copy a JSON value, refusing what JSON would drop, change or not hold, by its place."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigurationError(
                f"{where} is {value}, which JSON cannot hold. Leave it out, or pass None or text."
            )
        return float(value)
    if isinstance(value, (list, tuple)):
        return [_json_value(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigurationError(f"{where} has the key {key!r}; JSON keys are strings.")
        return {key: _json_value(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise ConfigurationError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold. Pass plain numbers, "
        f"strings, lists and dicts, and tensors as blobs."
    )


def _storable(tensors: Mapping[str, Tensor], blob: str) -> dict[str, Tensor]:
    """Bring tensors into the form that safetensors takes: dense, on the CPU, sharing nothing."""
    storable: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        where = f"Tensor {name!r} of blob {blob!r}"
        if not isinstance(name, str) or name == "__metadata__":  # safetensors' own key
            raise ConfigurationError(f"{where} cannot be stored under this name. Rename it.")
        if not isinstance(tensor, Tensor):
            raise ConfigurationError(f"{where} is a {type(tensor).__name__}, not a tensor.")
        if tensor.layout != torch.strided or tensor.is_meta:
            raise ConfigurationError(
                f"{where} is {tensor.layout} on {tensor.device}; only dense tensors that hold "
                f"numbers can be stored. Use to_dense(), or materialise it."
            )
        if _dtype_name(tensor) not in _DTYPES:
            raise ConfigurationError(
                f"{where} is {tensor.dtype}; the dtypes that can be stored are "
                f"{', '.join(_DTYPES)}. Convert it first."
            )
        dense = tensor.detach().cpu().resolve_neg().contiguous()
        if dense.untyped_storage().data_ptr() in storages:
            dense = dense.clone()
        storages.add(dense.untyped_storage().data_ptr())
        storable[name] = dense
    return storable


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _package_version() -> str:
    try:
        return importlib.metadata.version("lightning-bnn")
    except importlib.metadata.PackageNotFoundError:  # run from a copied source tree
        return "unknown"


def _encode(body: Mapping[str, Any]) -> bytes:
    """Give the one byte string that a manifest with these contents is, its hash at the end."""
    compact = json.dumps(body, separators=(",", ":"), allow_nan=False)
    digest = hashlib.sha256(compact.encode("ascii")).hexdigest()
    return f'{compact[:-1]},"sha256":"{digest}"}}'.encode("ascii")


def _decode(data: bytes, where: str) -> dict[str, Any]:
    """Check a manifest, from "is it ours" to its last field."""
    where = f"{where}: {_MANIFEST}"
    try:
        manifest = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PosteriorFormatError(
            f"{where} is not JSON ({error}); it has {len(data)} bytes and may be truncated. "
            f"Restore it from a copy."
        ) from error
    found = manifest.get("format") if isinstance(manifest, dict) else manifest
    if not isinstance(manifest, dict) or found != FORMAT:
        raise PosteriorFormatError(
            f"{where} is not of a posterior: expected the format {FORMAT!r}, found {found!r:.80}."
        )
    version = manifest.get("version")
    if version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        raise PosteriorFormatError(
            f"{where} has format version {version!r:.80}; this package reads version {VERSION}. "
            + ("Update lightning-bnn." if newer else "It was not written by lightning-bnn.")
        )
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    try:
        # Bytes, not values: 1e5 and 1E5 are the same number, but only one of them was written.
        intact = _encode(body) == data
    except ValueError:  # NaN, which was never written
        intact = False
    if not intact:
        raise PosteriorFormatError(
            f"{where} was altered: its sha256 is not that of its contents. Restore it from a copy."
        )
    try:
        _check_contents(manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PosteriorFormatError(
            f"{where} has a good hash but wrong contents ({type(error).__name__}: {error}). It was "
            f"not written by lightning-bnn; nothing was loaded."
        ) from error
    return manifest


def _check_contents(manifest: Mapping[str, Any]) -> None:
    """Raise unless the manifest has every field, each of its type, and no path that leads away."""

    def require(condition: object, what: str, value: object) -> None:
        if not condition:
            raise ValueError(f"{what}: {value!r:.200}")

    require(isinstance(manifest["kind"], str), "kind is not a string", manifest["kind"])
    for key in ("fields", "written_by"):
        require(isinstance(manifest[key], dict), f"{key} is not an object", manifest[key])
    require(isinstance(manifest["blobs"], list), "blobs is not a list", manifest["blobs"])
    names = [entry["name"] for entry in manifest["blobs"]]
    require(len(set(names)) == len(names), "a blob name twice", names)
    for entry in manifest["blobs"]:
        name, file, sha256 = entry["name"], entry["file"], entry["sha256"]
        require(_NAME.fullmatch(name), "bad blob name", name)
        require(_BLOB_FILE.fullmatch(file), "not a plain blob file name", file)
        require(re.fullmatch("[0-9a-f]{64}", sha256), "bad sha256", sha256)
        require(type(entry["bytes"]) is int, "bytes is not a number", entry["bytes"])
        for key, tensor in entry["tensors"].items():
            require(tensor["dtype"] in _DTYPES, f"dtype of {key!r} unknown", tensor["dtype"])
            shape_is_good = all(type(size) is int and 0 <= size < 2**63 for size in tensor["shape"])
            require(shape_is_good, f"bad shape of {key!r}", tensor["shape"])


def _is_pickle(name: str, head: bytes) -> bool:
    """Tell pickles, and the zip archives that hold them, by name or by first bytes."""
    by_bytes = head[:4] == b"PK\x03\x04" or (head[:1] == b"\x80" and head[1:2] in b"\2\3\4\5")
    return name.lower().endswith(_PICKLE_SUFFIXES) or (len(head) > 1 and by_bytes)


def _why_nothing_to_read(files: _LocalFiles | _RemoteFiles) -> str:
    never = (
        "a pickle can run any code, so it is never loaded. If you trust it, load it into its "
        "network yourself, then save a posterior with posterior.save(directory)."
    )
    if files.is_file():
        if _is_pickle(str(files), files.get("", 4) or b""):
            return f"{files} is a pickle or an archive of pickles: {never}"
        return f"{files} is a file; a posterior is a directory that holds {_MANIFEST}. Pass that."
    names = files.names()
    if not names and not files.exists():
        return f"{files} does not exist. Pass the directory that was given to posterior.save()."
    if names and all(_is_pickle(name, files.get(name, 4) or b"") for name in names):
        return f"{files} holds only pickles ({', '.join(names[:5])}): {never}"
    found = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") or "nothing"
    return (
        f"{files} holds no posterior: there is no {_MANIFEST}; found: {found}. Pass the directory "
        f"that was given to posterior.save(), or save again if the first save was cut off."
    )


def _refuse_to_replace_others(files: _LocalFiles | _RemoteFiles) -> None:
    """Do not write over a file, or over a manifest.json of some other program."""
    if files.is_file():
        raise ConfigurationError(f"{files} is a file; a posterior is saved to a directory.")
    try:
        other = json.loads(files.get(_MANIFEST) or b"")
    except (ValueError, RecursionError):
        return  # nothing, or a damaged one: writing is what repairs it
    if not isinstance(other, dict) or other.get("format") != FORMAT:
        raise ConfigurationError(
            f"{files} holds a {_MANIFEST} that is not of a posterior. Choose another directory, "
            f"or remove the file if nobody needs it."
        )


def _open(directory: str | os.PathLike[str]) -> _LocalFiles | _RemoteFiles:
    location = os.fspath(directory)
    if "://" not in location:
        if re.match(r"[A-Za-z0-9+.-]{2,}:/", location):
            raise ConfigurationError(
                f"{location!r} looks like a URL that went through Path, which drops a slash. "
                f"Pass the URL as a string."
            )
        return _LocalFiles(Path(location))
    try:
        file_system, path = fsspec.core.url_to_fs(location)
    except ValueError as error:
        raise ConfigurationError(f"Cannot open {location!r}: {error}") from error
    if isinstance(file_system, LocalFileSystem):
        return _LocalFiles(Path(path))
    return _RemoteFiles(file_system, path, location)


class Stored:
    """A stored posterior whose manifest was checked and whose tensors are still on the disk.

    Made by :func:`read`.

    Attributes:
        kind: What the posterior is.
        fields: The JSON fields given to :func:`write`.
        written_by: Versions of the packages that wrote it.
        blob_names: The blobs, in the order written.
        shapes: For every blob, tensor name to (dtype, shape), in the order written.

    Example:
        >>> write("memory://doc", kind="draws", blobs={"0": {"w": torch.ones(2)}}, fields={"n": 3})
        >>> read("memory://doc").shapes["0"]
        {'w': (torch.float32, torch.Size([2]))}
    """

    def __init__(self, files: _LocalFiles | _RemoteFiles, manifest: dict[str, Any]) -> None:
        self._files = files
        self._entries: dict[str, dict[str, Any]] = {e["name"]: e for e in manifest["blobs"]}
        self.kind: str = manifest["kind"]
        self.fields: dict[str, Any] = manifest["fields"]
        self.written_by: dict[str, str] = manifest["written_by"]
        self.blob_names: list[str] = list(self._entries)
        self.shapes: dict[str, dict[str, tuple[torch.dtype, torch.Size]]] = {
            name: {
                key: (_DTYPES[tensor["dtype"]], torch.Size(tensor["shape"]))
                for key, tensor in entry["tensors"].items()
            }
            for name, entry in self._entries.items()
        }

    def load(self, blob_name: str, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Read one blob: check the hash of its bytes, then every dtype and shape.

        Args:
            blob_name: One of :attr:`blob_names`.
            device: Where the tensors go.

        Raises:
            PosteriorFormatError: There is no such blob, or it is damaged.
        """
        if blob_name not in self._entries:
            raise PosteriorFormatError(
                f"The posterior in {self._files} has no blob {blob_name!r}; it has "
                f"{self.blob_names}."
            )
        entry = self._entries[blob_name]
        where = f"{self._files}: blobs/{entry['file']}"
        # The very bytes that were hashed are decoded: no second look at a file that may change.
        data = self._files.get(f"blobs/{entry['file']}")
        if data is None:
            raise PosteriorFormatError(
                f"{where} is missing. If the posterior was written over since it was opened, "
                f"read() it again; otherwise restore the file from a copy."
            )
        if len(data) != entry["bytes"]:
            raise PosteriorFormatError(
                f"{where} is damaged: expected {entry['bytes']} bytes, found {len(data)}. "
                f"Restore it from a copy."
            )
        if (found := hashlib.sha256(data).hexdigest()) != entry["sha256"]:
            raise PosteriorFormatError(
                f"{where} was altered: expected sha256 {entry['sha256']}, found {found}. "
                f"Restore it from a copy."
            )
        try:
            tensors = safetensors.torch.load(data)
        except Exception as error:  # the decoder has no one class of errors
            raise PosteriorFormatError(f"{where} is not a safetensors file: {error}") from error
        expected = self.shapes[blob_name]
        for key in sorted(expected.keys() | tensors.keys()):
            came = (tensors[key].dtype, tensors[key].shape) if key in tensors else None
            if came != expected.get(key):
                raise PosteriorFormatError(
                    f"{where}: the manifest promises tensor {key!r} as {expected.get(key)}, the "
                    f"file has {came}. The posterior was put together from different ones."
                )
        return {key: tensors[key].to(device) for key in expected}

    def load_all(self, device: torch.device | str = "cpu") -> dict[str, dict[str, Tensor]]:
        """Read every blob; all of them are then in memory together."""
        return {name: self.load(name, device) for name in self.blob_names}


class _LocalFiles:
    """A directory on this machine, in which a put is atomic and on the disk when it returns."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def exists(self) -> bool:
        return self.root.exists()

    def is_file(self) -> bool:
        return self.root.is_file()

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self.root / folder))
        except _NOT_A_FILE:
            return []

    def get(self, name: str, limit: int = -1) -> bytes | None:
        try:
            with open(self.root / name, "rb") as file:
                return file.read(limit)
        except _NOT_A_FILE:
            return None

    def put(self, name: str, data: bytes) -> None:
        path = self.root / name
        if not self._holds(path, data):
            temporary = path.parent / f".tmp-{secrets.token_hex(8)}"
            try:
                with open(temporary, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary)
                raise
        self._sync(path.parent)  # also for a file kept: its writer may have died before this

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.root / name)

    @contextmanager
    def one_writer(self) -> Iterator[None]:
        """Make the directories, and wait until no other process writes here."""
        self._make(self.root / "blobs")
        if sys.platform == "win32":
            yield
            return
        descriptor = os.open(self.root, os.O_RDONLY)
        try:
            with suppress(OSError):  # a network file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make(self, path: Path) -> None:
        if not path.is_dir():
            self._make(path.parent)
            path.mkdir(exist_ok=True)
            self._sync(path.parent)

    @staticmethod
    def _sync(directory: Path) -> None:
        """Put the names in a directory, not only the contents of its files, on the disk."""
        if sys.platform != "win32":  # where a directory cannot be opened
            descriptor = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @staticmethod
    def _holds(path: Path, data: bytes) -> bool:
        """Compare with the file itself: a good name may stand on damaged contents."""
        if not path.is_file() or path.stat().st_size != len(data):
            return False
        position = 0
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                if chunk != data[position : position + len(chunk)]:
                    return False
                position += len(chunk)
        return position == len(data)


class _RemoteFiles:
    """A prefix in an fsspec file system, in which a put is as atomic as that system makes it."""

    def __init__(self, file_system: Any, root: str, location: str) -> None:
        self.file_system, self.root, self.location = file_system, root.rstrip("/"), location

    def __str__(self) -> str:
        return self.location

    def exists(self) -> bool:
        return bool(self.file_system.exists(self.root))

    def is_file(self) -> bool:
        return bool(self.file_system.isfile(self.root))

    def names(self, folder: str = "") -> list[str]:
        path = f"{self.root}/{folder}".rstrip("/")
        self.file_system.invalidate_cache(path)
        try:
            found = self.file_system.ls(path, detail=False)
        except _NOT_A_FILE:
            return []
        return sorted(Path(item).name for item in found if item.rstrip("/") != path)

    def get(self, name: str, limit: int | None = None) -> bytes | None:
        try:
            data = self.file_system.cat_file(f"{self.root}/{name}".rstrip("/"), end=limit)
        except _NOT_A_FILE:
            return None
        return bytes(data)

    def put(self, name: str, data: bytes) -> None:
        path = f"{self.root}/{name}"
        self.file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.file_system.pipe_file(path, data)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.file_system.rm_file(f"{self.root}/{name}")

    def one_writer(self) -> AbstractContextManager[None]:
        return nullcontext()
