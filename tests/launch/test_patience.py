"""Storage that is away for a moment: what is tried again, for how long, and what is not."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from botocore.exceptions import (
    EndpointConnectionError,
    IncompleteReadError,
    NoCredentialsError,
    ReadTimeoutError,
)

from lightning_bnn.launch import patience
from lightning_bnn.launch.patience import patiently
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.storage import files as storage_files


class Failing:
    """Raises for its first calls."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times, self.calls = error, times, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return "done"


class Clock:
    """Passes no time."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(patience, "time", clock)
    return clock


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, "stale file handle"),
        ConnectionResetError(),
        asyncio.TimeoutError(),
        EndpointConnectionError(endpoint_url="http://nowhere"),
        ReadTimeoutError(endpoint_url="http://nowhere"),
        IncompleteReadError(actual_bytes=1, expected_bytes=2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_may_pass_is_tried_again(clock: Clock, error: Exception) -> None:
    call = Failing(error, 2)
    assert patiently(call) == "done"
    assert (call.calls, clock.now) == (3, 0.5 + 1.0)  # the storage was given a moment


LASTING = [
    FileNotFoundError(errno.ENOENT, "gone", "file"),
    PermissionError(errno.EACCES, "denied", "file"),
    PermissionError(errno.EPERM, "not permitted", "file"),
    OSError(errno.EROFS, "read-only", "file"),
]


def its_number(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, type(error).__name__)


@pytest.mark.parametrize("error", LASTING, ids=its_number)
def test_what_somebody_may_mend_is_waited_out_by_a_run_alone(clock: Clock, error: OSError) -> None:
    call = Failing(error, 6)
    assert patiently(call) == "done"
    assert clock.now > 20
    call = Failing(error, 6)
    with pytest.raises(type(error)) as caught:
        patiently(call, at_once=True)
    assert caught.value is error
    assert call.calls == 1


@pytest.mark.parametrize(
    "error",
    [
        NotADirectoryError("a file on the way"),
        OSError(errno.ENAMETOOLONG, "too long"),
        ValueError("a mistake"),
        NoCredentialsError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_would_come_again_is_raised_at_once(error: Exception) -> None:
    call = Failing(error, 100)
    with pytest.raises(type(error)) as caught:
        patiently(call)
    assert caught.value is error
    assert call.calls == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("away for good"), r"^OSError: away for good \(tried again for 60 s\)$"),
        (
            PermissionError(errno.EACCES, "denied", "a/file"),
            r"^\[Errno 13\] denied \(tried again for 60 s\): 'a/file'$",
        ),
        (EndpointConnectionError(endpoint_url="http://nowhere"), r"nowhere.*\(tried again for"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_patience_ends_and_says_what_it_has_waited_for(
    clock: Clock, error: Exception, words: str
) -> None:
    kind = type(error) if isinstance(error, OSError) else OSError
    with pytest.raises(kind, match=words) as caught:
        patiently(Failing(error, 100))
    assert caught.value.__cause__ is error
    assert clock.now == patience.PATIENCE


def test_a_run_outlives_storage_that_may_not_be_used(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records are waited for; who begins a run there, or only looks at one, is told at once."""
    records, unit = RunRecords(tmp_path), Unit((0,))
    records.begin({"units": [[0]]})
    denied = Failing(PermissionError(errno.EACCES, "denied"), 6)

    def sync(folder: Path) -> None:
        denied()

    monkeypatch.setattr(storage_files, "_sync", sync)
    records.grant(unit, 1)
    assert clock.now > 20
    denied.calls = 0
    with pytest.raises(PermissionError):
        RunRecords(tmp_path / "new").begin({"units": [[0]]})
    assert denied.calls == 1
    looking = RunRecords(tmp_path, only_look=True)
    denied.calls = 0
    monkeypatch.setattr(looking.files, "get", lambda *_: denied())
    with pytest.raises(PermissionError):
        looking.granted(unit)
    assert denied.calls == 1
