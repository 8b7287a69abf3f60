r"""Stochastic gradient Langevin dynamics (Welling and Teh, 2011).

.. math:: w \leftarrow w - \eta g + \sqrt{2\eta T/N}\,\xi

Welling and Teh's ε is 2η/N. With the gradient of all examples and a Gaussian posterior of
precision A the stationary covariance is :math:`T A^{-1}(I - \eta A/2N)^{-1}`: too wide by a
factor that goes to 1 with η. The noise of minibatch gradients adds to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.samplers.base import Group, Sampler

__all__ = ["SGLD"]


class SGLD(Sampler):
    """Gradient descent with Gaussian noise of the right size.

    Args:
        params: Parameters, or groups of them.
        lr: η, the learning rate on the mean energy.
        num_data: N, the number of training examples.
        temperature: T; 1 is the Bayes posterior.
        seed: Seed of the noise, or one for each stacked chain.

    Example:
        >>> weight = torch.zeros(3, requires_grad=True)
        >>> sampler = SGLD([weight], lr=0.1, num_data=100, seed=0)
        >>> (0.5 * weight**2).sum().backward()                    # the mean energy
        >>> sampler.step()
        >>> bool((weight != 0).all())
        True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        num_data: int | None = None,
        temperature: float = 1.0,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr}, num_data, temperature, seed)

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        """One step of the rule above."""
        torch._foreach_add_(weights, gradients, alpha=-group["lr"])
        scale = self.noise_scale(group, 2 * group["lr"])
        if scale > 0:
            torch._foreach_add_(weights, self.noise(group, weights), alpha=scale)
