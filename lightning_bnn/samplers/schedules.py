r"""Schedules of the learning rate for samplers, in steps t = 0, 1, 2, ...

* :class:`Polynomial` (Welling and Teh, 2011): :math:`\eta_t = \eta_0\,(b + t)^{-\gamma}`. With
  ½ < γ ≤ 1 the steps go to zero slowly enough for the chain to reach everything, and its bias
  goes with them.
* :class:`Cyclical` (Zhang et al., 2020): cycles of L steps,
  :math:`\eta_t = \frac{\eta_0}{2}\left[\cos\frac{\pi\,(t \bmod L)}{L} + 1\right]`. Large steps
  without noise at the start of a cycle carry the chain to another mode, small ones with noise
  sample it.

They are ordinary schedulers of PyTorch, to be stepped after each step of the optimizer. The rate is
a function of t alone, so nothing is lost by a restart.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_bnn.checks import check_kind, check_number, check_whole
from lightning_bnn.errors import ConfigurationError

__all__ = ["Cyclical", "Polynomial"]


class Polynomial(LRScheduler):
    """The learning rate falls as a power of the step.

    Args:
        optimizer: The sampler.
        offset: b, above 0; with 1 the first rate is the optimizer's own.
        power: γ, above 0.
        last_epoch: The step to resume from; -1 to start.

    Example:
        >>> import torch
        >>> from lightning_bnn.samplers import SGLD
        >>> sampler = SGLD([torch.zeros(1, requires_grad=True)], lr=0.1, num_data=10)
        >>> schedule = Polynomial(sampler, power=0.5)
        >>> for _ in range(3):
        ...     sampler.step()
        ...     schedule.step()
        >>> schedule.get_last_lr()
        [0.05]
    """

    def __init__(
        self, optimizer: Optimizer, offset: float = 1.0, power: float = 0.55, last_epoch: int = -1
    ) -> None:
        check_kind("optimizer", optimizer, Optimizer, "a sampler or an optimizer")
        self.offset = check_number("offset", offset)
        self.power = check_number("power", power)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group at this step."""
        factor = (self.offset + self.last_epoch) ** -self.power
        return [rate * factor for rate in self.base_lrs]


class Cyclical(LRScheduler):
    """Cosine cycles, each with a part that explores and a part that samples.

    In the exploration part ``group["explore"]`` is True, and samplers leave their noise out.

    Args:
        optimizer: The sampler.
        cycle_length: L, the steps of a cycle.
        exploration: The share of a cycle that explores, at least 0 and below 1, rounded to whole
            steps.
        last_epoch: The step to resume from; -1 to start.

    Example:
        >>> import torch
        >>> from lightning_bnn.samplers import SGLD
        >>> sampler = SGLD([torch.zeros(1, requires_grad=True)], lr=0.1, num_data=10)
        >>> schedule = Cyclical(sampler, cycle_length=4)
        >>> [schedule.samples_at(step) for step in range(6)]
        [False, False, True, True, False, False]
        >>> schedule.ends_cycle(5), schedule.ends_cycle(7)
        (False, True)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_length: int,
        exploration: float = 0.5,
        last_epoch: int = -1,
    ) -> None:
        check_kind("optimizer", optimizer, Optimizer, "a sampler or an optimizer")
        self.cycle_length = check_whole("cycle_length", cycle_length, 1)
        self.exploration = check_number("exploration", exploration, positive=False)
        self.exploration_steps = round(exploration * cycle_length)
        if self.exploration_steps >= cycle_length:
            raise ConfigurationError(
                f"exploration={exploration} of cycles of {cycle_length} steps leaves no step that "
                "samples. Lower it, or make the cycles longer."
            )
        super().__init__(optimizer, last_epoch)

    def samples_at(self, step: int) -> bool:
        """Whether ``step`` has noise, so that the weights after it count as draws."""
        return step % self.cycle_length >= self.exploration_steps

    def ends_cycle(self, step: int) -> bool:
        """Whether ``step`` is the last of its cycle."""
        return (step + 1) % self.cycle_length == 0

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group at this step."""
        place = (self.last_epoch % self.cycle_length) / self.cycle_length
        factor = (math.cos(math.pi * place) + 1) / 2
        return [rate * factor for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Move on by one step."""
        super().step(epoch)
        for group in self.optimizer.param_groups:
            group["explore"] = not self.samples_at(self.last_epoch)
