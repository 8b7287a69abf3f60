"""The driver of a run: what is tried again and how often, what is lost, and what is final.

Real records, and a backend whose attempts and clock are simulated.
"""

from __future__ import annotations

import random
import shutil
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_bnn.errors import FencedError, LaunchError
from lightning_bnn.launch import Attempt, Outcome
from lightning_bnn.launch.driver import Driver
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit, plan_units
from tests.launch.simulated import Simulated, Work, committed, results_of

UNIT = Unit((0,))
AWAY = Outcome(error="OSError: away")
_STORAGES = count()


def drive(
    work: Work,
    units: list[Unit] | None = None,
    retries: int = 1,
    lost_after: float = 60.0,
    stop_early: bool = False,
    storage: str | None = None,
    room: int = 1000,
    **options: Any,
) -> tuple[Driver, Simulated]:
    """A driver whose attempts run a function."""
    records = RunRecords(storage or f"memory://driver-{next(_STORAGES)}")
    backend, units = Simulated(work, room), [UNIT] if units is None else units
    template = Attempt(records.storage, units[0], 0)
    driver = Driver(
        backend, records, units, template, retries, lost_after, stop_early, clock=backend, **options
    )
    return driver, backend


def ends_with(outcome: Outcome) -> Work:
    return lambda records, unit, number: (0.0, outcome)


def done(records: RunRecords, unit: Unit, number: int) -> tuple[float, Outcome]:
    return 0.0, committed(records, unit, number)


def save_checkpoint(records: RunRecords, unit: Unit, number: int, step: int) -> None:
    name = f"step-{step:09d}-0123456789abcdef.ckpt"
    records.files.put(f"units/{unit.name}/attempt-{number:04d}/checkpoints/{name}", b"")


# ------------------------------------------------------------------------------- what is retried


def test_an_attempt_in_vain_is_tried_again_so_often_with_pauses_that_double() -> None:
    driver, backend = drive(ends_with(AWAY), retries=3)
    (result,) = results_of(driver)
    assert (result.status, result.attempt, result.error) == ("failed", 4, "OSError: away")
    assert not result.ok
    pauses = [after - before for (before, *_), (after, *_) in pairwise(backend.submitted)]
    assert pauses == [1.0, 2.0, 4.0]
    # whatever is still running may not commit any more, and everybody can read why
    with pytest.raises(FencedError):
        driver.records.commit(UNIT, 4, {})
    assert driver.records.lease(UNIT) == {"attempt": 5, "error": "OSError: away"}


@pytest.mark.parametrize(("further", "status", "attempts"), [(1, "done", 4), (0, "failed", 2)])
def test_only_attempts_that_got_no_further_count(further: int, status: str, attempts: int) -> None:
    def work(records: RunRecords, unit: Unit, number: int) -> tuple[float, Outcome]:
        if number == 4:
            return done(records, unit, number)
        save_checkpoint(records, unit, number, step=5 + further * number)
        return 1.0, Outcome(error="late has torch 1.0", node="late")

    driver, backend = drive(work, retries=0)
    (result,) = results_of(driver)
    assert (result.status, result.attempt) == (status, attempts)
    assert {avoid for _, _, avoid in backend.submitted[1:]} == {"late"}


@pytest.mark.parametrize(("stop_early", "failed"), [(True, [0]), (False, [0, 1, 2])])
def test_a_mistake_before_the_first_step_ends_a_run_that_needs_all(
    stop_early: bool, failed: list[int]
) -> None:
    def work(records: RunRecords, unit: Unit, number: int) -> tuple[float, Outcome]:
        return 60.0 * unit.members[0], Outcome(error="TypeError: no", final=True, early=True)

    driver, backend = drive(work, plan_units(3), stop_early=stop_early)
    assert [result.member for result in results_of(driver)] == failed
    assert len(backend.cancelled) == 3 - len(failed)
    assert backend.now <= 60.0 * len(failed)


def test_more_units_than_there_is_room_for_wait_for_their_turn() -> None:
    def work(records: RunRecords, unit: Unit, number: int) -> tuple[float, Outcome]:
        return 5.0, committed(records, unit, number)

    driver, backend = drive(work, plan_units(6), room=2)
    assert sorted(result.member for result in results_of(driver)) == list(range(6))
    assert (backend.most, backend.now) == (2, 15.0)


# ------------------------------------------------------------------------------- commits


def test_the_commit_of_an_attempt_taken_for_dead_counts_once() -> None:
    def work(records: RunRecords, unit: Unit, number: int) -> tuple[float, Outcome]:
        if number == 1:
            return 0.0, AWAY
        records.grant(unit, 1)  # the first commits while the lease changes
        committed(records, unit, 1)
        records.grant(unit, 2)
        with pytest.raises(FencedError) as caught:
            committed(records, unit, number)
        return 0.0, Outcome.of_error(caught.value)

    (result,) = results_of(drive(work)[0])
    assert (result.status, result.attempt) == ("done", 1)


# ------------------------------------------------------------------------------- lost


@pytest.mark.parametrize("told", [1, 5])  # how often the first attempt says that it lives
def test_an_attempt_without_a_sign_of_life_is_given_up_and_its_node_avoided(told: int) -> None:
    def work(records: RunRecords, unit: Unit, number: int) -> tuple[float, Outcome | None]:
        return (0.0, None) if number == 1 else done(records, unit, number)

    driver, backend = drive(work, lost_after=20.0)

    def tell() -> None:
        sign = min(told, 1 + int(backend.now // 10))
        driver.records.put_progress(UNIT, {"attempt": 1, "time": sign, "node": "of the first"})

    backend.meanwhile = tell
    (result,) = results_of(driver)
    assert (result.status, result.attempt) == ("done", 2)
    assert backend.cancelled == [(UNIT, 1)]
    (_, _, first), (again, _, second) = backend.submitted
    assert (first, second) == (None, "of the first")
    silent_since = 10.0 * (told - 1)
    assert silent_since + 20 < again < silent_since + 36


def test_an_attempt_that_has_not_begun_is_not_lost() -> None:
    def work(records: RunRecords, unit: Unit, number: int) -> tuple[float, Outcome]:
        records.put_progress(unit, {"attempt": number - 1, "time": 1.0})  # of an attempt before it
        return 200.0, committed(records, unit, number)

    driver, backend = drive(work, lost_after=5.0)
    (result,) = results_of(driver)
    assert (result.status, result.attempt) == ("done", 1)
    assert backend.cancelled == []


# ------------------------------------------------------------------------------- the end


def test_of_two_drivers_the_later_one_has_the_run() -> None:
    def first_work(records: RunRecords, unit: Unit, number: int) -> tuple[float, Outcome]:
        """While the first attempt runs, another driver begins elsewhere."""
        (result,) = results_of(drive(second_work, storage=records.storage)[0])
        assert (result.status, result.attempt) == ("failed", 2)
        with pytest.raises(FencedError) as caught:
            committed(records, unit, number)
        return 1.0, Outcome.of_error(caught.value)

    def second_work(records: RunRecords, unit: Unit, number: int) -> tuple[float, Outcome]:
        return 1.0, Outcome(error="ValueError: bad", final=True)

    driver, backend = drive(first_work, retries=5)
    with pytest.raises(
        LaunchError, match=r"Another driver has taken over .* attempt 3 of member 0"
    ):
        results_of(driver)
    assert len(backend.submitted) == 1
    assert driver.records.lease(UNIT) == {"attempt": 3, "error": "ValueError: bad"}


def test_storage_that_was_removed_is_not_taken_for_another_driver(tmp_path: Path) -> None:
    def removed_meanwhile(records: RunRecords, unit: Unit, number: int) -> tuple[float, Outcome]:
        shutil.rmtree(tmp_path)
        return 0.0, AWAY

    driver, _ = drive(removed_meanwhile, storage=str(tmp_path))
    driver.run()
    error = driver.results.get()
    assert isinstance(error, LaunchError)
    assert "are gone: attempt 1 of member 0 was under way" in str(error)


def test_a_cancelled_driver_ends_what_runs_and_lets_the_run_go() -> None:
    released: list[bool] = []
    driver, backend = drive(
        lambda *_: (0.0, None), plan_units(3), release=lambda: released.append(True)
    )
    backend.meanwhile = lambda: driver.cancel() if backend.now > 10 else None
    assert results_of(driver) == []
    assert len(backend.cancelled) == 3
    assert released == [True]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_each_member_has_one_result(seed: int) -> None:
    """A day of an unlucky cluster: workers die, fall silent, come too late or make mistakes."""
    chance, expected = random.Random(seed), {}

    def work(records: RunRecords, unit: Unit, number: int) -> tuple[float, Outcome | None]:
        fate, seconds = chance.random(), chance.uniform(0, 300)
        records.put_progress(unit, {"attempt": number, "time": number, "node": "a"})
        if fate < 0.3:
            expected[unit] = number
            outcome = committed(records, unit, number)
            return seconds / 10, outcome if fate < 0.2 else Outcome(error="the worker died")
        if fate < 0.4:
            expected[unit] = None
            return seconds / 10, Outcome(error="ValueError: bad", final=True)
        save_checkpoint(records, unit, number, step=number)
        return (seconds / 10, AWAY) if fate < 0.8 else (0.0, None)

    driver, backend = drive(work, plan_units(60, stack=2), lost_after=40.0, room=7, retries=0)
    results = results_of(driver)
    assert sorted(result.member for result in results) == list(range(60))
    for result in results:
        number = expected[Unit((result.member // 2 * 2, result.member // 2 * 2 + 1))]
        assert (result.status, result.attempt) == (
            ("failed", result.attempt) if number is None else ("done", number)
        )
    assert backend.most <= 7
    assert not backend.running
