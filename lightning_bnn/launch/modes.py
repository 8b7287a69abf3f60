"""How a stack of members runs, agreed on between attempts.

Stacked or as a loop: a strategy measures which is faster, and the two differ in the last bits. A
later attempt at the same unit runs as the first one did, so that it ends with the same weights.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from lightning_bnn.launch.patience import patiently
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.strategies.base import Strategy

__all__ = ["AgreedMode"]


class AgreedMode(pl.Callback):
    """Run as an earlier attempt did; the first one writes down what it has measured.

    Args:
        records: The records of the run.
        unit: What is trained.
        strategy: Its mode is set where one was agreed on.
    """

    def __init__(self, records: RunRecords, unit: Unit, strategy: Strategy) -> None:
        self._files, self._name = records.files, f"units/{unit.name}/mode"
        self._stack: Any = getattr(strategy, "_stack", None)
        self._open = len(unit.members) > 1 and getattr(self._stack, "mode", None) == "auto"
        if self._open:
            self._adopt()

    def _adopt(self) -> None:
        found = patiently(lambda: self._files.get(self._name))
        if found in (b"stacked", b"loop"):
            self._stack.mode, self._open = found.decode(), False

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        """Write down how the first batch was run, before anything comes of it."""
        if self._open and trainer.is_global_zero:
            mode = self._stack.mode.encode()
            if not patiently(lambda: self._files.create(self._name, mode)):
                self._adopt()  # a zombie was first, and other attempts go by it
        self._open = False
