"""What goes wrong under a store, and what lies on the disk then."""

import builtins
import errno
from pathlib import Path


def files_of(directory):
    """The bytes of every file of a directory, by its name."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in Path(directory).rglob("*")
        if path.is_file()
    }


class FullDisk:
    """A disk on which the n-th new file gets half of its bytes, then no more."""

    def __init__(self, fail_at):
        self.left = fail_at

    def open(self, path, mode="r"):
        file = builtins.open(path, mode)  # noqa: SIM115
        if mode == "xb":
            self.left -= 1
            if self.left < 0:
                file.write(b"half")
                file.close()
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return file
