"""Storage that is away for a moment: try again before giving up."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["back_off", "patiently"]

Result = TypeVar("Result")

# What another try will not change.
_FINAL = (
    *(FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError),
    PermissionError,
)
_FINAL_NUMBERS = (errno.EROFS, errno.EINVAL, errno.ENAMETOOLONG)

# Clients of object stores have errors of their own for a connection that is not there. Others, such
# as that of missing credentials, stay.
_AWAY = {
    "aiohttp.ClientError",
    *(f"botocore.{name}Error" for name in ("Client", "Connection", "HTTPClient", "IncompleteRead")),
}


def back_off(first: float = 0.5, longest: float = 30.0) -> Iterator[float]:
    """Seconds to wait before the next try, the one after it, and so on.

    Example:
        >>> from itertools import islice
        >>> list(islice(back_off(first=1.0, longest=5.0), 5))
        [1.0, 2.0, 4.0, 5.0, 5.0]
    """
    wait = first
    while True:
        yield wait
        wait = min(2 * wait, longest)


def patiently(call: Callable[[], Result], patience: float = 60.0) -> Result:
    """Call something that uses storage; if that is away, again until it is back.

    Args:
        call: What to do; it must not matter whether it is done once or twice.
        patience: For how many seconds to try.

    Example:
        >>> patiently(lambda: 1)
        1
    """
    end = time.monotonic() + patience
    for wait in back_off():
        try:
            return call()
        except Exception as error:
            if not _is_passing(error) or time.monotonic() + wait > end:
                raise
        time.sleep(wait)
    raise AssertionError("back_off is endless")


def _is_passing(error: Exception) -> bool:
    """Whether an error of storage may be gone in a moment."""
    if isinstance(error, (OSError, asyncio.TimeoutError)):
        return not isinstance(error, _FINAL) and getattr(error, "errno", None) not in _FINAL_NUMBERS
    return any(
        f"{kind.__module__.split('.')[0]}.{kind.__name__}" in _AWAY for kind in type(error).__mro__
    )
