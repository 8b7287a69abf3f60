"""Draws that go to the storage as they are taken: each attempt has all of them, none twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_bnn import Posterior
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.launch import load_run
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.saving import adopt_draws
from lightning_bnn.launch.units import Unit
from lightning_bnn.storage.stream import DrawStream
from tests.launch.faults import Note, Raise, left_behind, noted_steps, run_by_hand
from tests.launch.programs import make_chains, make_net, same_weights
from tests.trainers import quiet_trainer

UNIT = Unit((0,))


def options(folder: str, stop: int | None = None, every: int = 2) -> dict[str, Any]:
    last = [] if stop is None else [Raise(stop, OSError("interrupted"))]
    collector = SampleCollector(every=every, dirpath="whatever the user gave")
    return {"max_epochs": 3, "callbacks": [collector, Note(folder), *last]}


def stream(records: RunRecords, attempt: int, name: str = "draws") -> DrawStream:
    return DrawStream.open(f"{records.folder(UNIT, attempt)}/{name}")


def interrupted(
    storage: Path | str, stop: int, attempt: int = 1, seconds: float = 0.0
) -> RunRecords:
    with pytest.raises(OSError, match="interrupted"):
        run_by_hand(
            storage,
            make_chains,
            lambda folder: options(folder, stop),
            attempt=attempt,
            checkpoint_seconds=seconds,
        )
    return RunRecords(storage)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    storage = tmp_path_factory.mktemp("undisturbed")
    return left_behind(run_by_hand(storage, make_chains, options), UNIT)


def test_draws_go_to_the_folder_of_the_attempt(
    undisturbed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    records = run_by_hand("run", make_chains, options)
    assert stream(records, 1).steps() == [2, 4, 6, 8, 10, 12]
    assert not (tmp_path / "whatever the user gave").exists()
    assert left_behind(records, UNIT) == undisturbed
    commit = records.committed(UNIT)
    assert commit is not None
    assert commit["result"]["draws"] == 6
    assert commit["result"]["members"]["posterior"] == {
        "0": {"place": "attempt-0001/draws", "chain": 0}
    }


@pytest.mark.parametrize("stop", [2, 5, 8, 12])  # the draw of 8 comes before its checkpoint
def test_a_later_attempt_has_the_draws_of_the_earlier_one(
    undisturbed: dict[str, Any], tmp_path: Path, stop: int
) -> None:
    before = stream(interrupted(tmp_path, stop), 1).hashes()
    records = run_by_hand(tmp_path, make_chains, options, attempt=2)
    assert noted_steps(records, UNIT, 2)[0] == stop - 1
    assert stream(records, 1).hashes() == before  # nobody touches what another attempt has written
    assert stream(records, 2).steps() == [2, 4, 6, 8, 10, 12]
    assert left_behind(records, UNIT) == undisturbed


def test_draws_follow_the_checkpoint_and_not_the_last_attempt(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    interrupted(tmp_path, stop=9)
    # a second attempt that got further and left no checkpoint: what it has drawn is not known
    interrupted(tmp_path, stop=11, attempt=2, seconds=3600.0)
    records = run_by_hand(tmp_path, make_chains, options, attempt=3)
    assert stream(records, 2).steps() == [2, 4, 6, 8, 10]
    assert noted_steps(records, UNIT, 3)[0] == 8
    assert left_behind(records, UNIT) == undisturbed


def test_an_attempt_that_died_while_it_took_draws_over_is_no_harm(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    records = interrupted(tmp_path, stop=7)
    trainer = quiet_trainer(callbacks=[SampleCollector(every=2, dirpath="x")])
    folder = records.folder(UNIT, 2)
    adopt_draws(records, UNIT, trainer, folder, before=1)
    taken = Path(folder, "draws")
    (taken / "manifest.json").unlink()  # it comes last
    sorted((taken / "records").iterdir())[-1].unlink()
    records = run_by_hand(tmp_path, make_chains, options, attempt=3)
    assert left_behind(records, UNIT) == undisturbed


def test_chains_of_a_stack_are_told_apart(tmp_path: Path) -> None:
    unit = Unit((3, 4))
    records = run_by_hand(tmp_path, make_chains, options, unit=unit)
    commit = records.committed(unit)
    assert commit is not None
    places = commit["result"]["members"]["posterior"]
    assert places == {
        "3": {"place": "attempt-0001/draws", "chain": 0},
        "4": {"place": "attempt-0001/draws", "chain": 1},
    }
    both = Posterior.load(f"{records.folder(unit, 1)}/draws", make_net())
    assert len(both) == 12  # type: ignore[arg-type]
    records.begin({"units": [[3, 4]]})
    first, second = load_run(tmp_path).posterior(make_net()).components
    assert [len(first), len(second)] == [6, 6]  # type: ignore[arg-type]
    assert not same_weights(first, second, count=6)


def test_several_collectors_have_folders_of_their_own(tmp_path: Path) -> None:
    def two(folder: str, stop: int | None = None) -> dict[str, Any]:
        found = options(folder, stop)
        found["callbacks"].insert(1, SampleCollector(every=3, dirpath="whatever the user gave"))
        return found

    undisturbed = run_by_hand(tmp_path / "undisturbed", make_chains, two)
    with pytest.raises(OSError, match="interrupted"):
        run_by_hand(tmp_path / "run", make_chains, lambda folder: two(folder, stop=7))
    records = run_by_hand(tmp_path / "run", make_chains, two, attempt=2)
    for name, steps in (("draws", [2, 4, 6, 8, 10, 12]), ("draws-1", [3, 6, 9, 12])):
        assert stream(records, 2, name).steps() == steps
        assert stream(records, 2, name).hashes() == stream(undisturbed, 1, name).hashes()


def test_draws_on_remote_storage(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    storage = f"memory:/{tmp_path}"

    def remote(folder: str, stop: int | None = None) -> dict[str, Any]:
        return {**options(str(tmp_path), stop), "logger": False}

    with pytest.raises(OSError, match="interrupted"):
        run_by_hand(storage, make_chains, lambda folder: remote(folder, stop=8))
    records = run_by_hand(storage, make_chains, remote, attempt=2)
    assert stream(records, 2).steps() == [2, 4, 6, 8, 10, 12]
    assert left_behind(records, UNIT) == undisturbed
    for attempt in (1, 2):
        assert not records.files.names(f"units/{UNIT.name}/attempt-{attempt:04d}/checkpoints")
