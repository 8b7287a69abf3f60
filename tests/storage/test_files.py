"""Exclusive creation of a file: of several writers one succeeds, on the disk and on remote storage.

What else files do is tested with the stores that use them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_bnn.storage.files import Files, LocalFiles, open_directory


@pytest.fixture(params=["local", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    """An empty place that does not exist yet."""
    place = tmp_path / "place"
    return open_directory(place if request.param == "local" else f"memory:/{place}")


def race(call: Callable[[int], Any], count: int = 8) -> list[Any]:
    """What each of ``count`` threads gets from a call that all begin together."""
    barrier = Barrier(count)

    def begin(number: int) -> Any:
        barrier.wait()
        return call(number)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # so that threads change in the midst of a call
    try:
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(begin, range(count)))
    finally:
        sys.setswitchinterval(usual)


def test_a_file_is_created_once(files: Files) -> None:
    assert files.create("a/b/c", b"first")
    assert not files.create("a/b/c", b"second")
    # the answer to a first try may have been lost: whoever asks again has to learn that it won
    assert files.create("a/b/c", b"first")
    assert (files.get("a/b/c"), files.names("a/b")) == (b"first", ["c"])
    files.put("a/b/c", b"third")
    assert not files.create("a/b/c", b"first")
    files.remove("a/b/c")
    assert files.create("a/b/c", b"second")
    assert files.get("a/b/c") == b"second"


def test_of_eight_threads_one_succeeds(files: Files) -> None:
    for turn in range(40):
        name = f"folder-{turn}/one"
        told = race(lambda number, name=name: files.create(name, b"%d" % number))  # type: ignore[misc]
        winners = [number for number, won in enumerate(told) if won]
        assert len(winners) == 1
        assert files.get(name) == b"%d" % winners[0]


def test_no_temporary_file_is_left(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.create("one", b"first")
    files.create("one", b"second")
    files.put("two", b"third")
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]


def test_what_cannot_be_created_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        LocalFiles(tmp_path).create("file/one", b"data")
    assert os.listdir(tmp_path) == ["file"]


class LosesAnswers(MemoryFileSystem):  # type: ignore[misc]
    """Writes, and then says that the connection broke."""

    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        super().pipe_file(path, value, mode=mode, **options)
        raise ConnectionResetError("the connection broke")


class Away(MemoryFileSystem):  # type: ignore[misc]
    """Writes nothing."""

    cachable = False

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        raise ConnectionRefusedError("nobody is there")


def test_a_lost_answer_is_found_out_by_the_contents() -> None:
    files = Files(LosesAnswers(), "/lost-answers", "memory://lost-answers")
    assert files.create("one", b"mine")
    assert not files.create("one", b"of another")
    assert files.get("one") == b"mine"


def test_remote_storage_that_is_away_is_no_loss_of_the_race() -> None:
    files = Files(Away(), "/away", "memory://away")
    with pytest.raises(ConnectionRefusedError):
        files.create("one", b"mine")
