"""Storage that is away for a moment: what is tried again, for how long, and what is not."""

from __future__ import annotations

import asyncio
import errno

import pytest
from botocore.exceptions import (
    EndpointConnectionError,
    IncompleteReadError,
    NoCredentialsError,
    ReadTimeoutError,
)

from lightning_bnn.launch import patience
from lightning_bnn.launch.patience import patiently


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


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("gone"),
        PermissionError("not allowed"),
        OSError(errno.EROFS, "read-only"),
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


def test_patience_ends(clock: Clock) -> None:
    with pytest.raises(OSError, match="away for good"):
        patiently(Failing(OSError("away for good"), 100))
    assert 30 < clock.now <= 60
