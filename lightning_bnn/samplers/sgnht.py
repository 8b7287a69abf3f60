r"""The stochastic gradient Nosé-Hoover thermostat (Ding et al., 2014).

.. math::
    v &\leftarrow (1 - s)\,v - \eta g + \sqrt{2 a \eta T/N}\,\xi \\
    w &\leftarrow w + v \\
    s &\leftarrow s + c\left[\left(1 - \tfrac{s}{2}\right) \frac{N|v|^2}{\eta T d} - 1\right]

The noise of minibatch gradients heats a chain by an amount that nobody knows. The thermostat s is
a friction that grows while the velocities are too hot and falls while they are too cold, so it
takes up that heat: s starts at a and ends near a + b/2, where bηT/N is the variance that the
gradients add to v. That is right for noise of one size in all weights.

Ding et al. have no factor 1 − s/2, which is 1 in the limit of small frictions. But velocities in
balance with a friction s per step have the variance :math:`\frac{2}{2-s}\,\eta T/N` (see
:mod:`lightning_bnn.samplers.sghmc`); holding them to ηT/N makes the posterior's variances too
small by the share s/2, however small η is. With the factor they are right as η → 0.

There is one thermostat for each chain and each group of parameters, because groups may have their
own η and T; d counts the group's weights. It fluctuates around its mean with the variance c/d. It
is held in steps of exploration and at T = 0, where there is no temperature to keep. The kinetic
temperature is read as :math:`(1 - s/2)\,N|v|^2/(\eta d)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.checks import check_number
from lightning_bnn.samplers.base import Group, MomentumSampler, check_share

__all__ = ["SGNHT"]


class SGNHT(MomentumSampler):
    """Momentum with a friction that adapts until the kinetic temperature is right.

    The thermostats are in the groups of parameters, ``group["thermostat"]``, one number for each
    chain, from the first step on.

    Args:
        params: Parameters, or groups of them.
        lr: η, the learning rate on the mean energy.
        num_data: N, the number of training examples.
        friction: a, above 0 and at most 1: the noise that is added, and where s starts.
        coupling: c, at least 0: how fast the thermostat moves; with 0 this is SGHMC.
        temperature: T; 1 is the Bayes posterior.
        seed: Seed of the noise, or one for each stacked chain.

    Example:
        >>> weight = torch.zeros(3, requires_grad=True)
        >>> sampler = SGNHT([weight], lr=0.1, num_data=100, seed=0)
        >>> (0.5 * weight**2).sum().backward()                    # the mean energy
        >>> sampler.step()
        >>> sampler.param_groups[0]["thermostat"].shape
        torch.Size([1])
    """

    can_find_rate = False  # the thermostat keeps the temperature right at any rate

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        num_data: int | None = None,
        friction: float = 0.1,
        coupling: float = 0.01,
        temperature: float = 1.0,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        options = {"lr": lr, "friction": friction, "coupling": coupling}
        super().__init__(params, options, num_data, temperature, seed)

    def check_options(self, group: Group) -> None:
        """Raise on a friction outside (0, 1] and on a negative coupling."""
        super().check_options(group)
        check_share("friction", group["friction"])
        check_number("coupling", group["coupling"], positive=False)

    def update(self, group: Group, weights: list[Tensor], gradients: list[Tensor]) -> None:
        """One step of the rule above."""
        thermostat = self._thermostat(group, weights[0])
        velocities = self.velocities(weights)
        for velocity in velocities:
            velocity.mul_(self.along(1 - thermostat, velocity))
        torch._foreach_add_(velocities, gradients, alpha=-group["lr"])
        scale = self.noise_scale(group, 2 * group["friction"] * group["lr"])
        if scale > 0:
            torch._foreach_add_(velocities, self.noise(group, weights), alpha=scale)
        torch._foreach_add_(weights, velocities)
        if scale > 0 and group["coupling"] > 0:
            energy, count = self.read_temperature(group, weights, gradients)
            excess = energy / (group["temperature"] * count) - 1
            group["thermostat"] = thermostat + group["coupling"] * excess

    def read_temperature(
        self, group: Group, weights: list[Tensor], gradients: list[Tensor]
    ) -> tuple[Tensor, int]:
        """(1 − s/2) N|v|²/η for each chain, and the number of weights."""
        thermostat = self._thermostat(group, weights[0])
        energy, count = super().read_temperature(group, weights, gradients)
        return (1 - thermostat / 2) * energy, count

    def _thermostat(self, group: Group, weight: Tensor) -> Tensor:
        if "thermostat" not in group:
            # half precision would lose its small moves
            dtype = torch.promote_types(weight.dtype, torch.float32)
            group["thermostat"] = torch.full((self.chains,), group["friction"], dtype=dtype)
        group["thermostat"] = group["thermostat"].to(weight.device)
        return group["thermostat"]
