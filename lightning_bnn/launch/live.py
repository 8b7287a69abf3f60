"""Watch a run until it ends: one live table on a terminal, a few lines in a log file.

The storage is read in a thread of its own, every few seconds and less often where that takes long,
so that slow or unreachable storage holds up neither the results nor the display. What the driver of
a run knows already is shown without waiting for the storage.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live

from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.results import MemberResult
from lightning_bnn.launch.rows import RUNNING, Row, RunReader, State
from lightning_bnn.launch.summary import Summary, duration_text, summarise
from lightning_bnn.launch.table import MOST_ROWS, encodable, node_name, other_lines, rich_table

if TYPE_CHECKING:
    from lightning_bnn.launch.run import LaunchedRun

__all__ = ["RunDisplay", "result_line", "watch", "with_results"]

# A pipe whose reader has gone, a full disk, a file that was closed: no reason to end a run.
_NOBODY_LISTENS = (OSError, ValueError)
_METRICS = ("val_nll", "val_loss", "train_loss")
_LONGEST_QUIET = 600.0
_DRAW_SECONDS = 1.0
_LONGEST_PAUSE = 30.0
_LAST_READ_SECONDS = 5.0
_LATE_SECONDS = 15.0


def watch(run: LaunchedRun, stream: IO[str] | Console | None = None) -> list[MemberResult]:
    """Wait for all members of a run, and show meanwhile how they do.

    Args:
        run: A run that was launched.
        stream: Where to show it; by default the standard output. On a terminal it is one table that
            is drawn anew each second. Elsewhere it is a line for each member that ends, and one
            for the whole run, a minute apart or more.

    Returns:
        The results of all members, in the order of their numbers.

    Raises:
        LaunchError: Members failed or diverged.
    """
    results: dict[int, MemberResult] = {}
    with RunDisplay(run.records, stream) as display:
        try:
            for result in run.as_completed():
                results[result.member] = result
                display.ended(result)
        except KeyboardInterrupt:  # it may have come while a result was being shown
            run.cancel()
            raise
    return [results[member] for member in sorted(results)]


class RunDisplay:
    """Shows a run for the time of a ``with`` block.

    Args:
        records: The records of the run.
        stream: As for :func:`watch`.
        read_seconds: The least time from one reading of the storage to the next.
        summary_seconds: The least time between two lines about the whole run in a log file.
    """

    def __init__(
        self,
        records: RunRecords,
        stream: IO[str] | Console | None = None,
        read_seconds: float = 3.0,
        summary_seconds: float = 60.0,
    ) -> None:
        self.console = stream if isinstance(stream, Console) else Console(file=stream)
        self.read_seconds, self.summary_seconds = read_seconds, summary_seconds
        # FORCE_COLOR makes a terminal of any file; a log must not be filled with its control codes
        real = isinstance(stream, Console) or self.console.file.isatty()
        self.live = real and self.console.is_terminal and not self.console.is_dumb_terminal
        self._reader = RunReader(records)
        self._rows: list[Row] | None = None
        self._results: dict[int, MemberResult] = {}
        self._error: Exception | None = None
        self._began = self._read_at = self._said_at = time.monotonic()
        self._pause = read_seconds
        self._said: Summary | None = None
        self._lock = threading.Lock()  # of the stream
        self._stopped, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read_on, name="reading", daemon=True)
        self._screen: Live | None = None

    def __enter__(self) -> RunDisplay:
        """Begin."""
        self._thread.start()
        if self.live:
            shared = self.console.file in (sys.stdout, sys.stderr)  # keep what others print above
            self._screen = Live(
                console=self.console,
                get_renderable=self._table,
                auto_refresh=False,
                redirect_stdout=shared,
                redirect_stderr=shared,
            )
            self._screen.start()
            threading.Thread(target=self._draw_on, name="drawing", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Read once more, and leave the last table or the last line."""
        self._stopped.set()
        if kind is None or issubclass(kind, Exception):  # else somebody is in a hurry
            self._thread.join(_LAST_READ_SECONDS)
        if self._screen is not None:
            with suppress(*_NOBODY_LISTENS):
                self._screen.stop()
        elif self._rows is not None:
            self._say_summary(summarise(self.rows()))

    def ended(self, result: MemberResult) -> None:
        """Show that a member has ended."""
        if not self.live:
            rows = (row for row in self._rows or () if result.member in row.members)
            hosts = (row.host for row in rows if row.node == result.node)
            self._say(result_line(result, next(hosts, None)))
        self._results[result.member] = result

    def wait(self) -> None:
        """Wait until the storage says that nothing more will come."""
        while not self._over.wait(0.5):
            pass

    def rows(self) -> list[Row]:
        """The rows of this moment: as they were read, and what has come since."""
        since = time.monotonic() - self._read_at
        return [_later(row, since) for row in with_results(self._rows or (), self._results)]

    # ---------------------------------------------------------------- reading

    def _read_on(self) -> None:
        last = False
        while True:
            begin = time.monotonic()
            try:
                self._rows = self._reader.rows(time.time())
                self._read_at, self._error = time.monotonic(), None
            except Exception as error:  # it may be back in a moment; the run knows better
                self._error = error
            if last:
                return
            if self._rows is not None:
                rows = self.rows()
                if self._error is None and all(row.ended for row in rows):
                    self._over.set()
                if not self.live:
                    self._say_if_due(summarise(rows))
            took = time.monotonic() - begin
            self._pause = max(self.read_seconds, min(10 * took, _LONGEST_PAUSE))
            last = self._stopped.wait(self._pause)

    # ---------------------------------------------------------------- showing

    def _draw_on(self) -> None:
        assert self._screen is not None
        while not self._stopped.wait(_DRAW_SECONDS):
            with suppress(*_NOBODY_LISTENS):
                self._screen.refresh()

    def _table(self) -> RenderableType:
        late = time.monotonic() - self._read_at
        note = None
        if late > self._pause + _LATE_SECONDS:
            why = "no answer" if self._error is None else str(self._error).split("\n")[0]
            note = f"The storage was last read {duration_text(late)} ago: {why}"
        if self._rows is None:
            return note or "Reading the storage of the run"
        rows = self.rows()
        most = MOST_ROWS
        if not self._stopped.is_set():
            most = max(1, min(most, self.console.size.height - other_lines(rows)))
        return rich_table(rows, most=most, note=note)

    def _say_if_due(self, summary: Summary) -> None:
        quiet = time.monotonic() - self._said_at
        changed = self._said is None or self._said.counts != summary.counts
        if quiet >= (self.summary_seconds if changed else _LONGEST_QUIET):
            self._say_summary(summary)

    def _say_summary(self, summary: Summary) -> None:
        self._said, self._said_at = summary, time.monotonic()
        self._say(f"after {duration_text(self._said_at - self._began)}: {summary}")

    def _say(self, line: str) -> None:
        file = self.console.file
        known = encodable(line, getattr(file, "encoding", None) or "utf-8")
        with self._lock, suppress(*_NOBODY_LISTENS):
            print(known, file=file, flush=True)


def result_line(result: MemberResult, host: str | None = None) -> str:
    """A line about a member that has ended.

    Example:
        >>> print(result_line(MemberResult(3, "done", 1, {"val_nll": 0.3125}, seconds=42.0), "a"))
        member 3 done in 42 s on node a, attempt 1, val_nll 0.3125
        >>> print(result_line(MemberResult(4, "failed", 2, error="OSError: the disk is full")))
        member 4 failed, attempt 2: OSError: the disk is full
    """
    said = f"member {result.member} {result.status}"
    if result.seconds is not None:
        said += f" in {duration_text(result.seconds)}"
    if result.node is not None or host is not None:
        said += f" on node {node_name(host, result.node)}"
    said += f", attempt {result.attempt}"
    if not result.ok:
        return f"{said}: {((result.error or '').strip().splitlines() or ['unknown'])[0]}"
    names = [name for name in (*_METRICS, *result.metrics) if result.metrics.get(name) is not None]
    return f"{said}, {names[0]} {result.metrics[names[0]]:.4g}" if names else said


def _later(row: Row, seconds: float) -> Row:
    """A row some seconds after it was read."""
    if row.state not in (*RUNNING, "silent"):
        return row
    return replace(
        row,
        eta=None if row.eta is None else max(0.0, row.eta - seconds),
        age=None if row.age is None else row.age + seconds,
        seconds=None if row.seconds is None else row.seconds + seconds,
    )


def with_results(rows: Sequence[Row], results: Mapping[int, MemberResult]) -> list[Row]:
    """The rows with what a driver knows already: members that have ended since they were read.

    Args:
        rows: As they were read.
        results: The members that have ended, by number.
    """
    found = []
    for row in rows:
        ended = [results[member] for member in row.members if member in results]
        if row.state in ("done", "diverged") or len(ended) < len(row.members):
            found.append(row)
            continue
        last = ended[0]
        diverged = tuple(one.member for one in ended if one.status == "diverged")
        failed = last.status == "failed"
        whole: State = "diverged" if len(diverged) == len(ended) else "done"
        found.append(
            replace(
                row,
                state="failed" if failed else whole,
                node=last.node or row.node,
                attempt=last.attempt,
                step=row.step if last.steps is None else last.steps,
                steps=row.steps if last.steps is None else last.steps,
                loss=last.metrics.get("train_loss", row.loss),
                seconds=row.seconds if last.seconds is None else last.seconds,
                eta=None,
                age=None,
                diverged=diverged,
                error=(last.error or "unknown") if failed else None,
            )
        )
    return found
