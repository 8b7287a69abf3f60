"""Workers that are killed or stand still, and runs that are cancelled, in real fits on Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_bnn.callbacks import SampleCollector, SWAGMoments
from lightning_bnn.errors import ConfigurationError, LaunchError
from lightning_bnn.launch import launch
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from tests.launch.faults import (
    Kill,
    Note,
    attempt_number,
    left_behind,
    noted_steps,
    run_by_hand,
    wait_for,
)
from tests.launch.programs import (
    Slowly,
    make_chains,
    make_data,
    make_ensemble,
    make_variational,
)

pytestmark = pytest.mark.usefixtures("local_ray")

start = partial(launch, allow_open_cluster=True, seed=0)
UNIT = Unit((0,))


# ------------------------------------------------------------------------------- killed workers


EPOCHS = 3  # of four steps
# Which strategy a member has, what is done besides, and after which step its first attempt is
# killed: in an epoch, at its end, after the last step, when all is done but the saving, before
# there is a checkpoint, and at the beginning of an epoch.
KILLED: list[tuple[Any, str, int | None]] = [
    (make_ensemble, "swag", 6),
    (make_chains, "draws", 8),
    (make_variational, "swag", 12),
    (make_chains, "draws", None),
    (make_ensemble, "", 1),
    (make_chains, "draws", 9),
]


def make_killed(members: list[int], seed: int) -> Any:
    make_bnn = KILLED[members[0]][0]
    return make_bnn() if make_bnn is make_variational else make_bnn(members, seed)


def calm_trainer(members: list[int], folder: str) -> dict[str, Any]:
    callbacks: list[Any] = [Note(folder)]
    kind = KILLED[members[0]][1]
    if kind == "draws":
        callbacks.insert(0, SampleCollector(every=2, dirpath="draws"))
    elif kind == "swag":
        callbacks.insert(0, SWAGMoments(start=0))
    return {"max_epochs": EPOCHS, "callbacks": callbacks}


def killed_trainer(members: list[int], folder: str) -> dict[str, Any]:
    options = calm_trainer(members, folder)
    if attempt_number(folder) == 1:
        options["callbacks"].append(Kill(KILLED[members[0]][2]))
    return options


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """What each member of the killed ones leaves behind if it is not killed, in this process."""
    storage, known = tmp_path_factory.mktemp("undisturbed"), {}

    def find(member: int) -> dict[str, Any]:
        if member not in known:
            unit = Unit((member,))
            records = run_by_hand(
                storage, make_killed, calm_trainer, unit, checkpoint_seconds=3600.0
            )
            known[member] = left_behind(records, unit)
        return known[member]

    return find


@pytest.fixture(scope="module")
def killed(local_ray: Any, tmp_path_factory: pytest.TempPathFactory) -> RunRecords:
    """A run of which the worker of every member was killed once."""
    storage = tmp_path_factory.mktemp("killed")
    run = start(
        make_killed,
        make_data,
        len(KILLED),
        storage=storage,
        trainer=killed_trainer,
        checkpoint_seconds=0,
    )
    results = run.wait()
    assert [(one.member, one.attempt, one.status) for one in results] == [
        (member, 2, "done") for member in range(len(KILLED))
    ]
    return RunRecords(storage)


@pytest.mark.slow
def test_killed_members_end_as_undisturbed_ones(
    killed: RunRecords, undisturbed: Callable[[int], dict[str, Any]]
) -> None:
    for member, (_, kind, step) in enumerate(KILLED):
        unit = Unit((member,))
        assert left_behind(killed, unit) == undisturbed(member)
        last = 12 if step is None else step
        assert noted_steps(killed, unit, 1) == list(range(last + 1))
        # there is none after the last step, and that of the step before is the one to resume from
        assert noted_steps(killed, unit, 2) == list(range(min(last, 12) - 1, 13))
        if kind == "draws":
            drawn = undisturbed(member)[f"posterior {member}"]
            assert list(drawn) == [2, 4, 6, 8, 10, 12]


# ------------------------------------------------------------------------------- lost and cancelled


def stopping_trainer(members: list[int], folder: str) -> dict[str, Any]:
    options = {"max_epochs": EPOCHS, "callbacks": [Note(folder)]}
    if attempt_number(folder) == 1:
        options["callbacks"].append(Kill(6, signal.SIGSTOP))  # type: ignore[attr-defined]
    return options


@pytest.mark.slow
def test_a_worker_that_stands_still_is_given_up(tmp_path: Path) -> None:
    run = start(
        make_ensemble,
        make_data,
        1,
        storage=tmp_path,
        trainer=stopping_trainer,
        checkpoint_seconds=0,
        lost_after=8.0,
        retries=20,  # on a busy machine others may be taken for dead as well
    )
    records = RunRecords(tmp_path)
    process = wait_for(lambda: (records.progress(UNIT) or {}).get("process"), "the first attempt")
    (result,) = run.wait()
    assert (result.status, result.steps) == ("done", 12)
    assert result.attempt >= 2
    assert noted_steps(records, UNIT, 1)[-1] == 6
    wait_for(
        lambda: not _exists(process), "the end of the first worker"
    )  # so that its slot is free
    calm = run_by_hand(tmp_path / "calm", make_ensemble, lambda folder: {"max_epochs": EPOCHS})
    assert left_behind(records, UNIT) == left_behind(calm, UNIT)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def slow_trainer(members: list[int], folder: str, seconds: float = 0.2) -> dict[str, Any]:
    return {"max_epochs": EPOCHS, "callbacks": [Note(folder), Slowly(seconds)]}


@pytest.mark.slow
def test_a_cancelled_run_can_be_launched_again_and_goes_on(tmp_path: Path) -> None:
    go = partial(
        start, make_ensemble, make_data, 3, storage=tmp_path, checkpoint_seconds=0, lost_after=20.0
    )
    run = go(trainer=partial(slow_trainer, seconds=3.0))
    records = RunRecords(tmp_path)
    checkpoints = Path(records.folder(UNIT, 1)) / "checkpoints"
    wait_for(lambda: checkpoints.is_dir() and list(checkpoints.glob("*.ckpt")), "a checkpoint")
    with pytest.raises(ConfigurationError, match="is under way in this process"):
        go(trainer=slow_trainer)
    run.cancel()
    with pytest.raises(
        LaunchError, match="The run was cancelled: 0 members are done and 3 are not"
    ):
        run.wait()
    process = (records.progress(UNIT) or {})["process"]
    wait_for(lambda: not _exists(process), "the end of the worker")
    again = go(trainer=slow_trainer)
    assert [result.ok for result in again.wait()] == [True, True, True]
    assert noted_steps(records, UNIT, 2)[0] > 0  # from where it was
    calm = run_by_hand(tmp_path / "calm", make_ensemble, lambda folder: {"max_epochs": EPOCHS})
    assert left_behind(records, UNIT) == left_behind(calm, UNIT)
