"""How far a fit has come, and how long it will be, in epochs or in optimizer steps."""

from __future__ import annotations

import math
from typing import Any, Literal

from lightning_bnn.lightning import GradientAccumulationScheduler, pl

__all__ = ["Unit", "completed", "steps_per_epoch", "training_length"]

Unit = Literal["epochs", "steps"]


def training_length(trainer: pl.Trainer, module: pl.LightningModule, unit: Unit) -> float | None:
    """After how many epochs or steps a fit ends at the latest; None where that is not known."""
    per_epoch, lengths = steps_per_epoch(trainer, module), []
    for name, limit in (("steps", trainer.max_steps), ("epochs", trainer.max_epochs)):
        if limit in (-1, None):
            continue
        if name == unit:
            lengths.append(float(limit))
        elif per_epoch is None:
            return None  # the fit may end by this limit before the other
        else:
            lengths.append(limit * per_epoch if unit == "steps" else limit / per_epoch)
    return min(lengths, default=None)


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
