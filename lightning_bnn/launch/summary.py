"""A run in one line: how many members are in which state, and when the last will be done."""

from __future__ import annotations

import heapq
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_bnn.launch.rows import RUNNING, Row

__all__ = ["Summary", "duration_text", "summarise"]


@dataclass(frozen=True)
class Summary:
    """How many members are in which state.

    Attributes:
        members: All of them.
        counts: The number in each state that occurs.
        eta: Seconds until the last is done, if nothing fails.
    """

    members: int
    counts: Mapping[str, int]
    eta: float | None = None

    def __str__(self) -> str:
        """One line for a person."""
        said = [f"{self.counts.get('done', 0):,} of {self.members:,} members done"]
        said += [
            f"{self.counts[state]:,} {state}"
            for state in ("running", "queued", "silent", "failed", "diverged")
            if self.counts.get(state)
        ]
        if self.eta is not None:
            said.append(f"ETA {duration_text(self.eta)}")
        return ", ".join(said)


def summarise(rows: Sequence[Row]) -> Summary:
    """Count the members of all rows.

    Example:
        >>> rows = [Row((0, 1), "done", seconds=60.0), Row((2, 3), "training", eta=20.0),
        ...         Row((4,), "queued")]
        >>> print(summarise(rows))
        2 of 5 members done, 2 running, 1 queued, ETA 80 s
    """
    counts: Counter[str] = Counter()
    for row in rows:
        state = "running" if row.state in RUNNING else row.state
        counts[state] += len(row.members) - len(row.diverged)
        counts["diverged"] += len(row.diverged)
    whole = sum(len(row.members) for row in rows)
    return Summary(whole, {name: n for name, n in counts.items() if n}, _eta_of_all(rows))


def _eta_of_all(rows: Sequence[Row]) -> float | None:
    """Hand the queued units to those that run, one after another, as they become free."""
    running = [row for row in rows if row.state in RUNNING]
    whole = [row.seconds for row in rows if row.state == "done" and row.seconds is not None]
    whole = whole or [
        row.seconds + row.eta for row in running if row.seconds is not None and row.eta is not None
    ]
    typical = statistics.median(whole) if whole else None
    ends = []
    for row in running:
        if row.state == "saving":
            ends.append(0.0)
        elif row.eta is not None:
            ends.append(row.eta)
        elif typical is not None:
            ends.append(max(0.0, typical - (row.seconds or 0.0)))
        else:
            return None
    queued = sum(row.state == "queued" for row in rows)
    if not ends or (queued and typical is None):
        return None
    heapq.heapify(ends)
    for _ in range(queued):
        heapq.heapreplace(ends, ends[0] + (typical or 0.0))
    return max(ends)


def duration_text(seconds: float) -> str:
    """A duration for a person.

    Example:
        >>> [duration_text(seconds) for seconds in (0.2, 42.3, 200, 9000, 400_000)]
        ['<1 s', '42 s', '3 min', '2.5 h', '4.6 d']
    """
    if seconds < 1:
        return "<1 s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 99.5 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} d"
