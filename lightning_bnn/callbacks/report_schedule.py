"""When a validation of a run makes a page of its report."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["validation_page"]


def validation_page(trainer: Any, every_n_epochs: int | None, after_fit: bool) -> str | None:
    """The name of the page that a validation makes; None if it makes none.

    Args:
        trainer: The trainer, at the start of the validation.
        every_n_epochs: After how many epochs of a fit a page is made.
        after_fit: Whether one is made at the end of a fit.

    Example:
        >>> from types import SimpleNamespace
        >>> trainer = SimpleNamespace(sanity_checking=True, fast_dev_run=False)
        >>> validation_page(trainer, 1, after_fit=True) is None
        True
    """
    if trainer.sanity_checking or trainer.fast_dev_run:
        return None
    if trainer.state.fn != "fit":
        return "validation"
    epoch = trainer.current_epoch + 1
    if every_n_epochs is not None and epoch % every_n_epochs == 0 and _last_of_epoch(trainer):
        return f"epoch-{trainer.current_epoch:04d}"
    # The last validation serves for the page after the fit, if nothing is trained after it.
    last_batch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    ends = epoch == trainer.max_epochs and last_batch
    ends = ends or trainer.global_step >= trainer.max_steps >= 0
    return "fit" if after_fit and ends else None


def _last_of_epoch(trainer: Any) -> bool:
    """Whether no other validation comes in this epoch; also where that cannot be known."""
    loop = trainer.fit_loop.epoch_loop
    interval, total = trainer.val_check_batch, trainer.num_training_batches
    if loop.batch_progress.is_last_batch or interval is None or math.isinf(total):
        return True
    return bool(loop.batch_idx + 1 + interval > total)
