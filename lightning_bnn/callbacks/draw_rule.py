"""After which steps a draw is taken, and of what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_lightning as pl
from torch import Tensor, nn

from lightning_bnn.errors import ConfigurationError, NonFiniteError
from lightning_bnn.posteriors.base import network_tensors

__all__ = ["DrawRule", "check_finite", "cyclical_schedule", "network_of", "weights_of"]

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class DrawRule:
    """A burn-in, then every so many steps, or at the end of each cycle.

    Steps count from 1: step s is the s-th that the optimizer takes.

    Args:
        burn_in: The steps before the first draw can be taken.
        every: The steps from one draw to the next, or ``"cycle"``.

    Example:
        >>> rule = DrawRule(burn_in=10, every=5)
        >>> [step for step in range(1, 30) if rule.is_due(step, step - 1)]
        [15, 20, 25]
        >>> rule.takes_any(total=14)
        False
    """

    burn_in: int
    every: int | Literal["cycle"]

    def __post_init__(self) -> None:
        if self.burn_in < 0:
            raise ConfigurationError(f"burn_in= is at least 0; got {self.burn_in}.")
        if self.every != "cycle" and (isinstance(self.every, str) or self.every < 1):
            raise ConfigurationError(
                f"every= is a number of steps, at least 1, or 'cycle'; got {self.every!r}."
            )

    def is_due(self, step: int, seen: int, ended_cycle: bool = False) -> bool:
        """Whether a draw is due after ``step``, where ``seen`` was the last step before.

        With manual optimization a batch may take several steps, of which the last is looked at.
        """
        if step <= max(seen, self.burn_in):
            return False
        if isinstance(self.every, str):
            return ended_cycle
        before = max(0, seen - self.burn_in)
        return (step - self.burn_in) // self.every > before // self.every

    def takes_any(
        self, total: int, seen: int = 0, ends_cycle: Callable[[int], bool] | None = None
    ) -> bool:
        """Whether a draw is due after any of the steps from ``seen`` to ``total``."""
        if isinstance(self.every, str):
            steps = range(max(self.burn_in, seen) + 1, total + 1)
            return ends_cycle is not None and any(ends_cycle(step) for step in steps)
        last = self.burn_in + (total - self.burn_in) // self.every * self.every
        return last > max(self.burn_in, seen)


def cyclical_schedule(trainer: pl.Trainer) -> Any:
    """The trainer's learning-rate schedule that has cycles, or None."""
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    return next((one for one in schedules if hasattr(one, "ends_cycle")), None)


def network_of(module: pl.LightningModule) -> nn.Module:
    """The network that draws are of: a strategy's, or the module itself."""
    if hasattr(module, "current_draws"):
        net: nn.Module = module.net  # type: ignore[assignment]
        return net
    return module


def weights_of(module: pl.LightningModule) -> Weights:
    """The weights as they stand, with a leading axis of chains.

    Example:
        >>> class Model(pl.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = nn.Linear(2, 1)
        >>> {name: tuple(tensor.shape) for name, tensor in weights_of(Model()).items()}
        {'layer.weight': (1, 1, 2), 'layer.bias': (1, 1)}
    """
    if hasattr(module, "current_draws"):
        weights: Weights = module.current_draws()  # type: ignore[operator]
        return weights
    return {name: tensor.detach()[None] for name, tensor in network_tensors(module).items()}


def check_finite(weights: Weights, step: int, module: pl.LightningModule) -> None:
    """Raise a NonFiniteError that names the chain, unless all weights are finite."""
    numbers = getattr(module, "chain_numbers", None)
    for name, tensor in weights.items():
        good = tensor.isfinite().reshape(len(tensor), -1).all(1)
        if not good.all():
            row = int((~good).nonzero()[0])
            raise NonFiniteError(
                f"{name!r} of chain {numbers[row] if numbers else row} is not finite after step "
                f"{step}: the chain has diverged, and the draw was not taken. All draws before "
                "it are good. Lower the learning rate or the temperature, or clip gradients."
            )
