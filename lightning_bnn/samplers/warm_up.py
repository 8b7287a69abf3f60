"""A warm-up by another optimizer before sampling begins, once or in cycles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_bnn.samplers.base import Closure, Sampler

__all__ = ["WarmUp"]


class WarmUp(Optimizer):
    """Takes the first steps of each cycle with one optimizer and all others with a sampler.

    Its groups are the sampler's, so that a learning-rate scheduler acts on the sampler. The warm-up
    of a chain may end early (:meth:`end`): it then is sampled while others are still warmed up.

    Args:
        first: The optimizer of the warm-up; it may have more parameters than the sampler.
        then: The sampler.
        steps: How many steps the warm-up takes.
        taken: How many steps were taken before.
        cycle: After how many steps a warm-up begins again; None: never.
        shape: The factor of the first optimizer's learning rates, from the step of the warm-up and
            its length; by default 1.
        repeats: The steps of the first optimizer in each step of the warm-up; more than one need a
            closure.

    Example:
        >>> from lightning_bnn.samplers import SGLD
        >>> weight = torch.ones(2, requires_grad=True)
        >>> optimizer = WarmUp(torch.optim.SGD([weight], lr=0.5),
        ...                    SGLD([weight], lr=0.1, num_data=100, seed=0), steps=1)
        >>> (0.5 * weight**2).sum().backward()
        >>> optimizer.step()
        >>> weight, optimizer.warming_up
        (tensor([0.5000, 0.5000], requires_grad=True), False)
    """

    def __init__(
        self,
        first: Optimizer,
        then: Sampler,
        steps: int,
        taken: int = 0,
        cycle: int | None = None,
        shape: Callable[[int, float], float] | None = None,
        repeats: int = 1,
    ) -> None:
        super().__init__(then.param_groups, then.defaults)
        self.first, self.then, self.steps = first, then, steps
        self.taken, self.cycle = taken, cycle
        self._shape, self._repeats = shape, repeats
        self._rates = [group["lr"] for group in first.param_groups]
        self.ended = torch.zeros(then.chains, dtype=torch.bool)  # chains whose warm-up is over
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.then.param_groups, self.then.state

    @property
    def position(self) -> int:
        """The steps taken of this cycle."""
        return self.taken if self.cycle is None else self.taken % self.cycle

    @property
    def warming_up(self) -> bool:
        """Whether the next step is still one of the warm-up for a chain."""
        return self.position < self.steps and not bool(self.ended.all())

    def end(self, chains: Tensor) -> None:
        """End the warm-up of some chains, (K,), now."""
        self.ended |= chains.to(self.ended)

    def step(self, closure: Closure | None = None) -> Any:
        """One step of the optimizer whose turn it is, for each chain."""
        position = self.position
        if position == 0:
            self.ended = torch.zeros_like(self.ended)
        if position < self.steps and self._shape is not None:
            factor = self._shape(position, self.steps)
            for group, rate in zip(self.first.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
        self.taken += 1
        if position >= self.steps or bool(self.ended.all()):
            return self.then.step(closure)
        if not bool(self.ended.any()):
            loss = self.first.step(closure)
            for _ in range(1, self._repeats):
                self.first.step(closure)
            return loss
        return self._step_both(closure)

    @torch.no_grad()
    def _step_both(self, closure: Closure | None) -> Any:
        """One step in which some chains are warmed up and the others are sampled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = [p for group in self.first.param_groups for p in group["params"]]
        before = [parameter.clone() for parameter in parameters]
        self.first.step()
        for parameter, old in zip(parameters, before, strict=True):
            ended = self._along(self.ended, parameter)
            parameter.copy_(torch.where(ended, old, parameter))
        sampled = [p for group in self.then.param_groups for p in group["params"]]
        before = [parameter.clone() for parameter in sampled]
        self.then.active = self.ended.tolist()
        self.then.step()
        self.then.active = None
        for parameter, old in zip(sampled, before, strict=True):
            ended = self._along(self.ended, parameter)
            parameter.copy_(torch.where(ended, parameter, old))
            for state in self.then.state[parameter].values():
                if isinstance(state, Tensor) and state.shape == parameter.shape:
                    state.masked_fill_(~ended, 0.0)  # as it is when a chain begins
        return loss

    @staticmethod
    def _along(chains: Tensor, parameter: Tensor) -> Tensor:
        return chains.to(parameter.device).view(-1, *[1] * (parameter.dim() - 1))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of both."""
        self.first.zero_grad(set_to_none)
        self.then.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, with that of the warm-up beside it."""
        warm_up = {
            "taken": self.taken,
            "steps": self.steps,
            "cycle": self.cycle,
            "ended": self.ended.clone(),
            "rates": self._rates,
            "first": self.first.state_dict(),
        }
        return {**self.then.state_dict(), "warm_up": warm_up}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where the saved warm-up or sampler was."""
        warm_up = state_dict["warm_up"]
        self.then.load_state_dict(state_dict)
        self.first.load_state_dict(warm_up["first"])
        self.taken = warm_up["taken"]
        self.steps, self.cycle = warm_up.get("steps", self.steps), warm_up.get("cycle")
        self._rates = warm_up.get("rates", self._rates)
        self.ended = warm_up.get("ended", self.ended).cpu()
        self._share()
