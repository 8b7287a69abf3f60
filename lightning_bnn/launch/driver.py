"""The driver of a run: hands units to a backend, retries what fails, and gives results one by one.

It holds no weights and no draws: an attempt writes to the storage and returns a few numbers. All
that it knows can be read from the storage again, so a driver that dies is replaced by starting the
same command once more.

When an attempt ends without a commit, the next begins after a pause that doubles each time. An
attempt that moved the last checkpoint forward has not been in vain: only those that did not, one
after another, count against ``retries``. Errors that would come again (a diverged chain, data that
do not fit) are final at once. An attempt that has given no sign of life for ``lost_after`` seconds
is given up, whatever the backend thinks of its node, and the next one avoids that node. A driver
that finds that another one has begun attempts at its units ends.
"""

from __future__ import annotations

import heapq
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_bnn.errors import LaunchError
from lightning_bnn.launch.backend import Attempt, Backend, Handle, Outcome
from lightning_bnn.launch.checkpoints import checkpoint_step
from lightning_bnn.launch.patience import back_off
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.stored import MemberResult, member_results
from lightning_bnn.launch.units import Unit

__all__ = ["Driver"]

_LOOK_SECONDS = 5.0
_WAIT_SECONDS = 0.5  # how soon it notices that it was cancelled


@dataclass
class _Running:
    unit: Unit
    attempt: int
    seen: tuple[Any, float] | None = None  # the last sign of life, and when it was first seen
    node: str | None = None


@dataclass
class _Past:
    """What is known of the attempts at a unit so far."""

    waits: Iterator[float] = field(default_factory=lambda: back_off(first=1.0, longest=60.0))
    step: int = 0
    in_vain: int = 0
    avoid: str | None = None


class Driver(threading.Thread):
    """Runs the units that are not done yet, in a thread of its own.

    Args:
        backend: Runs the attempts.
        records: The records of the run.
        units: What to run.
        template: An attempt, of which unit and number are filled in.
        retries: How often in a row an attempt may fail without moving the last checkpoint.
        lost_after: Seconds without a sign of life after which an attempt is given up.
        stop_early: Whether an error before the first step ends the run: all members would raise it.
        release: Called at the end, to let another driver have the run.
        clock: Has ``monotonic()`` and ``sleep(seconds)``; a simulation has its own.

    Attributes:
        results: The results of members as they end, or what ended the driver; None comes last.
    """

    def __init__(
        self,
        backend: Backend,
        records: RunRecords,
        units: list[Unit],
        template: Attempt,
        retries: int,
        lost_after: float,
        stop_early: bool,
        release: Callable[[], None] = lambda: None,
        clock: Any = time,
    ) -> None:
        super().__init__(name="lightning-bnn driver")
        self.backend, self.records, self.template = backend, records, template
        self.retries, self.lost_after, self.stop_early = retries, lost_after, stop_early
        self.release, self.clock = release, clock
        self.results: queue.SimpleQueue[MemberResult | BaseException | None] = queue.SimpleQueue()
        self._waiting: deque[Unit] = deque(units)
        self._resting: list[tuple[float, int, Unit]] = []  # until when, of which member
        self._running: dict[Handle, _Running] = {}
        self._past: dict[Unit, _Past] = {}
        self._cancelled = threading.Event()
        self._error_before = getattr(sys, "last_value", None)
        self._looked = clock.monotonic()

    def run(self) -> None:
        """Work until every unit is done or has failed, or the run is cancelled."""
        try:
            while self._busy and not self._cancelled.is_set() and not self._deserted:
                self._hand_out()
                self._take_in()
                self._look_for_lost()
        except BaseException as error:  # whoever reads the results has to know
            self.results.put(error)
        finally:
            try:
                for handle in self._running:
                    self.backend.cancel(handle)
            finally:
                self.release()
                self.results.put(None)

    def cancel(self) -> None:
        """Stop: what is running is ended, and can be resumed later."""
        self._cancelled.set()

    @property
    def _deserted(self) -> bool:
        """Whether the program has ended by an error or Ctrl-C; one that is over is waited for."""
        ended = not threading.main_thread().is_alive()
        return ended and getattr(sys, "last_value", None) is not self._error_before

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._resting or self._running)

    def _hand_out(self) -> None:
        now = self.clock.monotonic()
        while self._resting and self._resting[0][0] <= now:
            self._waiting.append(heapq.heappop(self._resting)[2])
        room = self.backend.room() if self._waiting else 0
        while self._waiting and len(self._running) < room:
            self._start(self._waiting.popleft())

    def _start(self, unit: Unit) -> None:
        number = 1 + max(self.records.granted(unit), *self.records.attempts(unit), 0)
        self.records.grant(unit, number)
        avoid = self._past[unit].avoid if unit in self._past else None
        handle = self.backend.submit(replace(self.template, unit=unit, number=number), avoid)
        self._running[handle] = _Running(unit, number)

    def _take_in(self) -> None:
        if not self._running:
            self.clock.sleep(_WAIT_SECONDS)
            return
        for handle, outcome in self.backend.wait(list(self._running), _WAIT_SECONDS).items():
            self._end(self._running.pop(handle), outcome)

    def _end(self, running: _Running, outcome: Outcome) -> None:
        unit, result = running.unit, outcome.result
        if result is None and not outcome.final:
            # it may have committed before it died, or another attempt may have
            commit = self.records.committed(unit)
            result = None if commit is None else commit["result"]
        if result is not None:
            self._past.pop(unit, None)
            for member in member_results(self.records, unit, result):
                self.results.put(member)
            return
        self._check_alone(running)
        if outcome.final and outcome.early and self.stop_early:
            self._fail(running, outcome)
            self.cancel()
            return
        past = self._past.setdefault(unit, _Past())
        step = checkpoint_step(self.records, unit)
        past.in_vain = 0 if step > past.step else past.in_vain + 1
        past.step = max(step, past.step)
        past.avoid = outcome.node or running.node
        if outcome.final or past.in_vain > self.retries:
            self._fail(running, outcome)
            return
        wait = next(past.waits) if past.in_vain else 1.0
        heapq.heappush(self._resting, (self.clock.monotonic() + wait, unit.members[0], unit))

    def _check_alone(self, running: _Running) -> None:
        """Two drivers would take the run from each other again and again: the later one has it."""
        holder = self.records.granted(running.unit)
        if not holder:
            raise LaunchError(
                f"The records of the run in {self.records.storage} are gone: attempt "
                f"{running.attempt} of {running.unit} was under way, and nothing says so any more. "
                "Somebody has removed or moved the storage. The run ends here. Put it back and "
                "launch again to resume, or launch again to start from the beginning."
            )
        if holder != running.attempt:
            raise LaunchError(
                f"Another driver has taken over the run in {self.records.storage}: it has begun "
                f"attempt {holder} of {running.unit}, of which attempt {running.attempt} was under "
                "way here. This one ends; the run continues there."
            )

    def _fail(self, running: _Running, outcome: Outcome) -> None:
        # no attempt may commit once the failure was told
        self.records.grant(running.unit, running.attempt + 1, outcome.error or "unknown")
        for member in running.unit.members:
            self.results.put(
                MemberResult(
                    member, "failed", running.attempt, node=running.node, error=outcome.error
                )
            )

    def _look_for_lost(self) -> None:
        now = self.clock.monotonic()
        if now - self._looked < min(_LOOK_SECONDS, self.lost_after / 4):
            return
        self._looked = now
        for handle, running in list(self._running.items()):
            progress = self.records.progress(running.unit)
            if progress is None or progress.get("attempt") != running.attempt:
                continue  # it waits for its turn
            running.node = progress.get("node")
            sign = progress.get("time")
            if running.seen is None or running.seen[0] != sign:
                running.seen = (sign, now)  # by this clock: those of two hosts may differ
            elif (silent := now - running.seen[1]) > self.lost_after:
                del self._running[handle]
                self.backend.cancel(handle)
                self._end(running, Outcome(error=f"no sign of life for {silent:.0f} s"))
