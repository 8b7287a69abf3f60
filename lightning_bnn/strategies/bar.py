"""What a progress bar says of a fit beside its metrics: the phase it is in, and what it has taken.

Texts do not go through ``log``, which takes numbers: they are added to what the trainer's bar
shows, be it that of tqdm, of rich, or of the user's own. A bar asks for them only when it is drawn,
so they cost a training step nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from lightning_bnn.lightning import TrainerFn, pl

__all__ = ["InBar", "redraw", "show_phase"]


class InBar:
    """A module or callback that has something to say in the progress bar of a fit."""

    def phase(self) -> dict[str, str]:
        """Texts for the bar by name; nothing by default."""
        return {}


def show_phase(trainer: pl.Trainer) -> None:
    """Let the trainer's bar, if it has one, show the texts of its module and callbacks."""
    bar: Any = trainer.progress_bar_callback
    if bar is not None and getattr(bar.get_metrics, "func", None) is not _with_phase:
        bar.get_metrics = partial(_with_phase, bar.get_metrics)


def redraw(trainer: pl.Trainer) -> None:
    """Let a bar of tqdm or rich show the texts now, where no training step draws it."""
    bar: Any = trainer.progress_bar_callback
    if isinstance(bar, (pl.callbacks.TQDMProgressBar, pl.callbacks.RichProgressBar)):
        with suppress(TypeError):  # a fit without an epoch has no bar
            bar.on_train_epoch_end(trainer, trainer.lightning_module)


def _with_phase(metrics: Callable[..., dict[str, Any]], trainer: Any, module: Any) -> Any:
    shown = dict(metrics(trainer, module))
    # the module comes last: a burn-in that is counted while it still warms up is not the phase
    for part in (*trainer.callbacks, module):
        if isinstance(part, InBar) and trainer.state.fn == TrainerFn.FITTING:
            shown.update(part.phase())
    return shown
