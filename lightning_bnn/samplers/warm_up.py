"""A warm-up by another optimizer before sampling begins."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from lightning_bnn.samplers.base import Closure, Sampler

__all__ = ["WarmUp"]


class WarmUp(Optimizer):
    """Takes the first steps with one optimizer and all others with a sampler.

    Its groups are the sampler's, so that a learning-rate scheduler acts on the sampler.

    Args:
        first: The optimizer of the warm-up; it may have more parameters than the sampler.
        then: The sampler.
        steps: How many steps the warm-up takes.
        taken: How many steps were taken before.

    Example:
        >>> import torch
        >>> from lightning_bnn.samplers import SGLD
        >>> weight = torch.ones(2, requires_grad=True)
        >>> optimizer = WarmUp(torch.optim.SGD([weight], lr=0.5),
        ...                    SGLD([weight], lr=0.1, num_data=100, seed=0), steps=1)
        >>> (0.5 * weight**2).sum().backward()
        >>> optimizer.step()
        >>> weight, optimizer.warming_up
        (tensor([0.5000, 0.5000], requires_grad=True), False)
    """

    def __init__(self, first: Optimizer, then: Sampler, steps: int, taken: int = 0) -> None:
        super().__init__(then.param_groups, then.defaults)
        self.first, self.then, self.steps = first, then, steps
        self.taken = taken
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.then.param_groups, self.then.state

    @property
    def warming_up(self) -> bool:
        """Whether the next step is one of the warm-up."""
        return self.taken < self.steps

    def step(self, closure: Closure | None = None) -> Any:
        """One step of the optimizer whose turn it is."""
        active = self.first if self.warming_up else self.then
        loss = active.step(closure)
        self.taken += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of both."""
        self.first.zero_grad(set_to_none)
        self.then.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, with that of the warm-up beside it."""
        state = self.then.state_dict()
        return {**state, "warm_up": {"taken": self.taken, "first": self.first.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where the saved warm-up or sampler was."""
        warm_up = state_dict["warm_up"]
        self.then.load_state_dict(state_dict)
        self.first.load_state_dict(warm_up["first"])
        self.taken = warm_up["taken"]
        self._share()
