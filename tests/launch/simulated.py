"""Backends for tests without Ray: one with attempts that do not train, one in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from lightning_bnn.launch import Attempt, Backend, Outcome, attempt_outcome
from lightning_bnn.launch.backend import Handle
from lightning_bnn.launch.driver import Driver
from lightning_bnn.launch.member import Place
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.stored import MemberResult
from lightning_bnn.launch.units import Unit

# What an attempt does: it says after how many seconds it ends, and how; with None it never does.
Work = Callable[[RunRecords, Unit, int], "tuple[float, Outcome | None]"]


class Simulated(Backend):
    """Runs attempts that are functions, on a clock that passes no time.

    It is its own clock: what waits moves it on. ``meanwhile`` is called whenever something waits.
    """

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, work: Work, room: int = 1000) -> None:
        self.work, self.places, self.now = work, room, 0.0
        self.running: dict[Handle, tuple[float, Outcome | None]] = {}
        self.submitted: list[tuple[float, Attempt, str | None]] = []
        self.cancelled: list[tuple[Unit, int]] = []
        self.most = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.meanwhile()
        self.now += seconds

    def submit(self, attempt: Attempt, avoid: str | None) -> Handle:
        self.submitted.append((self.now, attempt, avoid))
        seconds, outcome = self.work(RunRecords(attempt.storage), attempt.unit, attempt.number)
        self.running[attempt] = (self.now + seconds, outcome)
        self.most = max(self.most, len(self.running))
        return attempt

    def wait(self, handles: Sequence[Handle], seconds: float) -> dict[Handle, Outcome]:
        self.meanwhile()
        ends = {handle: self.running[handle] for handle in handles if self.running[handle][1]}
        first = min((end for end, _ in ends.values()), default=float("inf"))
        self.now = max(self.now, min(first, self.now + seconds))
        ready = {handle: outcome for handle, (end, outcome) in ends.items() if end <= self.now}
        for handle in ready:
            del self.running[handle]
        return ready  # type: ignore[return-value]

    def cancel(self, handle: Handle) -> None:
        del self.running[handle]
        assert isinstance(handle, Attempt)
        self.cancelled.append((handle.unit, handle.number))

    def room(self) -> int:
        return self.places


class Threads(Backend):
    """Runs real attempts in a thread of this process, one after another."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)

    def submit(self, attempt: Attempt, avoid: str | None) -> Handle:
        place = Place({"node": "3f2a91c0", "device": "cpu"})
        return self.pool.submit(attempt_outcome, self.recipe, attempt, place)

    def wait(self, handles: Sequence[Any], seconds: float) -> dict[Handle, Outcome]:
        ended, _ = wait(handles, seconds, FIRST_COMPLETED)
        return {handle: handle.result() for handle in ended}

    def cancel(self, handle: Any) -> None:
        handle.cancel()

    def room(self) -> int:
        return 2


def committed(records: RunRecords, unit: Unit, number: int) -> Outcome:
    """Commit a result, as an attempt does at its end."""
    places = {str(member): {"place": "here"} for member in unit.members}
    result = {"members": {"posterior": places}, "metrics": {}, "attempt": number}
    records.commit(unit, number, result)
    return Outcome(result)


def results_of(driver: Driver) -> list[MemberResult]:
    """Run a driver to its end in this thread, and give what it said."""
    driver.run()
    results: list[Any] = []
    while (result := driver.results.get(timeout=60)) is not None:
        results.append(result)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
