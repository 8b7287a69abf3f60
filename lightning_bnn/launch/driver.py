"""The driver of a run: hands units to Ray, tries again what fails, and gives results one by one.

It holds no weights and no draws: an attempt writes to the storage and returns a few numbers. All
that it knows can be read from the storage again, so a driver that dies is replaced by starting the
same command once more.

When an attempt ends without a commit, the next begins after a pause that doubles each time. An
attempt that moved the last checkpoint forward has not been in vain: only those that did not, one
after another, count against ``retries``. Errors that would come again (a diverged chain, data that
do not fit) are final at once. An attempt that has given no sign of life for ``lost_after`` seconds
is given up, whatever Ray thinks of its node, and the next one avoids that node. A driver that finds
that another one has begun attempts at its units ends.
"""

from __future__ import annotations

import heapq
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_fabric.utilities.exceptions import MisconfigurationException

from lightning_bnn.errors import FencedError, LaunchError, LightningBNNError, NonFiniteError
from lightning_bnn.launch.checkpoints import checkpoint_step
from lightning_bnn.launch.cluster import last_line
from lightning_bnn.launch.member import Attempt
from lightning_bnn.launch.patience import back_off
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.results import MemberResult, member_results
from lightning_bnn.launch.units import Unit

__all__ = ["Driver", "Outcome", "Submit", "describe_error"]

# Tasks that wait in Ray at a time; the rest waits here.
_OUTSTANDING = 1000
_LOOK_SECONDS = 5.0


@dataclass
class Outcome:
    """How an attempt ended, as it comes back from a worker: a few numbers and texts.

    Attributes:
        result: What it has committed; None if it has failed.
        error: What went wrong.
        final: Whether another attempt would fail in the same way.
        early: Whether it failed before the first step of training.
        node: Where it failed, if it was no fault of the unit.
    """

    result: dict[str, Any] | None = None
    error: str | None = None
    final: bool = False
    early: bool = False
    node: str | None = None


# Mistakes in a program, which come again however often it runs.
_MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(NotImplementedError, SyntaxError, TypeError, ValueError),
    *(LightningBNNError, MisconfigurationException),
)


def describe_error(error: BaseException, early: bool = False) -> Outcome:
    """The outcome of an attempt that raised.

    Example:
        >>> describe_error(TypeError("no such option")).final, describe_error(OSError()).final
        (True, False)
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    final = isinstance(error, _MISTAKES) and not isinstance(error, FencedError)
    # a member may diverge in its first step, and others not
    return Outcome(None, text, final, early and not isinstance(error, NonFiniteError))


def _said_by_ray(ray: Any, error: BaseException) -> str:
    """Why a task gave no outcome, in a line."""
    if isinstance(error, ray.exceptions.RayTaskError):  # before our part in it began
        return last_line(error)
    return str(error).strip().split("\n")[0] or repr(error)


@dataclass
class _Running:
    unit: Unit
    attempt: int
    seen: tuple[Any, float] | None = None  # the last sign of life, and when it was first seen
    node: str | None = None


@dataclass
class _Past:
    """What is known of the attempts at a unit so far."""

    waits: Any = field(default_factory=lambda: back_off(first=1.0, longest=60.0))
    step: int = 0
    in_vain: int = 0
    avoid: str | None = None


# Hands an attempt to Ray, away from a node if one is named, and gives the reference of its Outcome.
Submit = Callable[[Attempt, "str | None"], Any]


class Driver(threading.Thread):
    """Runs the units that are not done yet, in a thread of its own.

    Args:
        ray: The module.
        records: The records of the run.
        units: What to run.
        template: An attempt, of which unit and number are filled in.
        submit: Hands an attempt to Ray.
        retries: How often in a row an attempt may fail without moving the last checkpoint.
        lost_after: Seconds without a sign of life after which an attempt is given up.
        stop_early: Whether an error before the first step ends the run: all members would raise it.
        outstanding: How many attempts may be handed to Ray at a time; the rest waits here.
        clear: Called when an attempt was given up or has died, to free what it had in the cluster.
        release: Called at the end, to let another driver have the run.
    """

    def __init__(
        self,
        ray: Any,
        records: RunRecords,
        units: list[Unit],
        template: Attempt,
        submit: Submit,
        retries: int,
        lost_after: float,
        stop_early: bool,
        outstanding: Callable[[], int] = lambda: _OUTSTANDING,
        clear: Callable[[Unit, int], None] = lambda unit, attempt: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="lightning-bnn driver")
        self.ray, self.records, self.template, self.submit = ray, records, template, submit
        self.retries, self.lost_after, self.stop_early = retries, lost_after, stop_early
        self.outstanding, self.clear, self.release = outstanding, clear, release
        self.results: queue.SimpleQueue[MemberResult | BaseException | None] = queue.SimpleQueue()
        self._waiting: deque[Unit] = deque(units)
        self._resting: list[tuple[float, int, Unit]] = []  # until when, of which member
        self._running: dict[Any, _Running] = {}
        self._past: dict[Unit, _Past] = {}
        self._cancelled = threading.Event()
        self._before = getattr(sys, "last_value", None)
        self._looked = time.monotonic()

    def run(self) -> None:
        """Go on until every unit is done or has failed, or the run is cancelled."""
        try:
            while not self._cancelled.is_set() and self._busy and not self._deserted:
                self._hand_out()
                self._take_in()
                self._look_for_lost()
        except BaseException as error:  # whoever reads the results has to know
            self.results.put(error)
        finally:
            self._let_go()
            self.release()
            self.results.put(None)

    def cancel(self) -> None:
        """Stop: what is running is ended, and can be gone on with later."""
        self._cancelled.set()

    @property
    def _deserted(self) -> bool:
        """Whether the program has ended by an error or Ctrl-C; one that is over is waited for."""
        ended = not threading.main_thread().is_alive()
        return ended and getattr(sys, "last_value", None) is not self._before

    @property
    def _busy(self) -> bool:
        return bool(self._waiting or self._resting or self._running)

    # ---------------------------------------------------------------- out

    def _hand_out(self) -> None:
        now = time.monotonic()
        while self._resting and self._resting[0][0] <= now:
            self._waiting.append(heapq.heappop(self._resting)[2])
        if not self._waiting:
            return
        outstanding = self.outstanding()
        while self._waiting and len(self._running) < outstanding:
            self._start(self._waiting.popleft())

    def _start(self, unit: Unit) -> None:
        past = self._past.get(unit)
        number = 1 + max(self.records.granted(unit), *self.records.attempts(unit), 0)
        self.records.grant(unit, number)
        attempt = replace(self.template, unit=unit, number=number)
        reference = self.submit(attempt, None if past is None else past.avoid)
        self._running[reference] = _Running(unit, number)

    # ---------------------------------------------------------------- in

    def _take_in(self) -> None:
        if not self._running:
            if self._resting:
                self._cancelled.wait(min(1.0, max(0.0, self._resting[0][0] - time.monotonic())))
            return
        references = list(self._running)
        ready, _ = self.ray.wait(references, num_returns=1, timeout=0.5, fetch_local=False)
        if ready:  # and whatever else is there by now
            ready, _ = self.ray.wait(
                references, num_returns=len(references), timeout=0, fetch_local=False
            )
        for reference in ready:
            running = self._running.pop(reference)
            try:
                outcome = self.ray.get(reference)
            except self.ray.exceptions.RayError as error:  # a worker or a node that died
                outcome = Outcome(error=_said_by_ray(self.ray, error))
                self.clear(running.unit, running.attempt)
            self._end(running, outcome)

    def _end(self, running: _Running, outcome: Outcome) -> None:
        unit = running.unit
        result = outcome.result
        if result is None and not outcome.final:
            # it may have committed before it died, or another attempt may have
            commit = self.records.committed(unit)
            result = None if commit is None else commit["result"]
        if result is not None:
            self._past.pop(unit, None)
            for one in member_results(self.records, unit, result):
                self.results.put(one)
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
        heapq.heappush(self._resting, (time.monotonic() + wait, unit.members[0], unit))

    def _check_alone(self, running: _Running) -> None:
        """Two drivers would take the run from each other again and again: the later one has it."""
        holder = self.records.granted(running.unit)
        if holder != running.attempt:
            raise LaunchError(
                f"Another driver has taken over the run in {self.records.storage}: it has begun "
                f"attempt {holder} of {running.unit}, of which attempt {running.attempt} was under "
                "way here. This one ends; the run goes on there."
            )

    def _fail(self, running: _Running, outcome: Outcome) -> None:
        # no attempt may commit once the failure was told
        self.records.grant(running.unit, running.attempt + 1)
        for member in running.unit.members:
            self.results.put(
                MemberResult(
                    member, "failed", running.attempt, node=running.node, error=outcome.error
                )
            )

    # ---------------------------------------------------------------- lost

    def _look_for_lost(self) -> None:
        now = time.monotonic()
        if now - self._looked < min(_LOOK_SECONDS, self.lost_after / 4):
            return
        self._looked = now
        for reference, running in list(self._running.items()):
            progress = self.records.progress(running.unit)
            if progress is None or progress.get("attempt") != running.attempt:
                continue  # it waits for its turn
            running.node = progress.get("node")
            sign = progress.get("time")
            if running.seen is None or running.seen[0] != sign:
                running.seen = (sign, now)  # by this clock: those of two hosts may differ
            elif now - running.seen[1] > self.lost_after:
                del self._running[reference]
                self._cancel_task(reference, running)
                silent = now - running.seen[1]
                self._end(running, Outcome(error=f"no sign of life for {silent:.0f} s"))

    def _let_go(self) -> None:
        for reference, running in self._running.items():
            self._cancel_task(reference, running)
        self._running.clear()

    def _cancel_task(self, reference: Any, running: _Running) -> None:
        with suppress(Exception):  # already over, or its node is gone
            self.ray.cancel(reference, force=True)
        self.clear(running.unit, running.attempt)
