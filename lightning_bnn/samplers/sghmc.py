r"""Stochastic gradient Hamiltonian Monte Carlo (Chen, Fox and Guestrin, 2014).

.. math::
    v &\leftarrow (1 - a)\,v - \eta g + \sqrt{2 a \eta T/N}\,\xi \\
    w &\leftarrow w + v

Gradient descent with momentum 1 − a and noise of the right size, in the form of their equation
15, without an estimate of the gradient's own noise. For small η it moves like SGLD with the
learning rate η/a, but forgets directions of low curvature sooner. With a = 1 it *is* SGLD.

As η → 0 the weights have the right law at every friction. The velocities then have the variance
:math:`\frac{2}{2-a}\,\eta T/N`, so the kinetic temperature is read as
:math:`(1 - a/2)\,N|v|^2/(\eta d)`, which is T for every friction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.samplers.base import Group, MomentumSampler, check_share

__all__ = ["SGHMC"]


class SGHMC(MomentumSampler):
    """Momentum with friction, and noise that balances it.

    Args:
        params: Parameters, or groups of them.
        lr: η, the learning rate on the mean energy; by default each chain finds its own.
        num_data: N, the number of training examples.
        friction: a, above 0 and at most 1; the momentum is 1 − a.
        temperature: T; 1 is the Bayes posterior.
        seed: Seed of the noise, or one for each stacked chain.

    Example:
        >>> weight = torch.zeros(3, requires_grad=True)
        >>> sampler = SGHMC([weight], lr=0.1, num_data=100, seed=0)
        >>> for _ in range(2):
        ...     sampler.zero_grad()
        ...     (0.5 * weight**2).sum().backward()                # the mean energy
        ...     sampler.step()
        >>> bool((weight != 0).all())
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        num_data: int | None = None,
        friction: float = 0.1,
        temperature: float = 1.0,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "friction": friction}, num_data, temperature, seed)

    def check_options(self, group: Group) -> None:
        """Raise on a friction outside (0, 1]."""
        super().check_options(group)
        check_share("friction", group["friction"])

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        """One step of the rule above."""
        velocities = self.velocities(weights)
        torch._foreach_mul_(velocities, 1 - group["friction"])
        rate = self.rate(group)
        self.add(velocities, gradients, -rate)
        scale = self.noise_scale(group, 2 * group["friction"] * rate)
        if isinstance(scale, Tensor) or scale > 0:
            self.add(velocities, self.noise(group, weights), scale)
        torch._foreach_add_(weights, velocities)

    def read_temperature(
        self, group: Group, weights: list[Tensor], gradients: list[Tensor]
    ) -> tuple[Tensor, int]:
        """(1 − a/2) N|v|²/η for each chain, and the number of weights."""
        reading, count = super().read_temperature(group, weights, gradients)
        return reading * (1 - group["friction"] / 2), count
