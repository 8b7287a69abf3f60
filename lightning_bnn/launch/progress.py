"""How far a run is: what attempts tell through the storage, and the live table that shows it.

An attempt tells every few seconds how far it is; a thread does so, so that a long step or a long
validation is not taken for death. All that is shown is read from the storage (commits, leases,
progress), so that a run looks the same from any machine, while it runs and afterwards. The states
of a unit:

==========  =======================================================================================
queued      no attempt has started, or the last was given up and the next has not started
starting    an attempt is making its network and its data, or resumes
training    it takes steps
saving      it has taken the last step
silent      none of these is certain: there was no sign of life for a minute
unreadable  what it has told of itself cannot be read
failed      the last attempt ended in an error and no other has started
diverged    it is done, and none of its members has finite weights
done        its result is committed
==========  =======================================================================================

The table is all in words, so that it can be read without colours. A narrow screen has fewer
columns. Of many units those are shown that run or have failed; the others are counted.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightning_bnn.checks import printable
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.stored import READERS, MemberResult, StoredRun, member_results
from lightning_bnn.launch.units import Unit
from lightning_bnn.lightning import pl

__all__ = ["ProgressCallback", "Row", "RunDisplay", "run_rows", "run_table", "summary_line"]

State = Literal[
    "queued", "starting", "training", "saving", "silent", "unreadable", "failed", "diverged", "done"
]
RUNNING = ("starting", "training", "saving")
SILENT_AFTER = 60.0  # a sign of life is given every 5 s or more often
MOST_ROWS = 40
_MOST_ERRORS = 3
_OTHER_LINES = 12  # those of the table that are no rows: headings, summary, errors
# What comes first where there are too many.
_ORDER = (
    "failed",
    "diverged",
    "unreadable",
    "silent",
    "saving",
    "training",
    "starting",
    "done",
    "queued",
)
_STYLES = {
    "failed": "bold red",
    "diverged": "bold red",
    "silent": "yellow",
    "unreadable": "yellow",
    "done": "green",
}
_WIDE_SCREEN = 110
_ON_WIDE_SCREENS = ("device", "time", "last sign")
_TO_THE_LEFT = ("member", "state", "node", "device")
_LONGEST_NODE = 20
_METRICS = ("val_nll", "val_loss", "train_loss")
_LAST_READ_SECONDS = 5.0
# A pipe whose reader has gone, a full disk, a file that was closed: no reason to end a run.
_NOBODY_LISTENS = (OSError, ValueError)


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
        seconds: How long that attempt took, or had taken at its last sign of life.
        eta: Seconds until its last step, at the speed of this attempt.
        age: Seconds since its last sign of life.
        diverged: Those of its members that have no finite weights.
        error: Why the last attempt has failed.
        ended: Whether there will be no other attempt.
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
    ended: bool = False


def run_rows(run: StoredRun, now: float) -> list[Row]:
    """A row for each unit of a run, in their order.

    Args:
        run: The run; its commits are read once, however often this is called.
        now: The time, in seconds since the epoch.

    Example:
        >>> records = RunRecords("memory://rows-doc")
        >>> _ = records.begin({"units": [[0, 1], [2, 3]]})
        >>> records.grant(Unit((0, 1)), attempt=1)
        >>> records.put_progress(Unit((0, 1)), {"attempt": 1, "phase": "training", "time": 110.0,
        ...     "host": "a", "started": 99.0, "step": 20, "steps": 50, "first": [100.0, 0]})
        >>> for row in run_rows(StoredRun("memory://rows-doc"), now=113.0):
        ...     print(row.members, row.state, row.step, row.eta)
        (0, 1) training 20 15.0
        (2, 3) queued None None
    """
    records, begun = run.records, run.records.unit_names()

    def read(unit: Unit) -> Row:
        if unit.name not in begun:
            return Row(unit.members)
        lease: dict[str, Any] = {}
        try:
            if (result := run.result_of(unit)) is not None:
                return _done_row(unit, member_results(records, unit, result), result)
            lease = records.lease(unit)
            return _open_row(unit, lease, records.checked_progress(unit) or {}, now)
        except Exception as error:  # of whatever is there; that of other units can be read
            if (failure := lease.get("error")) is not None:
                return Row(unit.members, "failed", error=failure, ended=True)
            return Row(unit.members, "unreadable", error=str(error))

    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(read, run.units()))


def _done_row(unit: Unit, members: Sequence[MemberResult], result: Mapping[str, Any]) -> Row:
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
        ended=True,
    )


def _open_row(unit: Unit, lease: Mapping[str, Any], told: Mapping[str, Any], now: float) -> Row:
    """The row of a unit without a commit."""
    # what an attempt tells that was given up does not count
    latest = bool(told) and told["attempt"] >= lease["attempt"]
    error = lease.get("error") or (told.get("error") if latest else None)
    age = max(0.0, now - told["time"]) if told else None
    state: State = "queued"
    if error is not None:
        state = "failed"
    elif latest:
        state = "silent" if age is not None and age > SILENT_AFTER else told["phase"]
    facts: dict[str, Any] = {
        name: told.get(name) for name in ("host", "node", "device", "step", "steps", "loss")
    }
    return Row(
        unit.members,
        state,
        **facts,
        attempt=told.get("attempt", 0),
        seconds=told["time"] - told["started"] if told else None,
        eta=_eta(told) if state == "training" else None,
        age=age,
        error=error,
        ended="error" in lease,
    )


def _eta(told: Mapping[str, Any]) -> float | None:
    """Seconds left, from the steps of this attempt: those before it may have been faster."""
    step, steps, first = (told.get(name) for name in ("step", "steps", "first"))
    if step is None or steps is None or first is None or step <= first[1]:
        return None
    eta = max(0.0, (told["time"] - first[0]) / (step - first[1]) * (steps - step))
    return eta if math.isfinite(eta) else None


# -------------------------------------------------------------------- a run in one line


def count_members(rows: Sequence[Row]) -> dict[str, int]:
    """How many members are in which state; all that have begun are "running"."""
    counts: Counter[str] = Counter()
    for row in rows:
        state = "running" if row.state in RUNNING else row.state
        counts[state] += len(row.members) - len(row.diverged)
        counts["diverged"] += len(row.diverged)
    return {state: count for state, count in counts.items() if count}


def run_eta(rows: Sequence[Row]) -> float | None:
    """Seconds until the last unit is done, if those that run share what is queued evenly."""
    running = [row for row in rows if row.state in RUNNING]
    times = [row.seconds for row in rows if row.state == "done" and row.seconds is not None]
    times = times or [row.seconds + row.eta for row in running if row.seconds and row.eta]
    if not running or not times:
        return None
    typical = statistics.median(times)
    left = [
        max(0.0, typical - (row.seconds or 0.0)) if row.eta is None else row.eta for row in running
    ]
    queued = sum(row.state == "queued" for row in rows)
    return max(*left, (sum(left) + queued * typical) / len(left))


def summary_line(rows: Sequence[Row]) -> str:
    """A run in one line.

    Example:
        >>> rows = [Row((0, 1), "done", seconds=60.0), Row((2, 3), "training", eta=20.0),
        ...         Row((4,), "queued")]
        >>> summary_line(rows)
        '2 of 5 members done, 2 running, 1 queued, ETA 80 s'
    """
    counts, eta = count_members(rows), run_eta(rows)
    words = [f"{counts.get('done', 0):,} of {sum(counts.values()):,} members done"]
    words += [
        f"{counts[state]:,} {state}"
        for state in ("running", "queued", "silent", "unreadable", "failed", "diverged")
        if state in counts
    ]
    return ", ".join(words if eta is None else [*words, f"ETA {duration_text(eta)}"])


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


def run_table(
    rows: Sequence[Row], width: int, most: int = MOST_ROWS, note: str | None = None
) -> Group:
    """What a ``rich`` console prints of a run.

    Args:
        rows: The rows of the run.
        width: The width of the screen.
        most: How many of the rows are shown at most.
        note: What else there is to say, below the summary.

    Example:
        >>> rows = [Row((0,), "done", "a", step=90, steps=90, loss=0.25, attempt=1),
        ...         Row((1,), "training", "b", step=30, steps=90, seconds=9, eta=20, attempt=2)]
        >>> Console(width=60).print(run_table(rows, width=60))
        1 of 2 members done, 1 running, ETA 20 s
        member  state     node   step  loss  attempt   ETA
        0       done      a        90  0.25        1     -
        1       training  b     30/90     -        2  20 s
    """
    lines: list[RenderableType] = [Text(summary_line(rows), "bold")]
    if note is not None:
        lines.append(Text(note, "yellow"))
    shown = list(rows)
    if len(shown) > most:
        shown = sorted(shown, key=lambda row: _ORDER.index(row.state))[:most]
    lines.append(_drawn(shown, width))
    rest: Counter[str] = Counter(row.state for row in rows for _ in row.members)
    rest.subtract(row.state for row in shown for _ in row.members)
    if counted := [f"{rest[state]:,} {state}" for state in _ORDER if rest[state]]:
        lines.append(Text("and " + ", ".join(counted)))
    failures = [
        f"{Unit(row.members)} {'is ' * (row.state == 'unreadable')}{row.state}: "
        f"{_first_line(row.error)}"
        for row in rows
        if row.error
    ]
    lines += map(Text, failures[:_MOST_ERRORS])
    if len(failures) > _MOST_ERRORS:
        lines.append(Text(f"and {len(failures) - _MOST_ERRORS:,} more errors"))
    return Group(*lines)


def _drawn(rows: Sequence[Row], width: int) -> Table:
    columns = {
        name: cell
        for name, cell in _COLUMNS.items()
        if width >= _WIDE_SCREEN or name not in _ON_WIDE_SCREENS
    }
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        side: Literal["left", "right"] = "left" if name in _TO_THE_LEFT else "right"
        # the names of nodes are the first to be cut where there is no room
        table.add_column(name, justify=side, no_wrap=name != "node")
    for row in rows:
        styles = {"state": _STYLES.get(row.state, "")}
        table.add_row(
            *(
                Text(printable(cell(row)), styles.get(name, ""), no_wrap=True, overflow="ellipsis")
                for name, cell in columns.items()
            )
        )
    return table


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
        'ergroup-worker-7sjqm'
    """
    if host is None:
        return "-" if node is None else node[:8]
    # an address is no name with a domain; machines of a cluster are called alike but for the end
    short = host if host.replace(".", "").isdigit() else host.split(".")[0]
    return short[-_LONGEST_NODE:]


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else duration_text(seconds)


# Each column's heading and cells.
_COLUMNS: dict[str, Callable[[Row], str]] = {
    "member": lambda row: "-".join(map(str, (row.members[0], *row.members[1:][-1:]))),
    "state": _state,
    "node": lambda row: _node_name(row.host, row.node),
    "device": lambda row: row.device or "-",
    "step": _steps,
    "loss": lambda row: "-" if row.loss is None else f"{row.loss:.4g}",
    "attempt": lambda row: str(row.attempt or "-"),
    "time": lambda row: _duration(row.seconds),
    "ETA": lambda row: _duration(row.eta),
    "last sign": lambda row: _duration(row.age),
}


def _first_line(error: str | None) -> str:
    return printable(((error or "").strip().splitlines() or ["unknown"])[0])


# -------------------------------------------------------------------- showing


class RunDisplay:
    """Shows a run for the time of a ``with`` block.

    On a terminal it is one table that is drawn anew each second. Elsewhere it is a line for each
    member that ends, and one for the whole run when something has changed, a minute apart or more.
    The storage is read in a thread, so that slow or unreachable storage holds up neither the
    results nor the display.

    Args:
        run: The run.
        console: Where to show it; by default the standard output.
        read_seconds: The least time from one reading of the storage to the next.
        summary_seconds: The least time between two lines about the whole run in a log file.

    Attributes:
        rows: As they were read last; empty before.
    """

    def __init__(
        self,
        run: StoredRun,
        console: Console | None = None,
        read_seconds: float = 3.0,
        summary_seconds: float = 60.0,
    ) -> None:
        self.run, self.read_seconds, self.summary_seconds = run, read_seconds, summary_seconds
        # FORCE_COLOR makes a terminal of any file; a log must not be filled with its control codes
        self.console = console or Console(force_terminal=sys.stdout.isatty())
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.rows: list[Row] = []
        self._note: str | None = "Reading the storage of the run"
        self._began = self._said_at = time.monotonic()
        self._said: dict[str, int] = {}
        self._stopped, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep_reading, name="reading", daemon=True)
        self._screen = Live(console=self.console, get_renderable=self._table, refresh_per_second=1)

    def __enter__(self) -> RunDisplay:
        """Begin."""
        self._thread.start()
        if self.live:
            self._screen.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Read once more, and leave the last table or the last line."""
        self._stopped.set()
        self._thread.join(_LAST_READ_SECONDS)
        if self.live:
            with suppress(*_NOBODY_LISTENS):
                self._screen.stop()
        elif self.rows:
            self._say_summary()

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
        while not last:
            last, begin = self._stopped.is_set(), time.monotonic()
            try:
                self.rows, self._note = run_rows(self.run, time.time()), None
                if all(row.ended for row in self.rows):
                    self._over.set()
            except Exception as error:  # it may be back in a moment; the run knows better
                self._note = f"The storage cannot be read: {_first_line(str(error))}"
            changed = count_members(self.rows) != self._said
            if changed and not self.live and begin - self._said_at >= self.summary_seconds:
                self._say_summary()
            self._stopped.wait(max(self.read_seconds, time.monotonic() - begin))

    def _table(self) -> Group:
        if not self.rows:
            return Group(Text(self._note or ""))
        width, height = self.console.size
        most = max(1, min(MOST_ROWS, height - _OTHER_LINES))
        return run_table(self.rows, width, most, self._note)

    def _say_summary(self) -> None:
        self._said, self._said_at = count_members(self.rows), time.monotonic()
        taken = duration_text(self._said_at - self._began)
        self._say(f"after {taken}: {summary_line(self.rows)}")

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
        line += f" on node {printable(_node_name(result.host, result.node))}"
    line += f", attempt {result.attempt}"
    if not result.ok:
        return f"{line}: {_first_line(result.error)}"
    metrics = result.own_metrics or result.metrics
    names = [name for name in (*_METRICS, *metrics) if metrics.get(name) is not None]
    return f"{line}, {printable(names[0])} {metrics[names[0]]:.4g}" if names else line
