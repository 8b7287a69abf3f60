"""Where things are stored: a local directory, or a prefix on remote storage.

Locally a put is atomic and on the disk when it returns: the bytes go to a temporary name, are
flushed (``fsync``) and renamed, and then the directory itself is flushed. On remote storage (any
fsspec URL) a put is as atomic as that system makes it, which in object stores it is.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from lightning_bnn.checks import check_path
from lightning_bnn.errors import ConfigurationError, PosteriorFormatError

if sys.platform != "win32":
    import fcntl

__all__ = [
    "TEMPORARY",
    "Files",
    "LocalFiles",
    "Piece",
    "absolute",
    "open_directory",
    "write_atomic",
]

Piece = bytes | memoryview

TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}")

_NOT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # each on its systems
_NOT_A_FILE = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
# of a link to itself, a socket, and a name that no file has
_NEVER_A_FILE = (errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG)

# Storage in memory looks first and writes then: threads of its process must do so one by one.
_CREATING = threading.Lock()


def absolute(directory: str | os.PathLike[str]) -> str:
    """A URL as it is, a path from the root on: a later change of directory does not move it.

    Example:
        >>> absolute("s3://bucket/runs"), absolute("runs") == os.path.join(os.getcwd(), "runs")
        ('s3://bucket/runs', True)
    """
    location = check_path("directory", directory)
    if not location:
        raise ConfigurationError("A directory or a URL is needed; got an empty text.")
    if "://" in location:
        return location
    if re.match(r"[A-Za-z0-9+.-]{2,}:/", location):
        raise ConfigurationError(
            f"{location!r} looks like a URL that went through Path, which drops a slash. "
            f"Pass the URL as a string."
        )
    return os.path.abspath(location)


def open_directory(directory: str | os.PathLike[str]) -> Files:
    """Choose by the form of the location; nothing is touched yet.

    Example:
        >>> files = open_directory("memory://files-doc")
        >>> files.put("a", b"text")
        >>> files.names(), files.get("a"), files.get("b")
        (['a'], b'text', None)
    """
    location = absolute(directory)
    if "://" not in location:
        return LocalFiles(location)
    try:
        file_system, path = fsspec.core.url_to_fs(location)
    except ValueError as error:
        raise ConfigurationError(f"Cannot open {location!r}: {error}") from error
    if isinstance(file_system, LocalFileSystem):
        return LocalFiles(path)
    return Files(file_system, path, location)


def write_atomic(path: str | os.PathLike[str], *pieces: Piece | Callable[[BinaryIO], None]) -> None:
    """Write a local file in place of the one that may be there: all or nothing.

    It is on the disk when this returns. Folders on the way are made.

    Args:
        path: The file.
        pieces: What it holds, one after another; a function writes its piece to the file itself.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_atomic(f"{folder}/deep/file.txt", b"all ", b"of it")
        ...     Path(folder, "deep/file.txt").read_text()
        'all of it'
    """
    target = Path(path)
    with _temporary(target, pieces) as temporary:
        os.replace(temporary, target)
    _sync(target.parent)


class Files:
    """The few calls that a store needs, on any file system of fsspec.

    Args:
        file_system: The file system.
        root: What all names begin with.
        location: How to name the root in errors.
    """

    def __init__(self, file_system: Any, root: str, location: str) -> None:
        self.file_system, self.root, self.location = file_system, root.rstrip("/"), location

    def __str__(self) -> str:
        return self.location

    def exists(self) -> bool:
        """Whether there is anything at the root."""
        return bool(self.file_system.exists(self.root))

    def is_file(self) -> bool:
        """Whether the root is itself a file."""
        return bool(self.file_system.isfile(self.root))

    def names(self, folder: str = "") -> list[str]:
        """What a folder holds, sorted; nothing if it is missing."""
        path = f"{self.root}/{folder}".rstrip("/")
        self.file_system.invalidate_cache(path)
        try:
            paths = self.file_system.ls(path, detail=False)
        except _NOT_A_FILE:
            return []
        return sorted(Path(item).name for item in paths if item.rstrip("/") != path)

    def get(self, name: str, limit: int | None = None) -> bytes | None:
        """The first ``limit`` bytes of a file, or all; ``None`` if it is missing."""
        try:
            data = self.file_system.cat_file(f"{self.root}/{name}", end=limit)
        except _NOT_A_FILE:
            return None
        return bytes(data)

    def stamp(self, name: str) -> Any:
        """What changes whenever a file does; None where that cannot be known."""
        return None

    def size(self, folder: str) -> int:
        """The bytes of all files of a folder together."""
        try:
            return int(self.file_system.du(f"{self.root}/{folder}"))
        except _NOT_A_FILE:
            return 0

    def put(self, name: str, *pieces: Piece) -> None:
        """Write a file of these pieces in place of the one that may be there, all or nothing."""
        self._write(name, b"".join(pieces))

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless there is one of that name already; of several writers one succeeds.

        Returns:
            Whether the file is now there with these bytes.
        """
        try:
            with _CREATING:
                self._write(name, data, mode="create")
        except OSError:  # taken, or the answer to a first try was lost; the contents tell
            self.file_system.invalidate_cache(f"{self.root}/{name}")
            there = self.get(name)
            if there is None:
                raise
            return there == data
        return True

    def _write(self, name: str, data: bytes, **options: Any) -> None:
        path = f"{self.root}/{name}"
        self.file_system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.file_system.pipe_file(path, data, **options)

    def remove(self, *names: str) -> None:
        """Remove files one after another, if they are there; locally the disk knows it then."""
        for name in names:
            with suppress(FileNotFoundError):
                self.file_system.rm_file(f"{self.root}/{name}")

    def one_writer(self) -> AbstractContextManager[None]:
        """Keep other writers out where that works."""
        return nullcontext()

    def claim(self) -> Callable[[], None]:
        """Keep other processes from claiming the same until the result is called, where that works.

        Raises:
            ConfigurationError: Another process has claimed it.
        """
        return lambda: None


class LocalFiles(Files):
    """A directory on this machine, in which a put is atomic and on the disk when it returns."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(LocalFileSystem(), os.fspath(root), os.fspath(root))
        self.path = Path(root)

    @override
    def get(self, name: str, limit: int | None = None) -> bytes | None:
        path = self.path / name
        try:
            # a pipe that nobody writes to would be waited for
            descriptor = os.open(path, os.O_RDONLY | _NOT_WAITING)
        except _NOT_A_FILE:
            return None
        except OSError as error:
            if error.errno not in _NEVER_A_FILE:
                raise
            raise PosteriorFormatError(
                f"{path!s:.300} is not a file ({error.strerror})."
            ) from error
        try:
            about = os.fstat(descriptor)
            if stat.S_ISDIR(about.st_mode):
                return None
            if not stat.S_ISREG(about.st_mode):
                raise PosteriorFormatError(
                    f"{path} is a device, a pipe or a socket, not a file. It was not read."
                )
            left = about.st_size if limit is None else min(limit, about.st_size)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read(left)
        finally:
            os.close(descriptor)

    @override
    def size(self, folder: str) -> int:
        sizes = 0
        with suppress(*_NOT_A_FILE), os.scandir(self.path / folder) as found:
            for entry in found:
                with suppress(OSError):  # removed meanwhile
                    sizes += entry.stat().st_size
        return sizes

    @override
    def stamp(self, name: str) -> Any:
        about = os.stat(self.path / name)
        return about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns

    @override
    def put(self, name: str, *pieces: Piece) -> None:
        write_atomic(self.path / name, *pieces)

    @override
    def create(self, name: str, data: bytes) -> bool:
        path = self.path / name
        with _temporary(path, [data]) as temporary:
            with suppress(FileExistsError):
                os.link(temporary, path)  # unlike a rename, it never replaces
            os.unlink(temporary)
        _sync(path.parent)
        return self.get(name) == data  # also ours if the answer to a first try was lost

    @override
    def remove(self, *names: str) -> None:
        super().remove(*names)
        for folder in {(self.path / name).parent for name in names}:
            with suppress(FileNotFoundError):
                _sync(folder)

    if sys.platform != "win32":  # where there are no such locks

        @override
        @contextmanager
        def one_writer(self) -> Iterator[None]:
            _make(self.path)
            descriptor = os.open(self.path, os.O_RDONLY)
            try:
                with suppress(OSError):  # a network file system without locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)

        @override
        def claim(self) -> Callable[[], None]:
            _make(self.path)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
            try:
                # of this process alone, not of its forks: gone the moment that it is killed
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EAGAIN):
                    os.close(descriptor)
                    raise ConfigurationError(
                        f"{self} is in use: another run is writing draws to it. Give each run a "
                        "directory of its own."
                    ) from error
                # else a network file system without locks
            return partial(os.close, descriptor)


@contextmanager
def _temporary(path: Path, pieces: Sequence[Piece | Callable[[BinaryIO], None]]) -> Iterator[Path]:
    """A file beside ``path`` with these contents, on the disk; gone if the block raises."""
    _make(path.parent)
    temporary = path.parent / f".tmp-{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            for piece in pieces:
                if callable(piece):
                    piece(file)
                else:
                    file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say where
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _make(path: Path) -> None:
    if not path.is_dir():
        _make(path.parent)
        path.mkdir(exist_ok=True)
        _sync(path.parent)


def _sync(directory: Path) -> None:
    """Put the names in a directory, not only the contents of its files, on the disk."""
    if sys.platform != "win32":  # where a directory cannot be opened
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
