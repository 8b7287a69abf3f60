"""Storage that is away for a moment: what is tried again, for how long, and what is not."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import Any

import pytest

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


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, "stale file handle"),
        ConnectionResetError(),
        asyncio.TimeoutError(),
    ],
    ids=repr,
)
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    call, begin = Failing(error, 1), time.monotonic()
    assert patiently(call) == "done"
    assert call.calls == 2
    assert time.monotonic() - begin >= 0.5  # the storage was given a moment


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("gone"),
        PermissionError("not allowed"),
        OSError(errno.EROFS, "read-only"),
        ValueError("a mistake"),
    ],
    ids=repr,
)
def test_what_would_come_again_is_raised_at_once(error: Exception) -> None:
    call = Failing(error, 100)
    with pytest.raises(type(error)) as caught:
        patiently(call)
    assert caught.value is error
    assert call.calls == 1


def test_patience_ends() -> None:
    call = Failing(OSError("away for good"), 100)
    with pytest.raises(OSError, match="away for good"):
        patiently(call, patience=0.6)
    assert call.calls == 2


@pytest.mark.parametrize(
    ("name", "passing"),
    [
        ("EndpointConnectionError", True),
        ("ReadTimeoutError", True),
        ("IncompleteReadError", True),
        ("NoCredentialsError", False),
    ],
)
def test_errors_of_clients_of_object_stores(name: str, passing: bool) -> None:
    exceptions: Any = pytest.importorskip("botocore.exceptions")
    fields = {
        "endpoint_url": "http://nowhere",
        "error": "refused",
        "actual_bytes": 1,
        "expected_bytes": 2,
        "report": "a mistake",
    }
    call = Failing(getattr(exceptions, name)(**fields), 1)
    if passing:
        assert patiently(call) == "done"
        return
    with pytest.raises(getattr(exceptions, name)):
        patiently(call)
