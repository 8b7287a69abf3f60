"""The records of a run: leases, commits of which there is one, and storage that was damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_bnn.errors import ConfigurationError, FencedError
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit, plan_units
from tests.storage.test_files import race

UNIT = Unit((0,))
RUN = {"units": [[0], [1]], "seed": 0, "devices": 1, "bnn": "a.b", "data": "c.d"}


@pytest.fixture(params=["local", "memory"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> RunRecords:
    return RunRecords(tmp_path / "run" if request.param == "local" else f"memory:/{tmp_path}")


class Flaky:
    """Storage that is away for its first calls, and then back."""

    def __init__(self, files: Any, failures: int, loses_answers: bool = False) -> None:
        self.files, self.failures, self.loses_answers = files, failures, loses_answers
        self.calls = 0

    def __str__(self) -> str:
        return str(self.files)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            away = self.calls <= self.failures
            if away and not self.loses_answers:
                raise OSError("the storage is away")
            answer = getattr(self.files, name)(*arguments, **options)
            if away:
                raise ConnectionResetError("the answer was lost")
            return answer

        return call


# ------------------------------------------------------------------------------- leases and commits


def test_a_zombie_is_refused_after_a_newer_grant_and_after_another_commit(
    records: RunRecords,
) -> None:
    records.grant(UNIT, 1)
    records.grant(UNIT, 2)
    with pytest.raises(FencedError, match=r"Attempt 1 of member 0.*attempt 2 has taken its place"):
        records.commit(UNIT, 1, {"of": "the zombie"})
    assert records.committed(UNIT) is None
    records.commit(UNIT, 2, {"of": "the second"})
    # also where it looked at the lease before that was taken away: committing is exclusive
    records.grant(UNIT, 1)
    with pytest.raises(FencedError, match=r"Attempt 1 of member 0.*attempt 2 has done so before"):
        records.commit(UNIT, 1, {"of": "the zombie"})
    assert records.committed(UNIT)["result"] == {"of": "the second"}  # type: ignore[index]


def test_a_zombie_that_commits_while_the_lease_changes_is_the_only_one(records: RunRecords) -> None:
    records.grant(UNIT, 1)
    files = records.files

    class Meanwhile(Flaky):
        def create(self, *arguments: Any) -> bool:
            RunRecords(records.storage).grant(UNIT, 2)
            return files.create(*arguments)

    zombie = RunRecords(records.storage)
    zombie.files = Meanwhile(files, 0)  # type: ignore[assignment]
    zombie.commit(UNIT, 1, {"of": "the first"})
    with pytest.raises(FencedError, match="attempt 1 has done so before"):
        records.commit(UNIT, 2, {"of": "the second"})
    assert records.committed(UNIT)["result"] == {"of": "the first"}  # type: ignore[index]


def test_a_commit_twice_by_the_same_attempt_is_one(records: RunRecords) -> None:
    """The answer to the first may have been lost."""
    records.grant(UNIT, 1)
    records.commit(UNIT, 1, {"loss": 0.5})
    records.commit(UNIT, 1, {"loss": 0.5})
    with pytest.raises(FencedError, match="attempt 1 has done so before"):
        records.commit(UNIT, 1, {"loss": 0.25})


def test_an_attempt_without_a_lease_is_refused(records: RunRecords) -> None:
    with pytest.raises(FencedError, match="its lease is gone"):
        records.commit(UNIT, 1, {})
    with pytest.raises(FencedError):
        records.check_granted(UNIT, 1)
    records.grant(UNIT, 1)
    records.check_granted(UNIT, 1)


def test_of_eight_racing_threads_one_commits(records: RunRecords) -> None:
    records.grant(UNIT, 1)

    def commit(number: int) -> bool:
        try:
            RunRecords(records.storage).commit(UNIT, 1, {"number": number})
        except FencedError:
            return False
        return True

    winners = [number for number, won in enumerate(race(commit)) if won]
    assert len(winners) == 1
    assert records.committed(UNIT)["result"] == {"number": winners[0]}  # type: ignore[index]


# ------------------------------------------------------------------------------- the run


def test_a_run_that_was_begun_is_resumed(records: RunRecords) -> None:
    assert records.run() is None
    assert records.begin(RUN) == RUN
    assert records.begin(RUN) == RUN
    assert records.run() == RUN
    assert records.units() == [Unit((0,)), Unit((1,))]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1),
        ("bnn", "x.y"),
        ("units", [[0]]),  # fewer would leave results that nobody asked for
        ("units", [[0, 1]]),
        ("new", 1),
    ],
)
def test_another_run_in_the_storage_is_refused(records: RunRecords, name: str, value: Any) -> None:
    records.begin(RUN)
    with pytest.raises(ConfigurationError) as caught:
        records.begin({**RUN, name: value})
    said = str(caught.value)
    assert f"{name}={RUN.get(name)!r}" in said
    assert f"{name}={value!r}" in said
    assert "another storage=" in said
    assert str(records.files) in said
    assert records.run() == RUN


def test_members_may_be_added_where_the_last_stack_is_full(records: RunRecords) -> None:
    def stacked(members: int) -> dict[str, Any]:
        return {**RUN, "units": [list(unit.members) for unit in plan_units(members, stack=2)]}

    records.begin(stacked(4))
    assert records.begin(stacked(5)) == stacked(5)
    assert len(records.units()) == 3
    with pytest.raises(ConfigurationError, match="Members can be added after full stacks only"):
        records.begin(stacked(6))  # member 4 would be trained again, in another unit


def test_storage_without_a_run_says_what_is_there(records: RunRecords) -> None:
    with pytest.raises(ConfigurationError, match=r"no run: there is no run\.json; found: nothing"):
        records.units()
    records.files.put("picture.png", b"")
    with pytest.raises(ConfigurationError, match=r"found: picture\.png"):
        records.units()


# ------------------------------------------------------------------------------- damage


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "altered": lambda data: data.replace(b'"version":1', b'"version":1,"more":2'),
    "foreign": lambda data: b'{"name": "something else"}',
    "newer": lambda data: data.replace(b'"version":1', b'"version":9'),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["run.json", "units/00000/lease.json", "units/00000/commit.json"])
def test_a_damaged_record_is_named(records: RunRecords, name: str, damage: str) -> None:
    records.begin(RUN)
    records.grant(UNIT, 1)
    records.commit(UNIT, 1, {})
    data = records.files.get(name)
    assert data is not None
    records.files.put(name, DAMAGE[damage](data))
    read: dict[str, Callable[[], Any]] = {
        "run.json": records.run,
        "units/00000/lease.json": lambda: records.granted(UNIT),
        "units/00000/commit.json": lambda: records.committed(UNIT),
    }
    with pytest.raises(ConfigurationError, match=name.replace(".", r"\.")) as caught:
        read[name]()
    assert str(records.files) in str(caught.value)
    if name == "run.json":
        with pytest.raises(ConfigurationError, match=r"run\.json.*choose another storage="):
            records.begin(RUN)


def test_what_json_cannot_hold_is_not_committed(records: RunRecords) -> None:
    records.grant(UNIT, 1)
    with pytest.raises(ConfigurationError, match=r"commit.*loss.*nan"):
        records.commit(UNIT, 1, {"loss": float("nan")})
    assert records.committed(UNIT) is None


# ------------------------------------------------------------------------------- storage


@pytest.mark.parametrize("loses_answers", [False, True], ids=["away", "answers lost"])
def test_storage_that_comes_back_loses_nothing(records: RunRecords, loses_answers: bool) -> None:
    plain = records.files
    for call in (
        lambda: records.begin(RUN),
        lambda: records.grant(UNIT, 1),
        lambda: records.commit(UNIT, 1, {"loss": 0.5}),
        lambda: records.committed(UNIT),
    ):
        records.files = Flaky(plain, 1, loses_answers)  # type: ignore[assignment]
        call()
        assert records.files.calls > 1  # type: ignore[attr-defined]
    records.files = plain
    assert records.run() == RUN
    assert records.committed(UNIT) == {"attempt": 1, "result": {"loss": 0.5}}


def test_progress_that_cannot_be_read_is_none(records: RunRecords) -> None:
    assert records.progress(UNIT) is None
    records.put_progress(UNIT, {"step": 3})
    assert records.progress(UNIT) == {"step": 3}
    for broken in (b"", b'{"step', b"[3]", b"\xff"):
        records.files.put("units/00000/progress.json", broken)
        assert records.progress(UNIT) is None
    records.files = Flaky(records.files, 1)  # type: ignore[assignment]
    assert records.progress(UNIT) is None  # at once: there will be another


def test_folders_and_attempts(records: RunRecords) -> None:
    assert records.folder(UNIT) == f"{records.storage}/units/00000"
    assert records.folder(UNIT, 2) == f"{records.storage}/units/00000/attempt-0002"
    big = Unit((123456, 123457))
    assert records.folder(big, 12345) == f"{records.storage}/units/123456/attempt-12345"
    assert records.attempts(UNIT) == []
    for name in ("attempt-0002/a", "attempt-0010/a", "attempt-12345/a", "attempt-x/a", "other/a"):
        records.files.put(f"units/00000/{name}", b"")
    assert records.attempts(UNIT) == [2, 10, 12345]
