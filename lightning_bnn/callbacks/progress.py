"""How far a fit has come, and how long it will be, in epochs or in optimizer steps."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.callbacks import GradientAccumulationScheduler

__all__ = ["Unit", "completed", "steps_per_epoch", "training_length"]

Unit = Literal["epochs", "steps"]


def training_length(trainer: pl.Trainer, module: pl.LightningModule, unit: Unit) -> float | None:
    """After how many epochs or steps a fit ends at the latest; None where that is not known."""
    steps = trainer.max_steps if trainer.max_steps >= 0 else None
    epochs = None if trainer.max_epochs in (-1, None) else trainer.max_epochs
    per_epoch = steps_per_epoch(trainer, module)
    if unit == "steps" and epochs is not None:
        length: float | None = None if per_epoch is None else epochs * per_epoch
        other: float | None = steps
    elif unit == "steps":
        return steps
    elif steps is None:
        return epochs
    else:
        length, other = None if per_epoch is None else steps / per_epoch, epochs
    # where one limit cannot be told in the unit that is asked for, the fit may end before the other
    return None if length is None else min(length, math.inf if other is None else other)


def steps_per_epoch(trainer: pl.Trainer, module: pl.LightningModule) -> int | None:
    """The optimizer steps of an epoch; None where that is not known, or changes."""
    batches = trainer.num_training_batches
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    changes = any(isinstance(callback, GradientAccumulationScheduler) for callback in callbacks)
    # with manual optimization a batch may take any number of steps
    if changes or not module.automatic_optimization or not 0 < batches < math.inf:
        return None
    return math.ceil(batches / trainer.accumulate_grad_batches)


def completed(trainer: pl.Trainer, unit: Unit) -> int | None:
    """The epochs or steps that are complete with the batch that was just used; else None."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    if progress.current.processed < progress.current.ready:
        return None  # in the middle of a batch
    if unit == "steps":
        return trainer.global_step
    last = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
    return trainer.current_epoch + 1 if last else None
