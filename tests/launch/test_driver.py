"""The driver of a run: what is tried again and how often, what is lost, and what is final."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_bnn.errors import ConfigurationError, FencedError, LaunchError, NonFiniteError
from lightning_bnn.launch import MemberResult
from lightning_bnn.launch.driver import Driver, Outcome, describe_error
from lightning_bnn.launch.member import Attempt
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit, plan_units
from tests.launch.faults import PATIENCE

pytestmark = pytest.mark.usefixtures("local_ray")

UNIT = Unit((0,))
RESULT = {"members": {"posterior": {"0": {"place": "here"}}}, "metrics": {}, "attempt": 1}


# --------------------------------------------------------------------------- which errors are final


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (TypeError("no such option"), True),
        (ConfigurationError("cannot be"), True),
        (NonFiniteError("the loss is nan"), True),
        (KeyError("name"), True),
        (OSError("the disk is full"), False),
        (RuntimeError("CUDA out of memory"), False),
        (MemoryError(), False),
        (FencedError("given up"), False),
    ],
    ids=repr,
)
def test_mistakes_are_final_and_accidents_are_not(error: Exception, final: bool) -> None:
    outcome = describe_error(error)
    assert outcome.result is None
    assert outcome.final is final
    assert type(error).__name__ in str(outcome.error)


def test_a_member_that_diverges_in_its_first_step_says_nothing_of_the_others() -> None:
    assert describe_error(TypeError(), early=True).early
    assert not describe_error(NonFiniteError(), early=True).early


# ----------------------------------------------------------------------- attempts that do not train
# Real tasks of Ray and real records; only what a task does takes no time.


def drive(
    ray: Any,
    storage: Path,
    work: Callable[[RunRecords, Unit, int], Outcome],
    units: list[Unit] | None = None,
    retries: int = 1,
    lost_after: float = 60.0,
    stop_early: bool = False,
    **options: Any,
) -> Driver:
    """A driver whose attempts run a function."""
    task = ray.remote(_work).options(num_cpus=0.1, max_retries=0)

    def submit(attempt: Attempt, avoid: str | None) -> Any:
        return task.remote(work, attempt.storage, attempt.unit, attempt.number)

    units = [UNIT] if units is None else units
    records = RunRecords(storage)
    template = Attempt(None, records.storage, units[0], 0, 0)  # type: ignore[arg-type]
    return Driver(ray, records, units, template, submit, retries, lost_after, stop_early, **options)


def _work(work: Any, storage: str, unit: Unit, number: int) -> Outcome:
    outcome: Outcome = work(RunRecords(storage), unit, number)
    return outcome


def results_of(driver: Driver) -> list[MemberResult]:
    """Run a driver to its end in this thread, and give what it said."""
    driver.run()
    found: list[Any] = []
    while (one := driver.results.get(timeout=PATIENCE)) is not None:
        found.append(one)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def note(records: RunRecords, unit: Unit, number: int) -> None:
    """Say that an attempt was here, and when."""
    records.files.put(f"units/{unit.name}/attempt-{number:04d}/begun", str(time.time()).encode())


def times_of(records: RunRecords, unit: Unit = UNIT) -> list[float]:
    return [
        float(records.files.get(f"units/{unit.name}/attempt-{number:04d}/begun") or b"")
        for number in records.attempts(unit)
    ]


def done(records: RunRecords, unit: Unit, number: int) -> Outcome:
    """Commit a result."""
    members = {str(member): {"place": "here"} for member in unit.members}
    result = {**RESULT, "members": {"posterior": members}, "attempt": number}
    records.commit(unit, number, result)
    return Outcome(result)


def always_fails(records: RunRecords, unit: Unit, number: int) -> Outcome:
    note(records, unit, number)
    return Outcome(error="OSError: away")


@pytest.mark.slow
def test_an_attempt_in_vain_is_tried_again_so_often_with_pauses_that_double(
    local_ray: Any, tmp_path: Path
) -> None:
    driver = drive(local_ray, tmp_path, always_fails, retries=2)
    (result,) = results_of(driver)
    assert (result.status, result.attempt, result.error) == ("failed", 3, "OSError: away")
    assert not result.ok
    first, second = (after - before for before, after in pairwise(times_of(driver.records)))
    assert first >= 1.0
    assert second >= 2.0
    # whatever is still running may not commit any more
    with pytest.raises(FencedError):
        driver.records.commit(UNIT, 3, {})


def test_no_retries(local_ray: Any, tmp_path: Path) -> None:
    (result,) = results_of(drive(local_ray, tmp_path, always_fails, retries=0))
    assert (result.status, result.attempt) == ("failed", 1)


def moves_on(records: RunRecords, unit: Unit, number: int) -> Outcome:
    """Each attempt gets a little further, until the fourth comes to the end."""
    if number == 4:
        return done(records, unit, number)
    name = f"step-{number:09d}-0123456789abcdef.ckpt"
    records.files.put(f"units/{unit.name}/attempt-{number:04d}/checkpoints/{name}", b"")
    os._exit(1)


@pytest.mark.slow
def test_attempts_that_got_further_do_not_count(local_ray: Any, tmp_path: Path) -> None:
    (result,) = results_of(drive(local_ray, tmp_path, moves_on, retries=0))
    assert (result.status, result.attempt) == ("done", 4)


def stays(records: RunRecords, unit: Unit, number: int) -> Outcome:
    """The first attempt gets somewhere, and none after it any further."""
    note(records, unit, number)
    name = "step-000000005-0123456789abcdef.ckpt"
    records.files.put(f"units/{unit.name}/attempt-{number:04d}/checkpoints/{name}", b"")
    return Outcome(error="OSError: away")


@pytest.mark.slow
def test_attempts_that_repeat_the_same_steps_count(local_ray: Any, tmp_path: Path) -> None:
    (result,) = results_of(drive(local_ray, tmp_path, stays, retries=1))
    assert (result.status, result.attempt) == ("failed", 3)


def makes_a_mistake(records: RunRecords, unit: Unit, number: int) -> Outcome:
    return Outcome(error="TypeError: no such option", final=True)


def test_a_mistake_is_not_tried_again(local_ray: Any, tmp_path: Path) -> None:
    (result,) = results_of(drive(local_ray, tmp_path, makes_a_mistake, retries=5))
    assert (result.status, result.attempt) == ("failed", 1)
    assert result.error == "TypeError: no such option"


def dies_after_the_commit(records: RunRecords, unit: Unit, number: int) -> Outcome:
    done(records, unit, number)
    os._exit(1)


def test_what_was_committed_counts_though_its_worker_died(local_ray: Any, tmp_path: Path) -> None:
    driver = drive(local_ray, tmp_path, dies_after_the_commit)
    (result,) = results_of(driver)
    assert (result.status, result.attempt) == ("done", 1)
    assert driver.records.granted(UNIT) == 1


def comes_too_late(records: RunRecords, unit: Unit, number: int) -> Outcome:
    """The attempt before it, which was taken for dead, commits before it may."""
    if number == 1:
        return Outcome(error="OSError: away")
    files = records.files
    records.grant(unit, 1)
    done(RunRecords(records.storage), unit, 1)
    records.grant(unit, 2)
    assert files.get(f"units/{unit.name}/commit.json") is not None
    try:
        return done(records, unit, number)
    except FencedError as error:
        return describe_error(error)


@pytest.mark.slow
def test_the_commit_of_an_attempt_taken_for_dead_counts_once(
    local_ray: Any, tmp_path: Path
) -> None:
    (result,) = results_of(drive(local_ray, tmp_path, comes_too_late))
    assert (result.status, result.attempt) == ("done", 1)


def is_taken_over(records: RunRecords, unit: Unit, number: int) -> Outcome:
    records.grant(unit, number + 1)  # by a driver elsewhere
    return describe_error(FencedError("given up"))


def test_a_driver_whose_run_was_taken_over_ends(local_ray: Any, tmp_path: Path) -> None:
    driver = drive(local_ray, tmp_path, is_taken_over, retries=5)
    with pytest.raises(
        LaunchError, match=r"Another driver has taken over .* attempt 2 of member 0"
    ):
        results_of(driver)
    assert driver.records.granted(UNIT) == 2


def overlaps(records: RunRecords, unit: Unit, number: int) -> Outcome:
    place = Path(records.storage)
    (place / f"running-{unit.name}").touch()
    time.sleep(0.2)
    running = len(list(place.glob("running-*")))
    (place / f"running-{unit.name}").unlink()
    (place / f"seen-{unit.name}").write_text(str(running))
    return done(records, unit, number)


@pytest.mark.slow
def test_more_units_than_may_be_handed_out_wait_for_their_turn(
    local_ray: Any, tmp_path: Path
) -> None:
    units = plan_units(6)
    driver = drive(local_ray, tmp_path, overlaps, units, outstanding=lambda: 2)
    assert sorted(result.member for result in results_of(driver)) == list(range(6))
    assert max(int(one.read_text()) for one in tmp_path.glob("seen-*")) <= 2


def falls_silent(records: RunRecords, unit: Unit, number: int) -> Outcome:
    """The first attempt says that it lives, and then nothing any more."""
    records.put_progress(unit, {"attempt": number, "time": 1.0, "node": "of the first"})
    if number == 1:
        time.sleep(PATIENCE)
    return done(records, unit, number)


@pytest.mark.slow
def test_an_attempt_without_a_sign_of_life_is_given_up(local_ray: Any, tmp_path: Path) -> None:
    cleared = []
    driver = drive(
        local_ray,
        tmp_path,
        falls_silent,
        lost_after=2.0,
        clear=lambda unit, attempt: cleared.append((unit, attempt)),
    )
    begin = time.monotonic()
    (result,) = results_of(driver)
    assert (result.status, result.attempt) == ("done", 2)
    assert time.monotonic() - begin >= 2.0
    assert cleared == [(UNIT, 1)]


def waits_in_the_queue(records: RunRecords, unit: Unit, number: int) -> Outcome:
    records.put_progress(unit, {"attempt": number - 1, "time": 1.0})  # of an attempt before it
    time.sleep(2.0)
    return done(records, unit, number)


@pytest.mark.slow
def test_an_attempt_that_has_not_begun_is_not_lost(local_ray: Any, tmp_path: Path) -> None:
    (result,) = results_of(drive(local_ray, tmp_path, waits_in_the_queue, lost_after=0.5))
    assert (result.status, result.attempt) == ("done", 1)


def test_a_broken_record_ends_the_driver_with_its_name(local_ray: Any, tmp_path: Path) -> None:
    driver = drive(local_ray, tmp_path, always_fails)
    driver.records.files.put(f"units/{UNIT.name}/lease.json", b"{}")
    with pytest.raises(ConfigurationError, match=r"lease\.json"):
        results_of(driver)


def test_the_run_is_let_go_at_the_end(local_ray: Any, tmp_path: Path) -> None:
    released: list[bool] = []
    driver = drive(local_ray, tmp_path, done, release=lambda: released.append(True))
    results_of(driver)
    assert released == [True]
