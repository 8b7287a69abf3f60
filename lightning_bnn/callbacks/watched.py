"""What chains predict at a few fixed examples, while they are sampled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.diagnostics.chains import function_values
from lightning_bnn.diagnostics.examples import Examples, choose_from_batch, inputs_and_targets
from lightning_bnn.lightning import TrainerFn, pl
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report.run import evaluating
from lightning_bnn.stacked import Mode, StackedModule

__all__ = ["WatchedExamples"]


class WatchedExamples:
    """Examples at which the predictions of all chains are looked at, the same on every rank.

    Args:
        count: At most how many examples.
        examples: The examples, if they are known yet.
        mode: How the chains' networks run; by default measured once.

    Attributes:
        examples: The examples, once they are known.
        mode: How the networks run.
    """

    def __init__(self, count: int, examples: Examples | None = None, mode: Mode = "auto") -> None:
        self.count, self.examples, self.mode = count, examples, mode
        self._net: nn.Module | None = None
        self._stacked: StackedModule | None = None

    def choose(self, trainer: pl.Trainer, examples: Examples) -> None:
        """Watch these from now on."""
        # every rank has its own batch, and all must watch the same
        self.examples = trainer.strategy.broadcast(examples.to(torch.device("cpu")))

    def choose_from(self, trainer: pl.Trainer, module: Any, batch: Any) -> None:
        """Watch examples of the first batch of a fit, of validation or of training."""
        if self.examples is None and trainer.state.fn == TrainerFn.FITTING:
            inputs, targets = getattr(module, "split", inputs_and_targets)(batch)
            self.choose(trainer, choose_from_batch(inputs, targets, self.count))

    @torch.no_grad()
    def values(self, trainer: pl.Trainer, module: Any) -> dict[str, Tensor]:
        """By quantity, what each chain predicts as it stands, (chains, ...)."""
        assert self.examples is not None
        if self._stacked is None or self._net is not module.net:
            self._net, self._stacked = module.net, StackedModule(module.net, self.mode)
        watched = self.examples.to(module.device)
        # as the trainer does with a batch; given inputs did not come through it
        inputs, targets = trainer.precision_plugin.convert_input((watched.inputs, watched.targets))
        with isolated_random_state(), evaluating(module):
            outputs = self._stacked(module.current_draws(), inputs)
        if targets is not None and self.mode == "auto":
            module.likelihood.check(outputs[0], targets)
        self.mode = self._stacked.mode
        values = function_values(outputs, module.likelihood, targets)
        return {name: value for name, value in values.items() if name != "log_likelihood"}

    def state_dict(self) -> dict[str, Any]:
        """The examples and the mode, as plain values."""
        watched = self.examples
        state = watched and [watched.inputs, watched.targets, list(watched.indices)]
        return {"examples": state, "mode": self.mode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Watch what was watched."""
        saved = state["examples"]
        self.examples = saved and Examples(saved[0], saved[1], tuple(saved[2]))
        self.mode = state["mode"]
