"""Workers that are killed or stand still, and runs that are cancelled, in real fits on Ray."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

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
    make_data,
    make_ensemble,
)

pytestmark = pytest.mark.usefixtures("local_ray")

start = partial(launch, allow_open_cluster=True, seed=0)
UNIT = Unit((0,))


EPOCHS = 3  # of four steps


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
