"""What an attempt tells of itself while it runs, every few seconds, through the storage.

A thread writes it, so that a long step or a long validation is not taken for death. Whoever reads
the storage knows the step, the loss, the node, and when there was last a sign of life.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit

__all__ = ["ProgressCallback", "plain_metrics"]


class ProgressCallback(pl.Callback):
    """Tell how far a fit is, every ``seconds`` seconds, from its making until :meth:`stop`.

    Args:
        records: The records of the run.
        unit: What is trained.
        attempt: The number of the attempt.
        seconds: How often.
        facts: What else to tell, such as the node.
    """

    def __init__(
        self,
        records: RunRecords,
        unit: Unit,
        attempt: int,
        seconds: float = 5.0,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.records, self.unit, self.seconds = records, unit, seconds
        self._trainer: pl.Trainer | None = None
        self._loss: Any = None
        self._first: tuple[float, int] | None = None  # when this attempt took its first step
        self._told: dict[str, Any] = {
            "attempt": attempt,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": time.time(),
            "phase": "starting",
            **(facts or {}),
        }
        self._stopped = threading.Event()
        self.tell()
        self._thread = threading.Thread(target=self._tell_on, name="progress", daemon=True)
        self._thread.start()

    def tell(self, **facts: Any) -> None:
        """Write the progress now; where that fails, the next one will tell as much."""
        self._told.update(facts)
        trainer = self._trainer
        told = {**self._told, "time": time.time()}
        if trainer is not None:
            told |= {"step": trainer.global_step, "epoch": trainer.current_epoch}
            told["steps"] = _steps_of(trainer)
            told["loss"] = _number(self._loss)
            if self._first is not None:
                told["first"] = list(self._first)
        with suppress(Exception):  # the storage may be away for a moment
            self.records.put_progress(self.unit, told)

    def stop(self) -> None:
        """Tell no more."""
        self._stopped.set()
        self._thread.join(timeout=self.seconds)

    def _tell_on(self) -> None:
        while not self._stopped.wait(self.seconds):
            self.tell()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Know the trainer from now on."""
        self._trainer = trainer
        self._told["phase"] = "training"
        self._first = (time.time(), trainer.global_step)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the loss: a tensor, so that no device has to wait for it."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._loss = loss.detach() if isinstance(loss, torch.Tensor) else None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What follows is the saving."""
        self._told["phase"] = "saving"


def _steps_of(trainer: pl.Trainer) -> int | None:
    """The number of steps of the whole fit, where it is known without loading anything."""
    limits = [float(trainer.max_steps)] if trainer.max_steps > 0 else []
    epochs = trainer.max_epochs
    if epochs is not None and epochs > 0:
        limits.append(epochs * trainer.num_training_batches // trainer.accumulate_grad_batches)
    known = [limit for limit in limits if limit < float("inf")]
    return int(min(known)) if known else None


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Logged metrics as plain numbers; None for those that are not finite, which JSON lacks.

    Example:
        >>> plain_metrics({"loss": torch.tensor(0.5), "bad": torch.tensor(float("nan"))})
        {'loss': 0.5, 'bad': None}
    """
    return {name: _number(value) for name, value in metrics.items()}


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else None
    if not isinstance(value, (int, float)):
        return None
    return float(value) if -float("inf") < value < float("inf") else None
