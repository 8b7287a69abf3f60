"""Storage that is away for a moment: what is tried again, for how long, and what is not."""

from __future__ import annotations

import asyncio
import errno
import time
from itertools import islice
from typing import Any

import pytest

from lightning_bnn.launch.patience import back_off, patiently


class Failing:
    """Raises for its first calls."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times, self.calls = error, times, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return "done"


def test_pauses_double_up_to_the_longest() -> None:
    assert list(islice(back_off(), 8)) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert list(islice(back_off(first=3.0, longest=4.0), 3)) == [3.0, 4.0, 4.0]


@pytest.mark.parametrize(
    "error",
    [
        OSError("away"),
        OSError(errno.ESTALE, "stale file handle"),
        OSError(errno.ENOSPC, "no space left"),
        ConnectionResetError(),
        TimeoutError(),
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
        FileExistsError("there"),
        IsADirectoryError("a directory"),
        NotADirectoryError("a file"),
        PermissionError("not allowed"),
        ValueError("a mistake"),
        KeyError("a mistake"),
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


def test_it_is_tried_again_and_again() -> None:
    call = Failing(OSError("away"), 2)
    assert patiently(call) == "done"
    assert call.calls == 3


def _errors_of_object_stores() -> list[tuple[str, bool]]:
    return [
        ("EndpointConnectionError", True),
        ("ConnectTimeoutError", True),
        ("ConnectionClosedError", True),
        ("ReadTimeoutError", True),
        ("IncompleteReadError", True),
        ("NoCredentialsError", False),
        ("ParamValidationError", False),
    ]


@pytest.mark.parametrize(("name", "passing"), _errors_of_object_stores())
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


def test_an_interrupt_is_not_held_back() -> None:
    class Interrupted:
        calls = 0

        def __call__(self) -> None:
            self.calls += 1
            raise KeyboardInterrupt

    call = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        patiently(call)
    assert call.calls == 1
