"""After which steps a draw is taken, and of what."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytorch_lightning as pl
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_bnn.errors import ConfigurationError, NonFiniteError
from lightning_bnn.network import network_tensors

__all__ = [
    "DrawRule",
    "check_count",
    "check_finite",
    "check_positive",
    "check_schedule",
    "cyclical_schedule",
    "ended_cycle",
    "network_of",
    "refuse_to_take_nothing",
    "sampled",
    "strategy_of",
    "weights_of",
]

Weights = dict[str, Tensor]

_STATISTICS = ("running_mean", "running_var")


def check_count(name: str, value: Any, least: int) -> None:
    """Raise a ConfigurationError unless an option is a whole number that is large enough.

    Example:
        >>> check_count("every", 0.5, 1)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: every= is a whole number, at least 1; got 0.5.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}= is a whole number, at least {least}; got {value!r}.")


def check_positive(name: str, value: Any) -> None:
    """Raise a ConfigurationError unless an option is a number greater than 0.

    Example:
        >>> check_positive("lr", "0.1")
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: lr= is a number greater than 0; got '0.1'.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ConfigurationError(f"{name}= is a number greater than 0; got {value!r}.")


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
        check_count("burn_in", self.burn_in, 0)
        if isinstance(self.every, str) and self.every != "cycle":
            raise ConfigurationError(
                f"every= is a number of steps, at least 1, or 'cycle'; got {self.every!r}."
            )
        if self.every != "cycle":
            check_count("every", self.every, 1)

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
        self, total: int, seen: int = 0, counts: Callable[[int], bool] | None = None
    ) -> bool:
        """Whether a draw is taken after any of the steps from ``seen`` to ``total``.

        Args:
            total: The last step.
            seen: The last step before.
            counts: Whether a step samples, and ends a cycle where that is asked for; by default
                all do.
        """
        every = 1 if isinstance(self.every, str) else self.every
        first = self.burn_in + (max(0, seen - self.burn_in) // every + 1) * every
        return any(counts is None or counts(step) for step in range(first, total + 1, every))


def cyclical_schedule(trainer: pl.Trainer) -> Any:
    """The trainer's learning-rate schedule that has cycles, or None."""
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    return next((one for one in schedules if hasattr(one, "ends_cycle")), None)


def strategy_of(module: pl.LightningModule) -> Any:
    """The module, if it is one of our strategies; of another, attributes mean what they will."""
    return module if hasattr(module, "current_draws") else None


def sampled(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether the step that was just taken was one of sampling."""
    strategy = strategy_of(module)
    if hasattr(strategy, "sampling"):
        return bool(strategy.sampling)
    schedule = cyclical_schedule(trainer)  # it stands at the next step already
    return schedule is None or bool(schedule.samples_at(schedule.last_epoch - 1))


def ended_cycle(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Whether the step that was just taken was the last of a cycle."""
    strategy = strategy_of(module)
    if hasattr(strategy, "ended_cycle"):
        return bool(strategy.ended_cycle)
    schedule = cyclical_schedule(trainer)
    return schedule is not None and bool(schedule.ends_cycle(schedule.last_epoch - 1))


def check_schedule(rule: DrawRule, trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Raise unless the cycles of a cyclical schedule are known, and counted in steps."""
    schedule = cyclical_schedule(trainer)
    for config in trainer.lr_scheduler_configs if module.automatic_optimization else ():
        every_step = config.interval == "step" and config.frequency == 1
        if config.scheduler is schedule and not every_step:
            raise ConfigurationError(
                f"The cycles of {type(schedule).__name__} are counted in steps, but it is "
                f"stepped with interval={config.interval!r}, frequency={config.frequency}. "
                "Return it from configure_optimizers with 'interval': 'step'."
            )
    if rule.every == "cycle" and schedule is None:
        raise ConfigurationError(
            "every='cycle' needs a cyclical schedule, whose cycles are known; got "
            f"{[type(c.scheduler).__name__ for c in trainer.lr_scheduler_configs]}. Pass "
            "scheduler=partial(Cyclical, cycle_length=...), or every= as a number."
        )


def refuse_to_take_nothing(
    rule: DrawRule, trainer: pl.Trainer, module: pl.LightningModule, seen: int
) -> None:
    """Raise if no draw would be taken, where the number of steps is known."""
    try:
        total = trainer.estimated_stepping_batches
    except MisconfigurationException:  # accumulation that changes from epoch to epoch
        return
    known = module.automatic_optimization and math.isfinite(total) and total >= 0
    if not known:
        return
    schedule, strategy = cyclical_schedule(trainer), strategy_of(module)
    warm_up = getattr(strategy, "warm_up", 0)
    adapting = getattr(getattr(strategy, "_optimizer_sampler", None), "adapt_steps", 0)
    # the schedule begins after the warm-up, and its steps count from 0
    start = max(warm_up, trainer.global_step) + 1 - getattr(schedule, "last_epoch", 0)

    def counts(step: int) -> bool:
        if step <= warm_up + adapting:
            return False
        if schedule is None:
            return True
        ends = rule.every != "cycle" or schedule.ends_cycle(step - start)
        return bool(ends and schedule.samples_at(step - start))

    if not rule.takes_any(int(total), seen, counts):
        raise ConfigurationError(
            f"SampleCollector(burn_in={rule.burn_in}, every={rule.every!r}) would take no "
            f"draw: the fit has {total} steps"
            + (f", {warm_up} of them a warm-up" if warm_up else "")
            + (f", {adapting} of them to adapt the step size" if adapting else "")
            + ("; a step that explores gives none" if schedule is not None else "")
            + ". Train longer, or choose another burn_in= or every=."
        )


def network_of(module: pl.LightningModule) -> nn.Module:
    """The network that draws are of: a strategy's, or the module itself."""
    strategy = strategy_of(module)
    net: nn.Module = module if strategy is None else strategy.net
    return net


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
    if (strategy := strategy_of(module)) is not None:
        weights: Weights = strategy.current_draws()
        return weights
    return {name: tensor.detach()[None] for name, tensor in network_tensors(module).items()}


def check_finite(weights: Weights, step: int, module: pl.LightningModule) -> None:
    """Raise a NonFiniteError that names the chain, unless all weights are finite.

    Of the buffers only running statistics count: a mask may well be infinite.
    """
    strategy = strategy_of(module)
    numbers = getattr(strategy, "chain_numbers", getattr(strategy, "member_numbers", None))
    learned = {name for name, _ in network_of(module).named_parameters()}
    for name, tensor in weights.items():
        if name not in learned and name.rpartition(".")[2] not in _STATISTICS:
            continue
        good = tensor.isfinite().reshape(len(tensor), -1).all(1)
        if not good.all():
            row = int((~good).nonzero()[0])
            raise NonFiniteError(
                f"{name!r} of chain {numbers[row] if numbers else row} is not finite after step "
                f"{step}: the chain has diverged, and the draw was not taken. All draws before "
                "it are good. Lower the learning rate or the temperature, or clip gradients."
            )
