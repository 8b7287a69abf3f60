"""What happens to attempts in tests: they die, stand still, diverge or raise, at a given step."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_bnn.launch.backend import Attempt
from lightning_bnn.launch.member import Place, run_attempt
from lightning_bnn.launch.recipe import Factories
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.storage import store
from lightning_bnn.storage.stream import DrawStream
from tests.launch.programs import make_data

ROOT = Path(__file__).parents[2]
PATIENCE = 600.0  # for what takes seconds on an idle machine


def attempt_number(folder: str) -> int:
    """The number of the attempt that writes to a folder."""
    return int(folder.rsplit("attempt-", 1)[1])


class Kill(pl.Callback):
    """Send a signal to the own process after a step, or at the end of training if that is None.

    Draws of the step are taken by then; its checkpoint is not.
    """

    def __init__(self, step: int | None, number: int = signal.SIGKILL) -> None:
        self.step, self.number = step, number

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)

    def on_train_end(self, *args: Any) -> None:
        if self.step is None:
            os.kill(os.getpid(), self.number)


class Poison(pl.Callback):
    """Let a row of an ensemble have no finite weights before a step."""

    def __init__(self, step: int, row: int = 0) -> None:
        self.step, self.row = step, row

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            with torch.no_grad():
                module.weights[self.row] = float("nan")


class Raise(pl.Callback):
    """Raise an error after a step."""

    def __init__(self, step: int, error: Exception) -> None:
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise self.error


class Note(pl.Callback):
    """Write down after which step a fit resumes, and every step that it takes."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / "steps"

    def _write(self, trainer: pl.Trainer) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a") as file:
            file.write(f"{trainer.global_step}\n")

    def on_train_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._write(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self._write(trainer)


def run_by_hand(
    storage: str | os.PathLike[str],
    make_bnn: Callable[..., Any],
    trainer: Any,
    unit: Unit = Unit((0,)),  # noqa: B008 - it cannot be changed
    attempt: int = 1,
    checkpoint_seconds: float = 0.0,
    data: Callable[..., Any] = make_data,
) -> RunRecords:
    """Run an attempt in this process, without Ray, and give the records."""
    records = RunRecords(storage)
    records.grant(unit, attempt)
    run_attempt(
        Factories(make_bnn, data, trainer),
        Attempt(records.storage, unit, attempt, checkpoint_seconds=checkpoint_seconds),
        Place(threads=1),
    )
    return records


def noted_steps(records: RunRecords, unit: Unit, attempt: int) -> list[int]:
    """What :class:`Note` wrote: the step before the first, and each that was taken."""
    text = (Path(records.folder(unit, attempt)) / "steps").read_text()
    return [int(line) for line in text.split()]


def left_behind(records: RunRecords, unit: Unit) -> dict[str, Any]:
    """All that a unit has committed, with hashes in place of weights: equal if each bit is."""
    commit = records.committed(unit)
    assert commit is not None, unit
    result = commit["result"]
    hashes = {
        f"{kind} {member}": _hashes(f"{records.folder(unit)}/{place['place']}")
        for kind, places in result["members"].items()
        for member, place in places.items()
    }
    assert hashes
    return {**hashes, "steps": result["steps"], "metrics": result["metrics"]}


def _hashes(place: str) -> dict[Any, str]:
    stored = store.read(place)
    if "stream" in stored.fields:
        return {**DrawStream.open(place).hashes()}
    return {name: stored.entry(name)["sha256"] for name in stored.blob_names}


def wait_for(condition: Callable[[], Any], what: str = "it") -> Any:
    """Wait until something is true, and give it."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"{what} took too long"
        time.sleep(0.1)
    return found


@contextmanager
def processes_end(**settings: str) -> Iterator[dict[str, str]]:
    """An environment for processes that all end with the block, and whatever they have started.

    The processes of Ray have groups of their own, but inherit the environment.
    """
    mark = f"LIGHTNING_BNN_TEST_{secrets.token_hex(8)}"
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    try:
        yield {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **settings, mark: "1"}
    finally:
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
