r"""Langevin dynamics by the splitting BAOA, whose weights are those of BAOAB.

.. math::
    v &\leftarrow v - \eta g \\
    w &\leftarrow w + \tfrac12 v \\
    v &\leftarrow e^{-a} v + \sqrt{(1 - e^{-2a})\,\eta T/N}\,\xi \\
    w &\leftarrow w + \tfrac12 v

A kick by the gradient (B), half a move (A), friction and noise solved exactly (O), and half a
move (A), at the cost of one gradient. Leimkuhler and Matthews (2013) split the kick in two and
showed that the weights' law is then wrong only by η² for large friction, and for a Gaussian
posterior not at all: with the gradient of all examples the covariance is exactly
:math:`T A^{-1}` at *every* stable step, :math:`\eta\lambda < 4` for every curvature λ of the mean
energy. Two half kicks in a row, one at the end of a step and one at the beginning of the next, make
one whole kick, so the weights visited here are the same. The velocities, after O, have exactly
the variance ηT/N in that case too.

The noise of minibatch gradients widens it as it does for every sampler without a thermostat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.checks import check_number
from lightning_bnn.samplers.base import Group, MomentumSampler

__all__ = ["BAOA"]


class BAOA(MomentumSampler):
    """Langevin dynamics of second order: the largest steps for a given bias.

    Args:
        params: Parameters, or groups of them.
        lr: η, the learning rate on the mean energy; by default each chain finds its own.
        num_data: N, the number of training examples.
        friction: a, above 0; a step keeps the share e⁻ᵃ of the velocity.
        temperature: T; 1 is the Bayes posterior.
        seed: Seed of the noise, or one for each stacked chain.

    Example:
        >>> weight = torch.zeros(3, requires_grad=True)
        >>> sampler = BAOA([weight], lr=0.1, num_data=100, seed=0)
        >>> (0.5 * weight**2).sum().backward()                    # the mean energy
        >>> sampler.step()
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
        """Raise on a friction that is not above 0."""
        super().check_options(group)
        check_number("friction", group["friction"])

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        """One step of the rule above."""
        velocities = self.velocities(weights)
        rate = self.rate(group)
        self.add(velocities, gradients, -rate)
        torch._foreach_add_(weights, velocities, alpha=0.5)
        torch._foreach_mul_(velocities, math.exp(-group["friction"]))
        scale = self.noise_scale(group, -math.expm1(-2 * group["friction"]) * rate)
        if isinstance(scale, Tensor) or scale > 0:
            self.add(velocities, self.noise(group, weights), scale)
        torch._foreach_add_(weights, velocities, alpha=0.5)
