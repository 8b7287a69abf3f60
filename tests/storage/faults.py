"""What goes wrong under a store, and what lies on the disk then."""

import builtins
import errno
import json
import os
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from lightning_bnn.storage import files
from lightning_bnn.storage.manifest import encode

BROKEN = OSError(errno.EIO, "broken disk")
FAULTS = [
    ("open", OSError(errno.ENOSPC, "No space left on device")),
    *((name, error) for name in ("fsync", "replace") for error in (BROKEN, KeyboardInterrupt())),
]


def files_of(directory):
    """The bytes of every file of a directory, by its name."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in Path(directory).rglob("*")
        if path.is_file()
    }


def forge(path, change):
    """Change a sealed file and give it a good hash again, as a stranger's program could."""
    body = json.loads(path.read_bytes())
    del body["sha256"]
    change(body)
    path.write_bytes(encode(body))


@contextmanager
def failing(function, error, fail_at):
    """The n-th call of a system call raises; a file that could not be opened is half-written."""
    module, real = (files, builtins.open) if function == "open" else (os, getattr(os, function))
    count = iter(range(100))

    def call(*arguments):
        if next(count) != fail_at:
            return real(*arguments)
        if function == "open":
            Path(arguments[0]).write_bytes(b"half")
        raise type(error)(*error.args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, call, raising=False)
        yield


@contextmanager
def lost_reply(ending, arrived):
    """A remote put of such a name raises, and has arrived all the same or not."""
    memory = type(fsspec.filesystem("memory"))
    pipe = memory.pipe_file

    def lossy(self, path, value, **options):
        if arrived or not path.endswith(ending):
            pipe(self, path, value, **options)
        if path.endswith(ending):
            raise OSError("connection lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "pipe_file", lossy)
        with pytest.raises(OSError, match="connection lost"):
            yield
