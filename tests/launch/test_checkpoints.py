"""Checkpoints of attempts: how many there are, which one is taken, and what comes of it."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader, IterableDataset

from lightning_bnn import DeepEnsemble
from lightning_bnn.callbacks import SampleCollector, SWAGMoments
from lightning_bnn.errors import ConfigurationError, FencedError
from lightning_bnn.launch.backend import Attempt
from lightning_bnn.launch.checkpoints import checkpoint_step, last_checkpoint
from lightning_bnn.launch.member import run_attempt
from lightning_bnn.launch.recipe import Factories
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.likelihoods import Gaussian
from tests.launch.faults import Note, Raise, left_behind, noted_steps, run_by_hand, wait_for
from tests.launch.programs import (
    make_chains,
    make_data,
    make_ensemble,
    make_net,
    make_variational,
)

ROOT = Path(__file__).parents[2]
UNIT = Unit((0,))
EPOCHS = 3  # of four steps


class Interrupted(OSError):
    """What ends an attempt, so that another may follow."""


def options(folder: str, stop: int | None = None, *callbacks: Any) -> dict[str, Any]:
    """Options of a trainer that notes its steps and is interrupted after one of them."""
    last = [] if stop is None else [Raise(stop, Interrupted())]
    return {"max_epochs": EPOCHS, "callbacks": [*callbacks, Note(folder), *last]}


def interrupted(storage: Path, stop: int, attempt: int = 1, seconds: float = 0.0) -> RunRecords:
    """The records of an ensemble whose attempt was interrupted after a step."""
    with pytest.raises(Interrupted):
        run_by_hand(
            storage,
            make_ensemble,
            lambda folder: options(folder, stop),
            attempt=attempt,
            checkpoint_seconds=seconds,
        )
    return RunRecords(storage)


def names(records: RunRecords, attempt: int = 1) -> list[str]:
    return records.files.names(f"units/{UNIT.name}/attempt-{attempt:04d}/checkpoints")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    storage = tmp_path_factory.mktemp("undisturbed")
    return left_behind(run_by_hand(storage, make_ensemble, options), UNIT)


# ------------------------------------------------------------------------------- files


def test_the_last_two_are_kept_under_names_that_say_what_they_are(tmp_path: Path) -> None:
    records = interrupted(tmp_path, stop=6)
    first, second = names(records)
    # that of step 6 would have come after the interruption
    assert re.fullmatch(r"step-000000004-[0-9a-f]{16}\.ckpt", first)
    assert re.fullmatch(r"step-000000005-[0-9a-f]{16}\.ckpt", second)
    assert checkpoint_step(records, UNIT) == 5


def test_none_are_left_when_the_unit_is_done(tmp_path: Path) -> None:
    interrupted(tmp_path, stop=3)
    records = run_by_hand(tmp_path, make_ensemble, options, attempt=2)
    assert names(records, 1) == names(records, 2) == []
    assert checkpoint_step(records, UNIT) == 0
    with last_checkpoint(records, UNIT) as found:
        assert found is None


# ------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("stop", [1, 4, 6, 12])  # at the ends of epochs, and within one
def test_another_attempt_resumes_where_the_last_was(
    undisturbed: dict[str, Any], tmp_path: Path, stop: int
) -> None:
    interrupted(tmp_path, stop=stop)
    records = run_by_hand(tmp_path, make_ensemble, options, attempt=2)
    assert noted_steps(records, UNIT, 1) == list(range(stop + 1))
    assert noted_steps(records, UNIT, 2) == list(range(stop - 1, 13))
    assert left_behind(records, UNIT) == undisturbed


def test_attempt_after_attempt(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    for attempt, stop in enumerate((2, 5, 5, 9, 12), start=1):
        interrupted(tmp_path, stop, attempt)
    records = run_by_hand(tmp_path, make_ensemble, options, attempt=6)
    assert noted_steps(records, UNIT, 6) == [11, 12]
    assert left_behind(records, UNIT) == undisturbed


@pytest.mark.parametrize(("damaged", "step"), [(1, 4), (2, 0)])  # of the two that are kept
def test_those_that_are_damaged_are_passed_over(
    undisturbed: dict[str, Any], tmp_path: Path, damaged: int, step: int
) -> None:
    records = interrupted(tmp_path, stop=6)
    for name in names(records)[-damaged:]:
        path = Path(records.folder(UNIT, 1)) / "checkpoints" / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    records = run_by_hand(tmp_path, make_ensemble, options, attempt=2)
    assert noted_steps(records, UNIT, 2)[0] == step
    assert left_behind(records, UNIT) == undisturbed


@pytest.mark.parametrize("make_bnn", [make_variational, make_chains])
def test_other_strategies_and_callbacks_go_on_as_well(make_bnn: Any, tmp_path: Path) -> None:
    def own(folder: str, stop: int | None = None) -> dict[str, Any]:
        callbacks = [SWAGMoments(start=0), SampleCollector(every=2)]
        return options(folder, stop, *callbacks[: 1 if make_bnn is make_variational else 2])

    undisturbed = run_by_hand(tmp_path / "undisturbed", make_bnn, own)
    with pytest.raises(Interrupted):
        run_by_hand(tmp_path / "run", make_bnn, lambda folder: own(folder, stop=7))
    records = run_by_hand(tmp_path / "run", make_bnn, own, attempt=2)
    assert noted_steps(records, UNIT, 2)[0] == 6
    found = left_behind(records, UNIT)
    assert {"posterior 0", "swag 0"} <= set(found)
    assert found == left_behind(undisturbed, UNIT)


# ------------------------------------------------------------------------------- zombies


def test_an_attempt_that_was_given_up_ends_at_its_next_checkpoint(tmp_path: Path) -> None:
    class GiveUp(Note):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer)
            if trainer.global_step == 5:
                RunRecords(tmp_path).grant(UNIT, 2)

    with pytest.raises(FencedError, match=r"Attempt 1 .* attempt 2 has taken its place"):
        run_by_hand(
            tmp_path,
            make_ensemble,
            lambda folder: {"max_epochs": EPOCHS, "callbacks": [GiveUp(folder)]},
        )
    records = RunRecords(tmp_path)
    assert noted_steps(records, UNIT, 1) == [0, 1, 2, 3, 4, 5]
    assert checkpoint_step(records, UNIT) == 4
    assert records.committed(UNIT) is None
    told = records.progress(UNIT) or {}
    assert told["phase"] == "failed"
    assert "Attempt 1 of member 0 may not commit" in told["error"]
    # one that was given up before it has begun does nothing
    recipe = Factories(make_ensemble, make_data, {"max_epochs": EPOCHS})
    with pytest.raises(FencedError):
        run_attempt(recipe, Attempt(records.storage, UNIT, 1))
    assert records.progress(UNIT) == told


_ZOMBIE = """
import signal, sys
from lightning_bnn.errors import FencedError
from tests.launch.faults import Kill, Note, run_by_hand
from tests.launch.programs import make_ensemble

def trainer(folder):
    return {"max_epochs": 3, "callbacks": [Note(folder), Kill(10, signal.SIGSTOP)]}

try:
    run_by_hand(sys.argv[1], make_ensemble, trainer, checkpoint_seconds=3600.0)
except FencedError as error:
    print("refused:", error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_stopped_process_that_goes_on_later_is_refused_at_its_commit(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    zombie = subprocess.Popen(
        [sys.executable, "-c", _ZOMBIE, str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: _is_stopped(zombie), "the zombie")
        records = run_by_hand(tmp_path, make_ensemble, options, attempt=2)
        assert noted_steps(records, UNIT, 1)[-1] == 10
        committed = records.files.get(f"units/{UNIT.name}/commit.json")
        zombie.send_signal(signal.SIGCONT)
        said, errors = zombie.communicate(timeout=600)
    finally:
        zombie.kill()
    assert (
        "refused: Attempt 1 of member 0 may not commit: attempt 2 has taken its place." in said
    ), errors[-4000:]
    assert noted_steps(records, UNIT, 1)[-1] == 12  # it went on to its end
    assert records.files.get(f"units/{UNIT.name}/commit.json") == committed
    assert left_behind(records, UNIT) == undisturbed


def _is_stopped(process: subprocess.Popen[str]) -> bool:
    if process.poll() is not None:
        raise AssertionError(process.communicate()[1][-4000:])
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


# ------------------------------------------------------------------- what users put into them


class Module(pl.LightningDataModule):
    """Data with a path and a number of NumPy among its hyperparameters."""

    def __init__(self, root: Path, scale: np.float64) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return make_data()


class Counter(pl.Callback):
    """Has a state of some kind."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert type(state_dict["value"]) is type(self.value)


def resumed(storage: Path, stop: int, data: Any, *callbacks: Any) -> dict[str, Any]:
    """What an attempt leaves behind that resumes after one that was interrupted."""
    go = partial(run_by_hand, storage, make_ensemble, data=data)
    with pytest.raises(Interrupted):
        go(lambda folder: options(folder, stop, *callbacks))
    records = go(lambda folder: options(folder, None, *callbacks), attempt=2)
    assert noted_steps(records, UNIT, 2)[0] == stop - 1
    return left_behind(records, UNIT)


def test_hyperparameters_of_any_kind_are_no_hindrance(
    tmp_path: Path, undisturbed: dict[str, Any]
) -> None:
    def data() -> Module:
        return Module(tmp_path, np.float64(0.5))

    assert resumed(tmp_path, 6, data) == undisturbed


@pytest.mark.parametrize("value", [np.float32(2), np.arange(3), Path("a"), {"b": [1.5, None]}])
def test_states_of_callbacks_are_read_back(
    tmp_path: Path, undisturbed: dict[str, Any], value: Any
) -> None:
    assert resumed(tmp_path, 6, make_data, Counter(value)) == undisturbed


def test_a_state_that_could_not_be_read_back_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds objects of .*FencedError, .*state_dict"):
        run_by_hand(
            tmp_path, make_ensemble, lambda folder: options(folder, None, Counter(FencedError()))
        )
    assert noted_steps(RunRecords(tmp_path), UNIT, 1) == [0]


class Stream(IterableDataset[Any]):
    """Examples in a new order in each epoch, of which nobody knows how many they are."""

    def __iter__(self) -> Any:
        inputs = torch.randn(64, 2)
        return iter([(row, row.sum()[None]) for row in inputs])


def make_stream() -> Any:
    return DataLoader(Stream(), 16)


def make_streamed(members: list[int], seed: int) -> DeepEnsemble:
    return DeepEnsemble(make_net, Gaussian(0.1), members=members, seed=seed, num_data=64)


@pytest.mark.parametrize("steps", [-1, 12])  # whether epochs or steps decide when it ends
@pytest.mark.parametrize("stop", [5, 6])  # after the end of an epoch, and within it
def test_data_without_a_length(tmp_path: Path, stop: int, steps: int) -> None:
    def trainer(folder: str, stop: int | None = None) -> dict[str, Any]:
        return {**options(folder, stop), "max_steps": steps}

    go = partial(run_by_hand, make_bnn=make_streamed, data=make_stream)
    calm = go(tmp_path / "calm", trainer=trainer)
    with pytest.raises(Interrupted):
        go(tmp_path / "resumed", trainer=lambda folder: trainer(folder, stop))
    found = go(tmp_path / "resumed", trainer=trainer, attempt=2)
    assert noted_steps(found, UNIT, 2)[0] == stop - 1
    assert left_behind(found, UNIT) == left_behind(calm, UNIT)


def make_persistent() -> Any:
    loader = make_data()
    return DataLoader(loader.dataset, 16, shuffle=True, num_workers=1, persistent_workers=True)


def test_persistent_workers(tmp_path: Path) -> None:
    calm = run_by_hand(tmp_path / "calm", make_ensemble, options, data=make_persistent)
    for stop in (5, 10):
        found = resumed(tmp_path / str(stop), stop, make_persistent)
        assert found == left_behind(calm, UNIT)


def test_loggers_and_checkpoints_of_members_are_kept_apart(tmp_path: Path) -> None:
    shared = {
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "logger": [TensorBoardLogger(tmp_path / "logs"), CSVLogger(tmp_path / "logs")],
        "callbacks": [ModelCheckpoint(dirpath=tmp_path / "best", filename="last")],
    }
    for member in range(2):
        unit = Unit((member,))
        records = run_by_hand(tmp_path / "run", make_ensemble, copy.deepcopy(shared), unit)
        folder = Path(records.folder(unit, 1))
        assert (folder / "best" / "last.ckpt").is_file()
        (events,) = folder.rglob("events.out.tfevents*")
        (metrics,) = folder.rglob("metrics.csv")
        assert events.parents[1] == metrics.parents[1] == folder / "lightning_logs"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
