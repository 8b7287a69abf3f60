"""A writer that is killed after any step leaves a whole posterior: the old one or the new.

The steps are the system calls that change the disk. A forked child takes them up to one of them and
kills itself there.
"""

import io
import os
import re
import shutil
import signal
import warnings
from functools import partial

import pytest
import torch

from lightning_bnn.errors import PosteriorFormatError
from lightning_bnn.storage import files, store
from lightning_bnn.storage.stream import DrawStream
from tests.storage.faults import files_of

pytestmark = pytest.mark.skipif(
    not (hasattr(os, "fork") and os.path.exists("/proc/self/fd")), reason="needs fork and /proc"
)


class Steps:
    """Wraps the calls that change the disk: notes each, and dies after one of them."""

    def __init__(self, root, patch, die_after=None):
        self.root, self.die_after, self.seen = root, die_after, []
        for name in ("mkdir", "fsync", "replace", "unlink", "remove"):
            patch.setattr(os, name, partial(self.call, name, getattr(os, name)))
        patch.setattr(files, "open", self.open, raising=False)

    def call(self, name, function, *arguments):
        path = arguments[-1] if name == "replace" else arguments[0]
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        function(*arguments)
        self.note({"unlink": "remove"}.get(name, name), path)

    def open(self, path, mode):
        steps = self

        class File(io.FileIO):
            def write(self, data):
                half = super().write(data[: len(data) // 2])
                steps.note("half", path)
                super().write(data[half:])
                steps.note("write", path)

        file = File(path, mode.replace("b", ""))
        self.note("create", path)
        return file

    def note(self, name, path):
        relative = os.path.relpath(path, self.root)
        self.seen.append((name, re.sub(r"-[0-9a-f]{16}", "", relative)))
        if len(self.seen) == self.die_after:
            os.kill(os.getpid(), signal.SIGKILL)


def steps_of(root, operate, die_after=None):
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(root, patch, die_after)
        operate()
    return steps.seen


def killed_after_each_step(root, prepare, operate):
    """Kill the operation after each step that changes something; yield all steps, and how many."""
    prepare()
    steps = steps_of(root, operate)
    for count, (name, _) in enumerate(steps, start=1):
        if name != "fsync":
            prepare()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
                child = os.fork()
            if child == 0:
                try:
                    steps_of(root, operate, die_after=count)
                finally:
                    os._exit(1)
            assert os.waitpid(child, 0)[1] == signal.SIGKILL
            yield steps, count


def assert_flushed(steps):
    """A killed process keeps the page cache, a power cut does not: what is relied on comes later.

    A file is flushed before it gets its name, and a folder after it got a new one.
    """
    for index, (name, path) in enumerate(steps):
        if name in ("replace", "mkdir"):
            folder = os.path.normpath(f"{path}/..")
            assert steps[index + 1] == ("fsync", folder), steps
        if name == "replace":
            assert steps[index - 1] == ("fsync", os.path.normpath(f"{folder}/.tmp")), steps


# A posterior that is saved

BLOBS = {
    "A": {"same": torch.ones(3), "old": torch.arange(4)},
    "B": {"same": torch.ones(3), "new": torch.arange(7)},
}


def save(root, version):
    blobs = {name: {"w": tensor} for name, tensor in BLOBS[version].items()}
    store.write(root, kind=version, blobs=blobs, fields={"version": version})


def stored_version(root):
    if not (root / "manifest.json").exists():
        with pytest.raises(PosteriorFormatError, match=r"holds manifest.json|does not exist"):
            store.read(root)
        return None
    stored = store.read(root)
    expected = BLOBS[stored.kind]
    assert stored.blob_names == list(expected)
    assert all(torch.equal(stored.load(name)["w"], expected[name]) for name in expected)
    return stored.kind


@pytest.mark.parametrize("old", ["A", None])
def test_a_killed_save_leaves_old_or_new(tmp_path, old):
    root = tmp_path / "p"

    def prepare():
        shutil.rmtree(root, ignore_errors=True)
        if old:
            save(root, old)

    switch = ("replace", "manifest.json")
    for steps, count in killed_after_each_step(root, prepare, lambda: save(root, "B")):
        assert stored_version(root) == ("B" if switch in steps[:count] else old), steps[:count]
        save(root, "B")
        assert stored_version(root) == "B"
        assert len(files_of(root)) == 3, steps[:count]  # nothing is left behind
    assert_flushed(steps)
    at = steps.index(switch)
    assert {("half", ".tmp"), ("half", "blobs/.tmp")} <= set(steps[:at])
    assert sum(name == "replace" for name, _ in steps[:at]) == 2  # the blobs, all before it
    removed = [step for step in steps if step[0] == "remove"]
    assert removed == [step for step in steps[at:] if step[0] == "remove"]
    assert len(removed) == (1 if old else 0)


# A stream of draws


def weights(step):
    """Two chains, told apart by their values."""
    return {"w": torch.tensor([[step, 0.0], [step, 1.0]]), "n": torch.tensor([step, step])}


def found_steps(root):
    stream = DrawStream.open(root)
    for index, draw in enumerate(stream.draws()):
        step = stream.steps()[index // 2]
        assert (draw["w"].tolist(), draw["n"].item()) == ([step, index % 2], step)
    return stream.steps()


@pytest.mark.parametrize(
    ("before", "operation", "states"),
    [
        ([], "append", [[], [9]]),
        ([1, 2], "append", [[1, 2], [1, 2, 9]]),
        ([1, 2, 3, 4], "truncate", [[1, 2, 3, 4], [1, 2, 3], [1, 2]]),
    ],
)
def test_a_killed_writer_of_draws_leaves_a_whole_stream(tmp_path, before, operation, states):
    root, found = tmp_path / "p", []

    def prepare():
        shutil.rmtree(root, ignore_errors=True)
        fixed = {"c": torch.ones(3)}
        stream = DrawStream.create(root, fields={}, weights=weights(0), fixed=fixed)
        for step in before:
            stream.append(step, weights(step))

    def operate():
        if operation == "append":
            DrawStream.open(root).append(9, weights(9))
        else:
            DrawStream.open(root).truncate(after_step=2)

    for steps, count in killed_after_each_step(root, prepare, operate):
        found.append(found_steps(root))
        stream = DrawStream.open(root)
        stream.truncate(after_step=2)
        stream.append(7, weights(7))
        kept = [step for step in before if step < 3]
        assert found_steps(root) == [*kept, 7]
        # the head, what is fixed, and a blob and a record of each: nothing is left behind
        assert len(files_of(root)) == 2 + 2 * len([*kept, 7]), steps[:count]
    assert found[0] in states[:2]
    assert found[-1] == states[-1]
    assert found == sorted(found, key=states.index)  # never back
    assert_flushed(steps)
    if operation == "append":
        names = [path for name, path in steps if name == "replace"]
        assert names == ["blobs/draw-000000000009.safetensors", "records/000000000009.json"]
        assert {("half", "blobs/.tmp"), ("half", "records/.tmp")} <= set(steps)
    else:
        removed = [path for name, path in steps if name == "remove"]
        assert removed[:2] == ["records/000000000004.json", "records/000000000003.json"]
        assert len(removed) == 4
        last_record = steps.index(("remove", removed[1]))
        assert steps[last_record + 1] == ("fsync", "records")
