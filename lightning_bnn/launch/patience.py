"""Storage that is away for a moment: try again before giving up.

While a run is under way, every error of the storage is waited out for :data:`PATIENCE` seconds: a
full disk, a lost connection, and also permissions or a read-only file system, which an
administrator may set right. Before the run has begun, and for those who only look at it, errors
that a moment will not change are raised at once.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

__all__ = ["PATIENCE", "back_off", "patiently"]

Result = TypeVar("Result")

# For how many seconds storage that fails is tried again, by each call that uses it.
PATIENCE = 60.0

# What another try will not change: names that cannot be.
_FINAL = (FileExistsError, IsADirectoryError, NotADirectoryError)
_FINAL_NUMBERS = (errno.EINVAL, errno.ENAMETOOLONG)
# What a moment will hardly change, and somebody may.
_LASTING = (FileNotFoundError, PermissionError)
_LASTING_NUMBERS = (errno.EROFS,)

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


def patiently(
    call: Callable[[], Result], patience: float = PATIENCE, at_once: bool = False
) -> Result:
    """Call something that uses storage; if that fails, again until it is back.

    Args:
        call: What to do; it must not matter whether it is done once or twice.
        patience: For how many seconds to try.
        at_once: Whether to wait for lost connections and full disks alone: no work is lost yet.

    Raises:
        OSError: It was tried for so long, and the last error was this; or what will not pass.

    Example:
        >>> patiently(lambda: 1)
        1
    """
    begin = time.monotonic()
    for wait in back_off():
        try:
            return call()
        except Exception as error:
            if not _is_passing(error, at_once):
                raise
            waited = time.monotonic() - begin
            if waited >= patience:
                raise _given_up(error, waited) from error
        time.sleep(min(wait, patience - waited))
    raise AssertionError("back_off is endless")


def _given_up(error: Exception, waited: float) -> OSError:
    """The last error, and for how long it was waited; of the kind that its number says."""
    tried = f"(tried again for {waited:.0f} s)"
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, f"{error.strerror} {tried}", error.filename)
    return OSError(f"{type(error).__name__}: {error} {tried}")


def _is_passing(error: Exception, at_once: bool) -> bool:
    """Whether an error of storage may be gone if it is tried again."""
    if isinstance(error, (OSError, asyncio.TimeoutError)):
        number = getattr(error, "errno", None)
        final = isinstance(error, _FINAL) or number in _FINAL_NUMBERS
        lasting = isinstance(error, _LASTING) or number in _LASTING_NUMBERS
        return not final and not (at_once and lasting)
    return any(
        f"{kind.__module__.split('.')[0]}.{kind.__name__}" in _AWAY for kind in type(error).__mro__
    )
