"""How far a run is: what attempts tell through the storage, and the live table that shows it.

An attempt tells every few seconds how far it is; a thread does so, so that a long step or a long
validation is not taken for death. All that is shown comes from the storage (commits, leases,
progress), so that a run looks the same from any machine, while it runs and afterwards. The states
of a unit:

========  =========================================================================================
queued    no attempt has started, or the last was given up and the next has not started
starting  an attempt is making its network and its data, or resumes
training  it takes steps
saving    it has taken the last step
silent    none of these is certain: there was no sign of life for a minute
failed    the last attempt ended in an error and no other has started
diverged  it is done, and none of its members has finite weights
done      its result is committed
========  =========================================================================================

A sign of life holds the time of the host that gave it, whose clock may differ from the reader's.
How fast a unit is follows from times of its own host alone. How old its last sign is, is measured
against the reader's clock the first time (a sign from the future counts as new); a reader that
looks again goes by when it saw the sign change.

The table fits the screen: columns that a narrow one has no room for are left out, and no row takes
two lines. Of many units those are shown that run or have failed; the others are counted. It is all
in words, so that it can be read without colours.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Literal

import torch
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.stored import MemberResult, member_results
from lightning_bnn.launch.units import Unit
from lightning_bnn.lightning import pl

if TYPE_CHECKING:
    from lightning_bnn.launch.run import LaunchedRun

__all__ = ["ProgressCallback", "Row", "RunDisplay", "RunReader", "RunTable", "summarise", "watch"]

State = Literal["queued", "starting", "training", "saving", "silent", "failed", "diverged", "done"]
RUNNING = ("starting", "training", "saving")
SILENT_AFTER = 60.0  # signs come every 5 s or sooner
MOST_ROWS = 40
_NO_RETRY_AFTER = 120.0  # the driver waits at most a minute before it tries again
_READERS = 8
_MOST_ERRORS, _LINES_OF_ERROR = 3, 2
# What comes first where there are too many.
_ORDER = ("failed", "diverged", "silent", "saving", "training", "starting", "done", "queued")
_STYLES = {"failed": "bold red", "diverged": "bold red", "silent": "yellow", "done": "green"}
# What is left out first where the screen is narrow.
_LEFT_OUT = ("last sign", "time", "device", "attempt", "node", "loss", "ETA")
_TO_THE_LEFT = ("member", "state", "node", "device")
_LONGEST_NODE = 20
_METRICS = ("val_nll", "val_loss", "train_loss")
# A pipe whose reader has gone, a full disk, a file that was closed: no reason to end a run.
_NOBODY_LISTENS = (OSError, ValueError)
_LONGEST_QUIET = 600.0
_LONGEST_PAUSE = 30.0
_LAST_READ_SECONDS = 5.0
_LATE_SECONDS = 15.0


# -------------------------------------------------------------------- telling, in a worker


class ProgressCallback(pl.Callback):
    """Tell how far a fit is, every ``seconds`` seconds, from its making until :meth:`stop`.

    Args:
        records: The records of the run.
        unit: What is trained.
        attempt: The number of the attempt.
        seconds: How often.
        facts: What else to tell, such as the node.
    """

    def __init__(
        self,
        records: RunRecords,
        unit: Unit,
        attempt: int,
        seconds: float = 5.0,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.records, self.unit, self.seconds = records, unit, seconds
        self._trainer: pl.Trainer | None = None
        self._loss: Any = None
        self._told: dict[str, Any] = {
            "attempt": attempt,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": time.time(),
            "phase": "starting",
            **(facts or {}),
        }
        self._stopped = threading.Event()
        self.tell()
        self._thread = threading.Thread(target=self._keep_telling, name="progress", daemon=True)
        self._thread.start()

    def tell(self, **facts: Any) -> None:
        """Write the progress now; where that fails, the next one will tell as much."""
        self._told.update(facts)
        told = {**self._told, "time": time.time()}
        if (trainer := self._trainer) is not None:
            told |= {"step": trainer.global_step, "epoch": trainer.current_epoch}
            told["loss"] = _plain_number(self._loss)
        with suppress(Exception):  # the storage may be away for a moment
            self.records.put_progress(self.unit, told)

    def stop(self) -> None:
        """Tell no more."""
        self._stopped.set()
        self._thread.join(timeout=self.seconds)

    def _keep_telling(self) -> None:
        while not self._stopped.wait(self.seconds):
            self.tell()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Know the trainer from now on, how long it will take, and where this attempt began."""
        self._trainer, steps = trainer, trainer.estimated_stepping_batches
        self._told["steps"] = int(steps) if 0 < steps < math.inf else None
        self._told |= {"phase": "training", "first": [time.time(), trainer.global_step]}

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the loss: a tensor, so that no device has to wait for it."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What follows is the saving."""
        self._told["phase"] = "saving"


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Logged metrics as plain numbers; None for those that are not finite, which JSON lacks.

    Example:
        >>> plain_metrics({"loss": torch.tensor(0.5), "bad": torch.tensor(float("nan"))})
        {'loss': 0.5, 'bad': None}
    """
    return {name: _plain_number(value) for name, value in metrics.items()}


def _plain_number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # not one number
        return None
    return number if math.isfinite(number) else None


# -------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Row:
    """A unit as it is shown.

    Attributes:
        members: The numbers of its members.
        state: See above.
        host: The name of the machine that it runs on, or ran on last.
        node: The node of the cluster there.
        device: The device there.
        step: The steps taken.
        steps: The steps of the whole fit, where they are known.
        loss: The last training loss, if it is finite.
        attempt: The number of the last attempt that has started; 0 if none has.
        seconds: How long that attempt took, or has taken so far.
        eta: Seconds until its last step, at the speed of this attempt.
        age: Seconds since its last sign of life.
        diverged: Those of its members that have no finite weights.
        error: Why the last attempt has failed.
        final: Whether there will be no other.
    """

    members: tuple[int, ...]
    state: State = "queued"
    host: str | None = None
    node: str | None = None
    device: str | None = None
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    attempt: int = 0
    seconds: float | None = None
    eta: float | None = None
    age: float | None = None
    diverged: tuple[int, ...] = ()
    error: str | None = None
    final: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        if self.state == "failed":
            return self.final or (self.age or 0.0) > _NO_RETRY_AFTER
        return self.state in ("done", "diverged")


class RunReader:
    """Reads a run again and again: what has ended is read once, and clocks need not agree.

    Args:
        records: The records of the run.

    Example:
        >>> records = RunRecords("memory://rows-doc")
        >>> _ = records.begin({"units": [[0, 1], [2, 3]]})
        >>> records.grant(Unit((0, 1)), attempt=1)
        >>> records.put_progress(Unit((0, 1)), {"attempt": 1, "phase": "training", "time": 110.0,
        ...     "host": "a", "started": 99.0, "step": 20, "steps": 50, "first": [100.0, 0]})
        >>> for row in RunReader(records).rows(now=113.0):
        ...     print(row.members, row.state, row.step, row.eta)
        (0, 1) training 20 12.0
        (2, 3) queued None None
    """

    def __init__(self, records: RunRecords) -> None:
        self.records = records
        self._done: dict[Unit, Row] = {}
        self._told: dict[Unit, dict[str, Any]] = {}
        self._seen: dict[Unit, tuple[Any, float]] = {}  # the last sign of life, and since when

    def rows(self, now: float) -> list[Row]:
        """A row for each unit, in their order.

        Args:
            now: The time, in seconds since the epoch.

        Raises:
            ConfigurationError: There is no run in this storage.
        """
        units, begun = self.records.units(), self.records.unit_names()
        open_units = [unit for unit in units if unit.name in begun and unit not in self._done]
        with ThreadPoolExecutor(_READERS) as pool:  # remote storage takes its time for each
            read = pool.map(lambda unit: self._read(unit, now), open_units)
            rows = dict(zip(open_units, read, strict=True))
        self._done |= {unit: row for unit, row in rows.items() if row.state in ("done", "diverged")}
        return [self._done.get(unit) or rows.get(unit) or Row(unit.members) for unit in units]

    def _read(self, unit: Unit, now: float) -> Row:
        commit = self.records.committed(unit)
        if commit is not None:
            result = commit["result"]
            return _done_row(unit, result, member_results(self.records, unit, result))
        told = self.records.progress(unit) or {}
        # a zombie may have written over it, or the storage may be away for a moment
        if told.get("attempt", 0) < self._told.get(unit, {}).get("attempt", 0):
            told = self._told[unit]
        self._told[unit] = told
        return _open_row(unit, self.records.lease(unit), told, self._age(unit, told, now))

    def _age(self, unit: Unit, told: Mapping[str, Any], now: float) -> float:
        """Seconds since the last sign of life."""
        sign = (told.get("attempt"), told.get("time"))
        before, since = self._seen.get(unit, (None, now))
        if before is None:
            since = min(now, told.get("time", now))
        elif before != sign:
            since = now
        self._seen[unit] = (sign, since)
        return now - since


def _done_row(unit: Unit, result: Mapping[str, Any], members: Sequence[MemberResult]) -> Row:
    first = members[0]
    diverged = tuple(member.member for member in members if not member.ok)
    return Row(
        unit.members,
        "diverged" if len(diverged) == len(members) else "done",
        host=first.host,
        node=first.node,
        device=result.get("device"),
        step=first.steps,
        steps=first.steps,
        loss=first.metrics.get("train_loss"),
        attempt=first.attempt,
        seconds=first.seconds,
        diverged=diverged,
    )


def _open_row(unit: Unit, lease: Mapping[str, Any], told: Mapping[str, Any], age: float) -> Row:
    """The row of a unit without a commit."""
    phase: Any = told.get("phase")
    attempt, final = told.get("attempt", 0), "error" in lease
    if final or phase == "failed":
        error = lease.get("error") or told.get("error")
        if not told:
            return Row(unit.members, "failed", error=error, final=final)
        state: State = "failed"
    elif attempt < lease["attempt"] or not told:
        return Row(unit.members, attempt=attempt)
    else:
        error, state = None, "silent" if age > SILENT_AFTER else phase
    facts: dict[str, Any] = {
        name: told.get(name) for name in ("host", "node", "device", "step", "steps", "loss")
    }
    taken = told["time"] - told["started"]
    return Row(
        unit.members,
        state,
        **facts,
        attempt=attempt,
        seconds=taken if state == "failed" else taken + age,
        eta=_eta(told, age) if state == "training" else None,
        age=age,
        error=error,
        final=final,
    )


def _eta(told: Mapping[str, Any], age: float) -> float | None:
    """Seconds left, from the steps of this attempt: those before it may have been faster."""
    step, steps, first = (told.get(name) for name in ("step", "steps", "first"))
    if step is None or steps is None or first is None or step <= first[1]:
        return None
    return max(0.0, (told["time"] - first[0]) / (step - first[1]) * (steps - step) - age)


# -------------------------------------------------------------------- a run in one line


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
        words = [f"{self.counts.get('done', 0):,} of {self.members:,} members done"]
        words += [
            f"{self.counts[state]:,} {state}"
            for state in ("running", "queued", "silent", "failed", "diverged")
            if self.counts.get(state)
        ]
        if self.eta is not None:
            words.append(f"ETA {duration_text(self.eta)}")
        return ", ".join(words)


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
    return Summary(counts.total(), {name: n for name, n in counts.items() if n}, _eta_of_all(rows))


def _eta_of_all(rows: Sequence[Row]) -> float | None:
    """When the last is done, if those that run share what is queued evenly."""
    running = [row for row in rows if row.state in RUNNING]
    queued = sum(row.state == "queued" for row in rows)
    times = [row.seconds for row in rows if row.state == "done" and row.seconds is not None]
    times = times or [row.seconds + row.eta for row in running if row.seconds and row.eta]
    typical = statistics.median(times) if times else None
    ends = []
    for row in running:
        left = 0.0 if row.state == "saving" else row.eta
        if left is None and typical is not None:
            left = max(0.0, typical - (row.seconds or 0.0))
        ends.append(left)
    known = [left for left in ends if left is not None]
    if not running or len(known) < len(running) or (queued and typical is None):
        return None
    return max(*known, (sum(known) + queued * (typical or 0.0)) / len(known))


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


# -------------------------------------------------------------------- the table


@dataclass(frozen=True)
class RunTable:
    """What a ``rich`` console prints of a run; it fits the console.

    Args:
        rows: The rows of the run.
        most: How many of them are shown at most.
        note: What else there is to say, below the summary.

    Example:
        >>> rows = [Row((0,), "done", "a", device="cpu", step=90, steps=90, loss=0.25, attempt=1),
        ...         Row((1,), "training", "b", device="cpu", step=30, steps=90, eta=20, attempt=2)]
        >>> Console(width=60).print(RunTable(rows))
        1 of 2 members done, 1 running, ETA 20 s
        member  state     node  device  step   loss  attempt   ETA
        0       done      a     cpu       90   0.25        1     -
        1       training  b     cpu    30/90      -        2  20 s
    """

    rows: Sequence[Row]
    most: int = MOST_ROWS
    note: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Choose the rows and the columns, and draw them."""

        def text(words: str, style: str = "", wraps: bool = False) -> Text:
            return Text(words, style, no_wrap=not wraps, overflow="fold" if wraps else "crop")

        yield text(str(summarise(self.rows)), "bold", wraps=True)
        if self.note is not None:
            yield text(self.note, "yellow", wraps=True)
        shown = list(self.rows)
        if len(shown) > self.most:
            shown = sorted(shown, key=lambda row: _ORDER.index(row.state))[: self.most]
        if shown:
            yield _drawn(shown, console, options)
        rest: Counter[str] = Counter(row.state for row in self.rows for _ in row.members)
        rest.subtract(row.state for row in shown for _ in row.members)
        if counted := [f"{rest[state]:,} {state}" for state in _ORDER if rest[state]]:
            yield text("and " + ", ".join(counted))
        failures = [row for row in self.rows if row.error]
        for row in failures[:_MOST_ERRORS]:
            words = f"{Unit(row.members)} failed: {_first_line(row.error)}"
            for line in textwrap.wrap(words, options.max_width)[:_LINES_OF_ERROR]:
                yield text(line)
        if len(failures) > _MOST_ERRORS:
            yield text(f"and {len(failures) - _MOST_ERRORS:,} more errors")

    @property
    def other_lines(self) -> int:
        """How many lines are no rows: summary, note, headings, what is counted, errors."""
        return 6 + _LINES_OF_ERROR * min(_MOST_ERRORS, sum(bool(row.error) for row in self.rows))


def _drawn(rows: Sequence[Row], console: Console, options: ConsoleOptions) -> Table:
    """The table with as many columns as there is room for."""
    cells = _cells(rows)
    for left_out in (*_LEFT_OUT, None):
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in cells:
            side: Literal["left", "right"] = "left" if name in _TO_THE_LEFT else "right"
            table.add_column(name, justify=side, no_wrap=True, overflow="crop")
        for row, texts in zip(rows, zip(*cells.values(), strict=True), strict=True):
            styles = (_STYLES.get(row.state, "") if name == "state" else "" for name in cells)
            table.add_row(*map(Text, texts, styles))
        wide = Measurement.get(console, options.update(max_width=1000), table).maximum
        if wide <= options.max_width or left_out is None:
            break
        del cells[left_out]
    return table


def _cells(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The text of each column."""

    def duration(seconds: float | None, words: str = "{}") -> str:
        return "-" if seconds is None else words.format(duration_text(seconds))

    return {
        "member": ["-".join(map(str, (row.members[0], *row.members[1:][-1:]))) for row in rows],
        "state": [_state(row) for row in rows],
        "node": [_node_name(row.host, row.node) for row in rows],
        "device": [row.device or "-" for row in rows],
        "step": [_steps(row) for row in rows],
        "loss": ["-" if row.loss is None else f"{row.loss:.4g}" for row in rows],
        "attempt": [str(row.attempt or "-") for row in rows],
        "time": [duration(row.seconds) for row in rows],
        "ETA": [duration(row.eta) for row in rows],
        "last sign": [duration(row.age, "{} ago") for row in rows],
    }


def _state(row: Row) -> str:
    if row.state == "done" and row.diverged:
        return f"done, {len(row.diverged)} diverged"
    return f"silent {duration_text(row.age or 0.0)}" if row.state == "silent" else row.state


def _steps(row: Row) -> str:
    if row.step is None:
        return "-"
    whole = row.steps is None or row.state in ("done", "diverged")
    return f"{row.step:,}" if whole else f"{row.step:,}/{row.steps:,}"


def _node_name(host: str | None, node: str | None) -> str:
    """A node for a person: the short name of its machine, or where none is known its number.

    Example:
        >>> _node_name("gpu-7.cluster.example", "3f2a91c0aa"), _node_name(None, "3f2a91c0aa")
        ('gpu-7', '3f2a91c0')
        >>> _node_name("raycluster-kuberay-workergroup-worker-7sjqm", None)
        'rayclu..worker-7sjqm'
    """
    if host is None:
        return "-" if node is None else node[:8]
    # an address is no name with a domain
    short = host if host.replace(".", "").isdigit() else host.split(".")[0]
    # the machines of a cluster are often called alike, but for the end
    return short if len(short) <= _LONGEST_NODE else f"{short[:6]}..{short[-12:]}"


def _first_line(error: str | None) -> str:
    return ((error or "").strip().splitlines() or ["unknown"])[0]


# -------------------------------------------------------------------- showing


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
    with RunDisplay(run.records, stream) as display:
        try:
            for result in run.as_completed():
                display.ended(result)
        except KeyboardInterrupt:  # it may have come while a result was being shown
            run.cancel()
            raise
    return run.wait()


class RunDisplay:
    """Shows a run for the time of a ``with`` block.

    The storage is read in a thread of its own, every few seconds and less often where that takes
    long, so that slow or unreachable storage holds up neither the results nor the display.

    Args:
        records: The records of the run.
        stream: As for :func:`watch`.
        read_seconds: The least time from one reading of the storage to the next.
        summary_seconds: The least time between two lines about the whole run in a log file.

    Attributes:
        rows: As they were read last; None before.
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
        self.rows: list[Row] | None = None
        self._reader, self._error = RunReader(records), "no answer"
        self._began = self._read_at = self._said_at = time.monotonic()
        self._pause = read_seconds
        self._said: Mapping[str, int] = {}
        self._stopped, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep_reading, name="reading", daemon=True)
        shared = self.console.file in (sys.stdout, sys.stderr)  # keep what others print above
        self._screen = Live(
            console=self.console,
            get_renderable=self._table,
            refresh_per_second=1,
            redirect_stdout=shared,
            redirect_stderr=shared,
        )

    def __enter__(self) -> RunDisplay:
        """Begin."""
        self._thread.start()
        if self.live:
            self._screen.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Read once more, and leave the last table or the last line."""
        self._stopped.set()
        if kind is None or issubclass(kind, Exception):  # else somebody is in a hurry
            self._thread.join(_LAST_READ_SECONDS)
        if self.live:
            with suppress(*_NOBODY_LISTENS):
                self._screen.stop()
        elif self.rows is not None:
            self._say_summary(summarise(self.rows))

    def ended(self, result: MemberResult) -> None:
        """Say in a log that a member has ended; the table shows it when the storage was read."""
        if not self.live:
            self._say(result_line(result))

    def wait(self) -> None:
        """Wait until the storage says that nothing more will come."""
        while not self._over.wait(0.5):  # so that Ctrl-C is noticed
            pass

    def _keep_reading(self) -> None:
        last = False
        while True:
            begin = time.monotonic()
            try:
                self.rows = self._reader.rows(time.time())
                self._read_at = time.monotonic()
                if all(row.ended for row in self.rows):
                    self._over.set()
            except Exception as error:  # it may be back in a moment; the run knows better
                self._error = _first_line(str(error))
            if last:
                return
            quiet = time.monotonic() - self._said_at
            if self.rows is not None and not self.live and quiet >= self.summary_seconds:
                summary = summarise(self.rows)
                if summary.counts != self._said or quiet > _LONGEST_QUIET:
                    self._say_summary(summary)
            took = time.monotonic() - begin
            self._pause = max(self.read_seconds, min(10 * took, _LONGEST_PAUSE))
            last = self._stopped.wait(self._pause)

    def _table(self) -> RenderableType:
        late = time.monotonic() - self._read_at
        note = None
        if late > self._pause + _LATE_SECONDS:
            note = f"The storage was last read {duration_text(late)} ago: {self._error}"
        if self.rows is None:
            return note or "Reading the storage of the run"
        most = MOST_ROWS
        if not self._stopped.is_set():  # what is left at the end may be scrolled
            lines = self.console.size.height - RunTable(self.rows).other_lines
            most = max(1, min(most, lines))
        return RunTable(self.rows, most, note)

    def _say_summary(self, summary: Summary) -> None:
        self._said, self._said_at = summary.counts, time.monotonic()
        self._say(f"after {duration_text(self._said_at - self._began)}: {summary}")

    def _say(self, line: str) -> None:
        with suppress(*_NOBODY_LISTENS):
            print(line, file=self.console.file, flush=True)


def result_line(result: MemberResult) -> str:
    """A line about a member that has ended.

    Example:
        >>> print(result_line(MemberResult(3, "done", 1, {"val_nll": 0.3125}, seconds=42.0)))
        member 3 done in 42 s, attempt 1, val_nll 0.3125
        >>> print(result_line(MemberResult(4, "failed", 2, error="OSError: the disk is full")))
        member 4 failed, attempt 2: OSError: the disk is full
    """
    line = f"member {result.member} {result.status}"
    if result.seconds is not None:
        line += f" in {duration_text(result.seconds)}"
    if result.node is not None or result.host is not None:
        line += f" on node {_node_name(result.host, result.node)}"
    line += f", attempt {result.attempt}"
    if not result.ok:
        return f"{line}: {_first_line(result.error)}"
    names = [name for name in (*_METRICS, *result.metrics) if result.metrics.get(name) is not None]
    return f"{line}, {names[0]} {result.metrics[names[0]]:.4g}" if names else line
