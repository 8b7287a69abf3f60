"""When SWAG takes snapshots, and how many there will be.

A position is a number of epochs or of optimizer steps that were completed. Averaging begins at the
position ``start``, and a snapshot is taken after each ``every`` from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.utilities import rank_zero_warn

from lightning_bnn.errors import ConfigurationError

__all__ = [
    "SnapshotRule",
    "Unit",
    "begun",
    "check_number",
    "check_start",
    "completed",
    "resolve_start",
    "training_length",
]

Unit = Literal["epochs", "steps"]


@dataclass(frozen=True)
class SnapshotRule:
    """After which epochs or steps a snapshot is taken.

    Args:
        start: The epochs or steps before averaging begins.
        every: The epochs or steps from one snapshot to the next.

    Example:
        >>> rule = SnapshotRule(start=30, every=4)
        >>> [epoch for epoch in range(1, 41) if rule.is_due(epoch, epoch - 1)]
        [34, 38]
        >>> rule.count(total=40)
        2
    """

    start: int
    every: int

    def is_due(self, position: int, seen: int) -> bool:
        """Whether a snapshot is due, where ``seen`` was the last position before.

        With manual optimization a batch may take several steps, of which the last is looked at.
        """
        return self.count(position, seen) > 0

    def count(self, total: int, seen: int = 0) -> int:
        """The number of snapshots after position ``seen``, up to ``total``."""
        return self._until(total) - self._until(seen)

    def _until(self, position: int) -> int:
        return max(0, position - self.start) // self.every


def check_start(start: int | float) -> None:
    """Raise unless ``start`` is a share of training or a number of epochs or steps.

    Example:
        >>> check_start(1.5)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: start= is a share of training, ... got 1.5.
    """
    whole = isinstance(start, int) and not isinstance(start, bool)
    if not (whole and start >= 0) and not (isinstance(start, float) and 0 <= start < 1):
        raise ConfigurationError(
            "start= is a share of training, from 0.0 to less than 1.0, or a whole number of epochs "
            f"(with every_n_steps= of steps); got {start!r}."
        )


def resolve_start(start: int | float, length: float | None, unit: Unit) -> int:
    """The position at which averaging begins.

    Example:
        >>> resolve_start(0.75, 40, "epochs"), resolve_start(30, None, "epochs")
        (30, 30)
    """
    if isinstance(start, int):
        return start
    if length is None:
        raise ConfigurationError(
            f"start={start} is a share of training, and the number of {unit} of this fit is not "
            f"known beforehand. Pass start= as a number of {unit} (an int), or give the Trainer "
            f"max_{unit}= and the training data a length."
        )
    return math.floor(start * length + 1e-9)  # 0.29 · 100 is a little less than 29


def training_length(trainer: pl.Trainer, module: pl.LightningModule, unit: Unit) -> float | None:
    """After how many epochs or steps a fit ends at the latest; None where that is not known."""
    steps = trainer.max_steps if trainer.max_steps >= 0 else None
    epochs = None if trainer.max_epochs in (-1, None) else trainer.max_epochs
    per_epoch = _steps_per_epoch(trainer, module)
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


def _steps_per_epoch(trainer: pl.Trainer, module: pl.LightningModule) -> int | None:
    batches = trainer.num_training_batches
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    changes = any(isinstance(one, GradientAccumulationScheduler) for one in callbacks)
    # with manual optimization a batch may take any number of steps
    if changes or not module.automatic_optimization or not 0 < batches < math.inf:
        return None
    return math.ceil(batches / trainer.accumulate_grad_batches)


def begun(trainer: pl.Trainer, unit: Unit, batch_idx: int) -> float:
    """How many epochs or steps came before a batch."""
    if unit == "steps":
        return trainer.global_step
    batches = trainer.num_training_batches
    # of an epoch of unknown length all is one step
    return trainer.current_epoch + (batch_idx / batches if batches < math.inf else 1)


def completed(trainer: pl.Trainer, unit: Unit) -> int | None:
    """The epochs or steps that are complete with the batch that was just used; else None."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    if progress.current.processed < progress.current.ready:
        return None  # in the middle of a batch
    if unit == "steps":
        return trainer.global_step
    last = progress.is_last_batch or progress.current.ready >= trainer.num_training_batches
    return trainer.current_epoch + 1 if last else None


def check_number(
    rule: SnapshotRule, unit: Unit, length: float, seen: int, taken: int, rank: int
) -> None:
    """Raise if a fit will take fewer than two snapshots, warn if fewer than the rank.

    Example:
        >>> check_number(SnapshotRule(30, 1), "epochs", 30, seen=0, taken=0, rank=20)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: SWAGMoments would take 0 snapshots in ...
    """
    total = taken + rule.count(math.floor(length + 1e-9), seen)
    if total >= max(2, rank):
        return
    when = f"one every {rule.every} {unit} after the first {rule.start}"
    if length <= rule.start:
        when = f"as the fit ends before averaging begins, after {rule.start} {unit}"
    found = f"{total} snapshots in the {length:g} {unit} of this fit, {when}"
    fix = "train longer, start earlier or take snapshots more often (every_n_steps=)"
    if total < 2:
        raise ConfigurationError(
            f"SWAGMoments would take {found}; 2 are the least. {fix.capitalize()}."
        )
    rank_zero_warn(
        f"SWAGMoments will take {found}: the Gaussian has rank {total}, not rank={rank}. To have "
        f"more, {fix}.",
        category=UserWarning,
    )
