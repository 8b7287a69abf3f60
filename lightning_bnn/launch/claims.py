"""One driver for a run at a time, where that can be known.

On a local disk the claim is a lock of the driver's process, gone the moment that it dies. On remote
storage only drivers of the same process see each other; of two others the later one takes the run
over, and the earlier one ends when it finds out (see :mod:`lightning_bnn.launch.driver`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.records import RunRecords

__all__ = ["claim_run"]

_LOCK = threading.Lock()
_CLAIMED: set[str] = set()


def claim_run(records: RunRecords) -> Callable[[], None]:
    """Keep other drivers from a run until the result is called.

    Raises:
        ConfigurationError: Another driver has it.

    Example:
        >>> release = claim_run(RunRecords("memory://claims-doc"))
        >>> try:
        ...     claim_run(RunRecords("memory://claims-doc/"))
        ... except ConfigurationError as error:
        ...     print(error)
        The run in memory://claims-doc is under way in this process. Wait for it, or cancel() it.
        >>> release()
        >>> claim_run(RunRecords("memory://claims-doc"))()
    """
    with _LOCK:
        if records.storage in _CLAIMED:  # the lock of a process does not keep out itself
            raise ConfigurationError(
                f"The run in {records.storage} is under way in this process. Wait for it, or "
                "cancel() it."
            )
        try:
            unlock = records.files.claim()
        except ConfigurationError as error:
            raise ConfigurationError(
                f"The run in {records.storage} is under way: another process on this storage "
                "drives it. Wait for that one or end it; or use another storage= for a new run."
            ) from error
        _CLAIMED.add(records.storage)

    def release() -> None:
        with _LOCK:
            if records.storage in _CLAIMED:
                _CLAIMED.remove(records.storage)
                unlock()

    return release
