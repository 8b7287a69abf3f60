"""The rows of a run: how each unit stands, read from the storage alone.

Everything comes from the records of the run (commits, leases, progress), so that a run looks the
same from any machine, while it runs and afterwards, with Ray or without. The states of a unit:

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
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.results import member_results
from lightning_bnn.launch.units import Unit

__all__ = ["RUNNING", "Row", "RunReader", "State", "run_rows"]

State = Literal["queued", "starting", "training", "saving", "silent", "failed", "diverged", "done"]
RUNNING = ("starting", "training", "saving")
SILENT_AFTER = 60.0  # signs come every 5 s or sooner
# The driver waits at most a minute before it tries again.
_NO_RETRY_AFTER = 120.0
_READERS = 8


@dataclass(frozen=True)
class Row:
    """A unit as it is shown.

    Attributes:
        members: The numbers of its members.
        state: See above.
        host: The name of the machine that it runs on, or ran on last.
        node: The node of Ray there.
        device: The device there.
        step: The steps taken.
        steps: The steps of the whole fit, where they are known.
        loss: The last training loss, if it is finite.
        attempt: The number of the last attempt that has started; 0 if none has.
        seconds: How long that attempt took, or has taken so far.
        eta: Seconds until its last step, at the speed of this attempt.
        age: Seconds since its last sign of life.
        diverged: Those of its members that have no finite weights.
        error: Why it has failed for good.
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

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        if self.state == "failed":
            return self.error is not None or (self.age or 0.0) > _NO_RETRY_AFTER
        return self.state in ("done", "diverged")


def run_rows(records: RunRecords, now: float) -> list[Row]:
    """The rows of a run as it is now.

    Args:
        records: The records of the run.
        now: The time, in seconds since the epoch.

    Raises:
        ConfigurationError: There is no run in this storage.

    Example:
        >>> records = RunRecords("memory://rows-doc")
        >>> _ = records.begin({"units": [[0, 1], [2, 3]]})
        >>> records.grant(Unit((0, 1)), attempt=1)
        >>> records.put_progress(Unit((0, 1)), {"attempt": 1, "phase": "training", "time": 110.0,
        ...     "host": "a", "step": 20, "steps": 50, "first": [100.0, 0], "loss": 0.5})
        >>> for row in run_rows(records, now=113.0):
        ...     print(row.members, row.state, row.step, row.eta)
        (0, 1) training 20 12.0
        (2, 3) queued None None
    """
    return RunReader(records).rows(now)


class RunReader:
    """Reads a run again and again: what has ended is read once, and clocks need not agree.

    Args:
        records: The records of the run.
    """

    def __init__(self, records: RunRecords) -> None:
        self.records = records
        self._done: dict[Unit, Row] = {}
        self._progress: dict[Unit, dict[str, Any]] = {}
        self._seen: dict[Unit, tuple[Any, float]] = {}  # the last sign of life, and since when

    def rows(self, now: float) -> list[Row]:
        """A row for each unit, in their order; ``now`` is in seconds since the epoch."""
        units = self.records.units()
        begun = self.records.committed_names()
        open_units = [one for one in units if one.name in begun and one not in self._done]
        with ThreadPoolExecutor(_READERS) as pool:  # remote storage takes its time for each
            read = list(pool.map(lambda unit: self._read(unit, now), open_units))
        found = dict(zip(open_units, read, strict=True))
        self._done |= {
            unit: row for unit, row in found.items() if row.state in ("done", "diverged")
        }
        return [self._done.get(unit) or found.get(unit) or Row(unit.members) for unit in units]

    def _read(self, unit: Unit, now: float) -> Row:
        commit = self.records.committed(unit)
        told = self.records.progress(unit)
        before = self._progress.get(unit)
        # a zombie may have written over it, or the storage may be away for a moment
        if before is not None and (told is None or _attempt(told) < _attempt(before)):
            told = before
        if commit is not None:
            self._progress.pop(unit, None)
            return _done_row(self.records, unit, commit["result"], told or {})
        lease = self.records._read(f"units/{unit.name}/lease.json", "lease") or {"attempt": 0}
        if told is None:
            if lease.get("error") is None:
                return Row(unit.members)
            return Row(unit.members, "failed", error=str(lease["error"]))
        self._progress[unit] = told
        return _running_row(unit, lease, told, self._age(unit, told, now))

    def _age(self, unit: Unit, told: Mapping[str, Any], now: float) -> float:
        sign = (_attempt(told), told.get("time"))
        seen = self._seen.get(unit)
        if seen is None:
            since = min(now, _number(told.get("time"), now))
        elif seen[0] == sign:
            since = seen[1]
        else:
            since = now
        self._seen[unit] = (sign, since)
        return max(0.0, now - since)


def _done_row(
    records: RunRecords, unit: Unit, result: Mapping[str, Any], told: Mapping[str, Any]
) -> Row:
    results = member_results(records, unit, result)
    first = results[0]
    diverged = tuple(one.member for one in results if not one.ok)
    same = _attempt(told) == first.attempt  # the host is known from what the attempt told
    return Row(
        unit.members,
        "diverged" if len(diverged) == len(results) else "done",
        host=told.get("host") if same else None,
        node=first.node,
        device=result.get("device"),
        step=first.steps,
        steps=first.steps,
        loss=first.metrics.get("train_loss"),
        attempt=first.attempt,
        seconds=first.seconds,
        diverged=diverged,
    )


def _running_row(unit: Unit, lease: Mapping[str, Any], told: Mapping[str, Any], age: float) -> Row:
    attempt, error = _attempt(told), lease.get("error")
    phase = told.get("phase")
    state: State
    if error is not None or phase == "failed":
        state = "failed"
    elif attempt < lease["attempt"]:
        return Row(unit.members, "queued", attempt=attempt)
    elif age > SILENT_AFTER:
        state = "silent"
    else:
        state = phase if phase in RUNNING else "starting"
    time = _number(told.get("time"), 0.0)
    taken = max(0.0, time - _number(told.get("started"), time))
    return Row(
        unit.members,
        state,
        host=told.get("host"),
        node=told.get("node"),
        device=told.get("device"),
        step=told.get("step"),
        steps=told.get("steps"),
        loss=told.get("loss"),
        attempt=attempt,
        seconds=taken if state == "failed" else taken + age,
        eta=_eta(told, time, age) if state == "training" else None,
        age=age,
        error=None if error is None else str(error),
    )


def _eta(told: Mapping[str, Any], time: float, age: float) -> float | None:
    """Seconds left, from the steps of this attempt: those before it may have been faster."""
    step, steps, first = told.get("step"), told.get("steps"), told.get("first")
    if step is None or steps is None or first is None or step <= first[1]:
        return None
    each = (time - first[0]) / (step - first[1])
    return max(0.0, each * (steps - step) - age)


def _attempt(told: Mapping[str, Any]) -> int:
    return int(told.get("attempt") or 0)


def _number(value: Any, otherwise: float) -> float:
    return float(value) if isinstance(value, (int, float)) else otherwise
