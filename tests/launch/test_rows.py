"""Rows of runs that are made up, one record at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.rows import SILENT_AFTER, Row, RunReader, run_rows
from lightning_bnn.launch.units import Unit
from lightning_bnn.storage.manifest import VERSION, encode

NOW = 1_000_000.0
NODE = "3f2a91c0" * 7


def begin(storage: Any, units: list[list[int]]) -> RunRecords:
    records = RunRecords(storage)
    records.begin({"units": units, "seed": 0})
    return records


def tell(records: RunRecords, unit: Unit, **facts: Any) -> None:
    """What an attempt would tell after 10 s and 20 steps of training."""
    told = {
        "attempt": 1, "phase": "training", "host": "box.example", "node": NODE, "device": "gpu 3",
        "started": NOW - 15, "first": [NOW - 10, 0], "time": NOW, "step": 20, "steps": 50,
        "loss": 0.5,
    }  # fmt: skip
    records.put_progress(unit, {**told, **facts})


def commit(
    records: RunRecords, unit: Unit, left: list[int] | None = None, attempt: int = 1
) -> None:
    """What an attempt would commit, with posteriors of those members that are left."""
    left = list(unit.members) if left is None else left
    places = {str(one): {"place": f"attempt-0001/posterior-{one:05d}"} for one in left}
    records.grant(unit, attempt)
    result = {
        "members": {"posterior": places}, "attempt": attempt, "steps": 50, "seconds": 42.0,
        "metrics": {"train_loss": 0.25, "val_nll": 0.125}, "node": NODE, "device": "gpu 3",
    }  # fmt: skip
    records.commit(unit, attempt, result)


def give_up(records: RunRecords, unit: Unit, attempt: int, error: str) -> None:
    """A lease that says why there will be no other attempt."""
    body = {"format": "lightning_bnn.lease", "version": VERSION, "attempt": attempt, "error": error}
    records.files.put(f"units/{unit.name}/lease.json", encode(body))


@pytest.fixture
def records(tmp_path: Path) -> RunRecords:
    return begin(tmp_path, [[0, 1, 2]])


@pytest.fixture
def unit() -> Unit:
    return Unit((0, 1, 2))


def only(records: RunRecords, now: float = NOW) -> Row:
    (row,) = run_rows(records, now)
    return row


def test_a_unit_without_a_folder_is_queued(records: RunRecords) -> None:
    assert only(records) == Row((0, 1, 2), "queued")


def test_a_unit_whose_attempt_waits_in_ray_is_queued(records: RunRecords, unit: Unit) -> None:
    records.grant(unit, 1)
    assert only(records) == Row((0, 1, 2), "queued", attempt=0)


@pytest.mark.parametrize("phase", ["starting", "training", "saving"])
def test_a_unit_is_in_the_phase_that_it_tells(records: RunRecords, unit: Unit, phase: str) -> None:
    records.grant(unit, 1)
    tell(records, unit, phase=phase)
    row = only(records, NOW + 2)
    assert (row.state, row.attempt, row.age, row.seconds) == (phase, 1, 2.0, 17.0)
    assert (row.host, row.node, row.device) == ("box.example", NODE, "gpu 3")
    assert (row.step, row.steps, row.loss) == (20, 50, 0.5)
    assert not row.ended


def test_an_attempt_that_has_told_nothing_but_its_start(records: RunRecords, unit: Unit) -> None:
    records.grant(unit, 1)
    told = {"attempt": 1, "phase": "starting", "host": "a", "started": NOW, "time": NOW}
    records.put_progress(unit, told)
    row = only(records)
    assert (row.state, row.step, row.steps, row.loss, row.eta) == ("starting", *[None] * 4)


def test_a_unit_without_a_sign_of_life_is_silent(records: RunRecords, unit: Unit) -> None:
    records.grant(unit, 1)
    tell(records, unit)
    assert only(records, NOW + SILENT_AFTER).state == "training"
    row = only(records, NOW + SILENT_AFTER + 1)
    assert (row.state, row.eta, row.age) == ("silent", None, SILENT_AFTER + 1)
    assert not row.ended


def test_an_attempt_that_was_given_up_waits_for_the_next(records: RunRecords, unit: Unit) -> None:
    tell(records, unit)
    records.grant(unit, 2)
    row = only(records, NOW + 500)
    assert (row.state, row.attempt, row.host, row.eta) == ("queued", 1, None, None)


@pytest.mark.parametrize("granted", [1, 2])
def test_an_attempt_that_raised_has_failed(records: RunRecords, unit: Unit, granted: int) -> None:
    records.grant(unit, granted)
    tell(records, unit, phase="failed")
    row = only(records, NOW + 10)
    assert (row.state, row.attempt, row.error, row.eta) == ("failed", 1, None, None)
    assert row.seconds == 15.0  # it does not grow any more
    assert not row.ended  # another attempt may come
    assert only(records, NOW + 1000).ended


def test_a_lease_with_an_error_is_the_end(records: RunRecords, unit: Unit) -> None:
    give_up(records, unit, 1, "no node has room")
    assert only(records) == Row((0, 1, 2), "failed", error="no node has room")
    tell(records, unit)  # a worker that was killed tells nothing of its end
    row = only(records)
    assert (row.state, row.error, row.attempt, row.ended) == ("failed", "no node has room", 1, True)


def test_an_attempt_after_a_failure_is_seen(records: RunRecords, unit: Unit) -> None:
    give_up(records, unit, 2, "the disk is full")
    tell(records, unit, phase="failed")
    records.grant(unit, 3)  # launched again
    tell(records, unit, attempt=3)
    row = only(records)
    assert (row.state, row.attempt, row.error) == ("training", 3, None)


def test_a_commit_is_the_end(records: RunRecords, unit: Unit) -> None:
    tell(records, unit, attempt=2, phase="saving")
    commit(records, unit, attempt=2)
    row = only(records, NOW + 1000)
    assert (row.state, row.diverged, row.ended) == ("done", (), True)
    assert (row.host, row.node, row.device) == ("box.example", NODE, "gpu 3")
    assert (row.step, row.steps, row.loss, row.attempt) == (50, 50, 0.25, 2)
    assert (row.seconds, row.eta, row.age) == (42.0, None, None)


def test_a_commit_counts_without_any_progress(records: RunRecords, unit: Unit) -> None:
    commit(records, unit)
    row = only(records)
    assert (row.state, row.host, row.node) == ("done", None, NODE)


@pytest.mark.parametrize(
    ("left", "state", "diverged"), [([0, 2], "done", (1,)), ([], "diverged", (0, 1, 2))]
)
def test_members_that_diverged_are_named(
    records: RunRecords, unit: Unit, left: list[int], state: str, diverged: tuple[int, ...]
) -> None:
    commit(records, unit, left)
    row = only(records)
    assert (row.state, row.diverged, row.ended) == (state, diverged, True)


@pytest.mark.parametrize(
    ("told", "eta"),
    [
        ({}, 15.0),  # 20 steps in 10 s: 30 are left
        ({"first": [NOW - 5, 10]}, 15.0),  # went on at step 10: 10 steps in 5 s
        ({"first": [NOW - 20, 15]}, 120.0),  # 5 steps in 20 s, whatever was before
        ({"first": [NOW - 20, 20]}, None),  # no step yet in this attempt
        ({"first": None}, None),
        ({"steps": None}, None),
        ({"step": 50}, 0.0),
        ({"step": 55}, 0.0),  # more than was thought
    ],
)
def test_the_eta_follows_from_the_steps_of_this_attempt(
    records: RunRecords, unit: Unit, told: dict[str, Any], eta: float | None
) -> None:
    records.grant(unit, 1)
    tell(records, unit, **told)
    assert only(records, NOW).eta == eta
    later = only(records, NOW + 4).eta
    assert later == (None if eta is None else max(0.0, eta - 4))


@pytest.mark.parametrize("ahead", [-40.0, 3600.0])
def test_the_clock_of_another_host_changes_neither_speed_nor_state(
    records: RunRecords, unit: Unit, ahead: float
) -> None:
    records.grant(unit, 1)
    theirs = NOW + ahead
    tell(records, unit, started=theirs - 15, first=[theirs - 10, 0], time=theirs)
    row = only(records, NOW)
    assert row.state == "training"
    assert row.age == max(0.0, -ahead)  # a sign from the future is a new one
    assert row.eta == max(0.0, 15.0 - max(0.0, -ahead))


def test_a_reader_goes_by_when_it_saw_the_sign_change(records: RunRecords, unit: Unit) -> None:
    """A host whose clock is an hour late is taken for silent only until its next sign."""
    records.grant(unit, 1)
    reader = RunReader(records)
    tell(records, unit, time=NOW - 3600, first=[NOW - 3610, 0])
    assert reader.rows(NOW)[0].state == "silent"
    tell(records, unit, time=NOW - 3595, first=[NOW - 3610, 0])
    (row,) = reader.rows(NOW + 5)
    assert (row.state, row.age) == ("training", 0.0)
    (row,) = reader.rows(NOW + 5 + SILENT_AFTER + 1)
    assert (row.state, row.age) == ("silent", SILENT_AFTER + 1)


def test_a_zombie_that_tells_on_is_not_shown(records: RunRecords, unit: Unit) -> None:
    records.grant(unit, 2)
    reader = RunReader(records)
    tell(records, unit, attempt=2, step=7)
    reader.rows(NOW)
    tell(records, unit, attempt=1, phase="failed", step=30)
    (row,) = reader.rows(NOW + 1)
    assert (row.state, row.attempt, row.step) == ("training", 2, 7)


def test_what_is_done_is_read_once(tmp_path: Path) -> None:
    records = begin(tmp_path, [[0], [1]])
    commit(records, Unit((0,)))
    reader = RunReader(records)
    assert [row.state for row in reader.rows(NOW)] == ["done", "queued"]
    (tmp_path / "units/00000/commit.json").write_text("damaged; nobody looks at it again")
    commit(records, Unit((1,)))
    assert [row.state for row in reader.rows(NOW)] == ["done", "done"]
    with pytest.raises(ConfigurationError, match=r"commit\.json"):
        run_rows(records, NOW)


def test_a_reader_sees_members_that_were_added(tmp_path: Path) -> None:
    reader = RunReader(begin(tmp_path, [[0]]))
    assert len(reader.rows(NOW)) == 1
    begin(tmp_path, [[0], [1]])
    assert [row.members for row in reader.rows(NOW)] == [(0,), (1,)]


def test_progress_that_is_torn_is_passed_over(records: RunRecords, unit: Unit) -> None:
    records.grant(unit, 1)
    reader = RunReader(records)
    tell(records, unit)
    before = reader.rows(NOW)
    records.files.put("units/00000/progress.json", json.dumps({"attempt": 1})[:-4].encode())
    assert reader.rows(NOW) == before
    assert only(records).state == "queued"


def test_remote_storage_reads_the_same() -> None:
    records = begin("memory://rows-test", [[0], [1], [2]])
    commit(records, Unit((0,)))
    records.grant(Unit((1,)), 1)
    tell(records, Unit((1,)))
    assert [row.state for row in run_rows(records, NOW)] == ["done", "training", "queued"]


def test_a_storage_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no run"):
        run_rows(RunRecords(tmp_path), NOW)
