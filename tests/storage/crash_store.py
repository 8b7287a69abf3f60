"""Kill a writer at every step of a write and report what a reader finds; run by test_store.py.

Usage: python crash_store.py DIRECTORY. Prints JSON: the steps of one write in order, and for each
step and moment what was readable afterwards. The store has no hooks: the system calls under it
are wrapped, in forked children, so that torch is imported once.
"""

import builtins
import importlib.util
import json
import os
import shutil
import signal
import stat
import sys
import types
from pathlib import Path


def stand_in(name, folder):
    """Put an empty package in place of one whose import would take most of the time."""
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(folder)]


def contents(version):
    """Three blobs; one is the same in both versions, one exists only in each."""
    import torch

    if version == "A":
        blobs = {"changed": torch.zeros(5), "same": torch.ones(3), "only-old": torch.arange(4)}
    else:
        blobs = {"changed": torch.ones(6), "same": torch.ones(3), "only-new": torch.arange(7)}
    return {name: {"w": tensor} for name, tensor in blobs.items()}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Steps:
    """Wrap the calls that change the disk; note each, or die at one of them."""

    def __init__(self, root, crash_at=None, moment=None):
        self.root, self.crash_at, self.moment, self.seen = root, crash_at, moment, []
        for name in ("mkdir", "fsync", "replace", "unlink"):
            setattr(os, name, self.wrap(name, getattr(os, name)))
        plain_open, steps = builtins.open, self

        def wrapped_open(path, mode="r", *arguments, **options):
            if "b" not in mode or "r" in mode:
                return plain_open(path, mode, *arguments, **options)
            file = steps.wrap("create", plain_open)(path, mode, *arguments, **options)
            write = file.write

            def whole_or_half(data):  # a file may be written in several pieces
                half = (steps.crash_at, steps.moment) == (len(steps.seen) - 1, "middle")
                written = write(data[: len(data) // 2] if half else data)
                file.flush()
                if half:
                    die()
                return written

            return Proxy(file, steps.wrap("write", whole_or_half, path))

        builtins.open = wrapped_open

    def role(self, target):
        if isinstance(target, int):
            status = os.fstat(target)
            if stat.S_ISDIR(status.st_mode):
                for path in (self.root, self.root / "blobs", self.root.parent):
                    if path.exists() and os.path.samestat(path.stat(), status):
                        return f"directory {path.name}"
            parts = self.root.rglob(".tmp-*")
            target = next(path for path in parts if os.path.samestat(path.stat(), status))
        target = Path(target)
        if target in (self.root, self.root / "blobs"):
            return f"directory {target.name}"
        if target.name.startswith(".tmp-"):
            return "temporary blob" if target.parent.name == "blobs" else "temporary manifest"
        return "manifest" if target.name == "manifest.json" else f"blob {target.name}"

    def wrap(self, name, function, target=None):
        def step(*arguments, **options):
            index = len(self.seen)
            place = arguments[-1] if name == "replace" else (target or arguments[0])
            self.seen.append([name, self.role(place)])
            if (self.crash_at, self.moment) == (index, "before"):
                die()
            result = function(*arguments, **options)
            if (self.crash_at, self.moment) == (index, "after"):
                die()
            return result

        return step


class Proxy:
    """A file object whose write is another function."""

    def __init__(self, file, write):
        self.file, self.write = file, write

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


def in_child(function):
    """Run in a fork; return the number of the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


def found(root):
    """Name what a reader gets: 'A', 'B', 'nothing' or a description of the damage."""
    import torch

    from lightning_bnn.errors import PosteriorFormatError
    from lightning_bnn.storage import store

    try:
        stored = store.read(root)
        blobs = {name: stored.load(name) for name in stored.blob_names}
    except PosteriorFormatError as error:
        missing = "holds manifest.json" in str(error) or "does not exist" in str(error)
        return "nothing" if missing else f"broken: {error}"
    for version in "AB":
        expected = contents(version)
        if stored.kind == version and blobs.keys() == expected.keys():
            same = [torch.equal(blobs[name]["w"], expected[name]["w"]) for name in blobs]
            if all(same) and stored.fields == {"version": version}:
                return version
    return f"mixed: {stored.kind} {blobs}"


def leftovers(root):
    """List the files that the manifest does not name."""
    manifest = json.loads((root / "manifest.json").read_bytes())
    named = {"manifest.json", *(entry["file"] for entry in manifest["blobs"])}
    return sorted(p.name for p in root.rglob("*") if p.is_file() and p.name not in named)


def scenario(root, kind, prepare, operate, outcome):
    """Crash at every step of an operation, and note what is found and can be done afterwards."""
    notes = root.parent / "steps.json"

    def rehearse():
        steps = kind(root)
        operate()
        notes.write_text(json.dumps(steps.seen))

    prepare()
    assert in_child(rehearse) == 0, "an operation without a crash failed"
    steps = json.loads(notes.read_text())
    crashes = []
    for index, (name, role) in enumerate(steps):
        moments = ["before"]  # just after a step is just before the next, as far as the disk goes
        if name == "write":
            moments.append("middle")
        if name == "replace" or index == len(steps) - 1:
            moments.append("after")
        for moment in moments:
            prepare()

            def crash(index=index, moment=moment):
                kind(root, index, moment)
                operate()

            ended = in_child(crash)
            point = f"{moment} {name} {role}"
            crashes.append({"point": point, "signal": ended, **outcome()})
    return {"steps": steps, "crashes": crashes}


def write_over(root, old):
    """Write B over `old` (None: over nothing) and crash at every step."""
    from lightning_bnn.storage import store

    def save(version):
        store.write(root, kind=version, blobs=contents(version), fields={"version": version})

    def prepare():
        shutil.rmtree(root, ignore_errors=True)
        if old:
            save(old)

    def outcome():
        first = found(root)
        save("B")
        return {"found": first, "again": found(root), "leftovers": leftovers(root)}

    return scenario(root, Steps, prepare, lambda: save("B"), outcome)


if __name__ == "__main__":
    base = Path(sys.argv[1])
    root = Path(importlib.util.find_spec("lightning_bnn").origin).parent
    stand_in("lightning_bnn", root)
    stand_in("lightning_bnn.storage", root / "storage")
    print(json.dumps({old or "nothing": write_over(base / "p", old) for old in ("A", None)}))
