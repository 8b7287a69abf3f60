"""Members on two devices: two ranks of Ray Train with gloo, through everything that may happen."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from functools import partial
from pathlib import Path

import pytest
from ray.train import ControllerError, WorkerGroupError
from ray.util.placement_group import placement_group, placement_group_table

from lightning_bnn import Posterior
from lightning_bnn.errors import LaunchError
from lightning_bnn.launch import Attempt, LaunchedRun, MemberResult, Outcome, launch
from lightning_bnn.launch.checkpoints import last_checkpoint
from lightning_bnn.launch.ray_backend import RankError, group_memory, judge, remove_groups
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.storage.files import open_directory
from tests.launch.distributed_programs import make_bad_data, make_trainer
from tests.launch.faults import PATIENCE, ROOT, wait_for
from tests.launch.programs import (
    make_chains,
    make_data,
    make_net,
    make_variational,
    same_weights,
)

pytestmark = pytest.mark.usefixtures("local_ray")

start = partial(launch, allow_open_cluster=True, seed=0, devices=2, checkpoint_seconds=0)


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Posterior:
    """Member 0, trained by DDP of Lightning without the launcher."""
    directory = tmp_path_factory.mktemp("by_hand")
    command = [sys.executable, "-m", "tests.launch.distributed_programs", str(directory), "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return Posterior.load(directory, make_net())


def _end_of_ranks(storage: Path, member: int, attempt: int) -> str:
    """What both ranks end with; it is the same."""
    folder = Path(RunRecords(storage).folder(Unit((member,)), attempt))
    first, second = ((folder / f"end-{rank}").read_text() for rank in range(2))
    assert first == second
    assert not list((folder / "checkpoints").iterdir())  # it is done
    return first


def _start_with_trouble(folder: Path, kill: bool) -> LaunchedRun:
    return start(
        make_chains,
        make_data,
        1,
        storage=folder / "run",
        trainer=partial(make_trainer, trouble=folder / "trouble", kill=kill),
        # each rank takes a processor: nothing can start before what was there has let go of both
        resources={"CPU": 1},
    )


def _check_second_attempt(run: LaunchedRun, by_hand: Posterior) -> None:
    """It resumes from the checkpoint of the first and ends as if nothing had happened."""
    (result,) = _wait(run)
    assert (result.attempt, result.steps, result.ok) == (2, 8, True)
    folder = Path(run.records.folder(Unit((0,)), 2))
    steps = [int((folder / f"begin-{rank}").read_text()) for rank in range(2)]
    assert steps[0] == steps[1] in (2, 3)
    _end_of_ranks(Path(run.storage), 0, 2)
    (component,) = run.posterior().components
    assert len(component) == 4
    assert same_weights(component, by_hand, count=4)


@pytest.mark.slow
def test_a_killed_rank_changes_nothing(by_hand: Posterior, tmp_path: Path) -> None:
    run = _start_with_trouble(tmp_path, kill=True)
    _check_second_attempt(run, by_hand)
    assert (tmp_path / "trouble").exists()


@pytest.mark.slow
def test_a_cancelled_run_leaves_nothing_behind(by_hand: Posterior, tmp_path: Path) -> None:
    run = _start_with_trouble(tmp_path, kill=False)
    wait_for(lambda: (tmp_path / "trouble").exists())
    run.cancel()
    _check_second_attempt(_start_with_trouble(tmp_path, kill=False), by_hand)


@pytest.mark.slow
def test_two_members_side_by_side(by_hand: Posterior, tmp_path: Path) -> None:
    half = {"CPU": 0.5}
    run = start(make_chains, make_data, 2, storage=tmp_path, trainer=make_trainer, resources=half)
    results = _wait(run)
    assert [(one.member, one.attempt, one.steps) for one in results] == [(0, 1, 8), (1, 1, 8)]
    assert _end_of_ranks(tmp_path, 0, 1) != _end_of_ranks(tmp_path, 1, 1)
    first, second = run.posterior().components
    assert [len(first), len(second)] == [4, 4]
    assert same_weights(first, by_hand, count=4)
    assert not same_weights(second, by_hand, count=4)


@pytest.mark.slow
def test_a_diverging_member_is_not_tried_again(tmp_path: Path) -> None:
    half, trainer = {"CPU": 0.5}, {"max_epochs": 1}
    run = start(
        make_variational, make_bad_data, 1, storage=tmp_path, trainer=trainer, resources=half
    )
    with pytest.raises(LaunchError, match=r"rank 1: .*NonFiniteError: .* at step [0-9] .*hold NaN"):
        _wait(run)
    assert RunRecords(tmp_path).attempts(Unit((0,))) == [1]


LOST, AWAY = Outcome(error="RuntimeError: closed by peer"), Outcome(error="OSError: away")
MISTAKE = Outcome(error="TypeError: no", final=True, early=True)
ECHO = Outcome(error="ConfigurationError: On the first rank: OSError: away", final=True)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        # a killed rank is the cause of what the others say
        (
            WorkerGroupError("", {0: RankError(MISTAKE), 1: OSError("the actor died\nat once")}),
            Outcome(error="rank 1: the actor died"),
        ),
        # else the first mistake counts, wherever it was made
        (
            WorkerGroupError("", {0: RankError(LOST), 1: RankError(MISTAKE)}),
            Outcome(error="rank 1: TypeError: no", final=True, early=True),
        ),
        # an echo of the first rank is none
        (
            WorkerGroupError("", {0: RankError(AWAY), 1: RankError(ECHO)}),
            Outcome(error="rank 0: OSError: away"),
        ),
        # what Ray Train itself raises is tried again
        (ControllerError(RuntimeError("no workers")), Outcome(error="RuntimeError: no workers")),
    ],
)
def test_what_several_ranks_say_is_one_outcome(error: Exception, outcome: Outcome) -> None:
    assert judge(error) == outcome


def test_all_ranks_take_the_checkpoint_of_the_first(tmp_path: Path) -> None:
    """A zombie may save one more between the looks of two ranks."""
    records, unit = RunRecords(tmp_path), Unit((0,))
    files = open_directory(f"{records.folder(unit, 1)}/checkpoints")
    names = []
    for step, data in enumerate((b"older", b"newer")):
        names.append(f"step-{step:09d}-{hashlib.sha256(data).hexdigest()[:16]}.ckpt")
        files.put(names[-1], data)
    with last_checkpoint(records, unit) as found:
        assert found is not None
        assert (Path(found[0]).read_bytes(), found[1]) == (b"newer", 1)
    with last_checkpoint(records, unit, lambda own: (1, names[0])) as found:
        assert found is not None
        assert Path(found[0]).read_bytes() == b"older"
    with last_checkpoint(records, unit, lambda own: None) as found:
        assert found is None
    files.remove(names[0])
    gone = last_checkpoint(records, unit, lambda own: (1, names[0]))
    with pytest.raises(OSError, match="which the first rank has found, is gone"), gone:
        pass


def test_groups_are_found_by_their_mark() -> None:
    memory, other = (group_memory(Attempt("runs", Unit((0,)), number), {}) for number in (1, 2))
    group = placement_group([{"CPU": 0.1, "memory": memory}])
    assert group.wait(PATIENCE)
    assert remove_groups([other]) == 0
    assert remove_groups([memory]) == 1
    wait_for(lambda: placement_group_table(group)["state"] == "REMOVED")
    assert remove_groups([memory]) == 0


def _wait(run: LaunchedRun) -> list[MemberResult]:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.wait)
        try:
            return waiting.result(PATIENCE)
        except TimeoutError:
            run.cancel()  # else the pool would wait for ever
            raise
