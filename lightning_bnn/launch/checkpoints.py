"""Checkpoints from which another attempt resumes, on any machine.

An attempt saves to its own folder, under names that hold the step and the hash of the contents::

    attempt-0002/checkpoints/step-000001200-<first 16 hex digits of the sha256>.ckpt

The next attempt looks through the folders of all before it for the latest that is whole. The last
two of an attempt are kept, and none when its unit is done.
"""

from __future__ import annotations

import hashlib
import io
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.patience import patiently
from lightning_bnn.launch.progress import plain_metrics
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.lightning import Checkpoint, pl
from lightning_bnn.storage.files import Files, open_directory

__all__ = ["UnitCheckpoint", "checkpoint_step", "last_checkpoint", "plain_types"]

_NAME = re.compile(r"step-([0-9]{9,})-([0-9a-f]{16})\.ckpt")
_KEPT = 2
_HYPER_PARAMETERS = [
    getattr(kind, f"CHECKPOINT_HYPER_PARAMS_{what}")
    for kind in (pl.LightningModule, pl.LightningDataModule)
    for what in ("KEY", "NAME", "TYPE")
]
# Ranks agree on whether it is time only so often: asking costs a broadcast.
_BATCHES_BETWEEN_QUESTIONS = 50


class UnitCheckpoint(Checkpoint):
    """Save a checkpoint to the folder of an attempt whenever some seconds have passed.

    A fit can resume exactly only from some moments: after a batch that ended an optimizer step (the
    gradients of others would be lost) and that no validation follows; and after the last batch of
    an epoch only when all that is done at its end is done. There is none after the last step: what
    remains to be done then, such as taking the last draw, needs a fit with a step still to take.

    Args:
        folder: Where the attempt writes.
        seconds: The least time from one checkpoint to the next; 0 saves at each such moment.
        before: Called on the first rank before each; it raises if the attempt was given up.

    Attributes:
        metrics: What was logged last when the last checkpoint was made, of this attempt or before.
    """

    def __init__(self, folder: str, seconds: float, before: Callable[[], None]) -> None:
        self.files = open_directory(f"{folder}/checkpoints")
        self.seconds = seconds
        self._before = before
        self._last = time.monotonic()
        self.metrics: dict[str, float | None] = {}
        self._step = 0  # the last that was seen
        self._saved: list[str] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Know after which step the fit begins, and that it can be saved, before any work."""
        self._step = trainer.global_step
        states = io.BytesIO()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        data = trainer.datamodule  # type: ignore[attr-defined]
        parts = (*callbacks, *([] if data is None else [data]))
        torch.save([part.state_dict() for part in parts], states)
        states.seek(0)
        _check_readable(states)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save, if it is time."""
        stepped, self._step = trainer.global_step != self._step, trainer.global_step
        asked = trainer.world_size == 1 or not self.seconds
        asked = asked or batch_idx % _BATCHES_BETWEEN_QUESTIONS == 0
        loop = trainer.fit_loop.epoch_loop
        last = trainer.should_stop or loop.batch_progress.is_last_batch
        if asked and stepped and not last and not _is_before_validation(trainer):
            self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save, if it is time; called when other callbacks have done what they do here."""
        # the counter of epochs is set after this
        if not trainer.should_stop and trainer.current_epoch + 1 != trainer.max_epochs:
            self._save_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        """What was logged last, of which Lightning keeps nothing."""
        return {"metrics": dict(self.metrics)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what was logged before the checkpoint."""
        self.metrics = dict(state_dict["metrics"])

    def _save_if_due(self, trainer: pl.Trainer) -> None:
        if 0 < trainer.max_steps <= trainer.global_step:
            return
        due = time.monotonic() - self._last >= self.seconds
        if trainer.strategy.broadcast(due) if trainer.world_size > 1 else due:
            self.save(trainer)

    def save(self, trainer: pl.Trainer) -> None:
        """Save a checkpoint now; all ranks take part."""
        if trainer.is_global_zero:
            self._before()
        # of epochs and validations that are over; asking the trainer would add those of this step
        self.metrics |= plain_metrics(trainer._logger_connector._callback_metrics)
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for name in _HYPER_PARAMETERS:  # of any type, and a fit that resumes needs none of them
            checkpoint.pop(name, None)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "unit.ckpt")
            trainer.strategy.save_checkpoint(checkpoint, path)
            trainer.strategy.barrier("UnitCheckpoint.save")
            if trainer.is_global_zero:
                if not self._saved:
                    _check_readable(path)
                self._put(trainer.global_step, path.read_bytes())
        self._last = time.monotonic()

    def _put(self, step: int, data: bytes) -> None:
        name = f"step-{step:09d}-{hashlib.sha256(data).hexdigest()[:16]}.ckpt"
        patiently(lambda: self.files.put(name, data))
        if name not in self._saved:
            self._saved.append(name)
        for old in self._saved[:-_KEPT]:
            patiently(partial(self.files.remove, old))
        del self._saved[:-_KEPT]


@contextmanager
def plain_types() -> Iterator[None]:
    """Let checkpoints that are read hold numbers and arrays of NumPy, and paths: data, no code."""
    dtypes = [kind for kind in vars(np.dtypes).values() if isinstance(kind, type)]
    rebuild = [np._core.multiarray.scalar, np._core.multiarray._reconstruct]
    paths = [pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath]
    with torch.serialization.safe_globals([*rebuild, *dtypes, np.ndarray, np.dtype, *paths]):
        yield


def _check_readable(file: Any) -> None:
    """Raise unless a later attempt can read a checkpoint; reading never runs code that is in it."""
    with plain_types():
        others = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if others:
        raise ConfigurationError(
            f"A checkpoint of this fit holds objects of {', '.join(sorted(others))}, which are not "
            "read back, so that a member could not resume after its worker has died. Let "
            "state_dict() of the callback or data module that has them give tensors, numbers, "
            "texts, lists and mappings."
        )


def _is_before_validation(trainer: pl.Trainer) -> bool:
    """Whether a validation comes next: a fit resumed from here would leave it out."""
    loop = trainer.fit_loop
    assert loop._data_fetcher is not None
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def _files(records: RunRecords, unit: Unit, attempt: int) -> Files:
    return open_directory(f"{records.folder(unit, attempt)}/checkpoints")


def _stored(records: RunRecords, unit: Unit) -> list[tuple[int, int, str]]:
    """Step, attempt and name of every checkpoint of a unit, the latest first."""
    stored = [
        (int(match[1]), attempt, name)
        for attempt in records.attempts(unit)
        for name in patiently(_files(records, unit, attempt).names)
        if (match := _NAME.fullmatch(name))
    ]
    return sorted(stored, reverse=True)


def checkpoint_step(records: RunRecords, unit: Unit) -> int:
    """The step of the latest checkpoint of a unit; 0 where there is none."""
    return next((step for step, _, _ in _stored(records, unit)), 0)


@contextmanager
def last_checkpoint(
    records: RunRecords, unit: Unit, agree: Callable[[Any], Any] | None = None
) -> Iterator[tuple[str, int] | None]:
    """A local copy of the latest whole checkpoint, and the attempt that made it; None if none is.

    One that is damaged is passed over: the one before it gives the same result, a little later.

    Args:
        records: The records of the run.
        unit: What is trained.
        agree: Gives what the first rank has found to all ranks. A zombie may still be saving, so
            that each of them could find another.
    """
    chosen, data = None, None
    for _, attempt, name in _stored(records, unit):
        if (data := _read_whole(records, unit, attempt, name)) is not None:
            chosen = (attempt, name)
            break
    if agree is not None:
        here, chosen = chosen, agree(chosen)
        if chosen is not None and chosen != here:
            data = _read_whole(records, unit, *chosen)
    if chosen is None:
        yield None
        return
    attempt, name = chosen
    if data is None:
        raise OSError(f"{name} of attempt {attempt}, which the first rank has found, is gone.")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, name)
        path.write_bytes(data)
        del data
        yield str(path), attempt


def _read_whole(records: RunRecords, unit: Unit, attempt: int, name: str) -> bytes | None:
    """A checkpoint; None if it is missing or damaged."""
    data = patiently(lambda: _files(records, unit, attempt).get(name))
    if data is None or hashlib.sha256(data).hexdigest()[:16] not in name:
        return None
    return data


def remove_checkpoints(records: RunRecords, unit: Unit) -> None:
    """Remove all checkpoints of a unit that is done."""
    for _, attempt, name in _stored(records, unit):
        patiently(partial(_files(records, unit, attempt).remove, name))
