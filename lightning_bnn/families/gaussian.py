r"""What all Gaussian families share: their KL from any prior, by the spread of each weight.

The expectation under a Gaussian q of a prior that is a density for each weight by itself needs no
covariances, only the mean and the standard deviation of each weight; of one that couples weights
(:mod:`lightning_bnn.coupling`) what covariances add is estimated at the draw:

.. math::
    \mathrm{KL}(q\|p) = \mathbb{E}_q[-\log p(w)]
        - \tfrac12\log\det\Sigma - \tfrac P2\log 2\pi e .

A family adds its :math:`\tfrac12\log\det\Sigma` and its standard deviations.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor

from lightning_bnn.families.base import Family
from lightning_bnn.priors import BoundPrior, Normal

__all__ = ["HALF_LOG_TWO_PI_E", "GaussianFamily", "sharpened"]

HALF_LOG_TWO_PI_E = 0.5 * math.log(2 * math.pi * math.e)
_AT_PRIOR = 0.1  # nats


class GaussianFamily(Family):
    """A Gaussian over the flat vector of weights; a kind adds its parameters and its draws."""

    @abstractmethod
    def sd(self) -> Tensor:
        """The flat vector of standard deviations, differentiable; parked where pruned."""

    @abstractmethod
    def log_volume(self) -> Tensor:
        """½ log det Σ of the weights that are not pruned, differentiable."""

    @abstractmethod
    def widen(self, factors: Tensor) -> None:
        """Multiply the standard deviations by flat factors, in place; correlations stay."""

    def kl(self, draw: Tensor, prior: BoundPrior) -> Tensor:
        """KL(q‖p) in nats by ordinary autograd; ``draw`` serves priors without a closed form."""
        count = self.mean.numel() if self.keep is None else int(self.keep.sum())
        energy = prior.expected_energy(self.mean, self.sd(), draw, self.keep)
        if not self.factorised:
            between = prior.correlation_energy(draw - self.mean, self.keep)
            energy = energy if between is None else energy + between
        return energy - self.log_volume() - count * HALF_LOG_TWO_PI_E

    @torch.no_grad()
    def sharpen(self, ratio: float, prior: BoundPrior | None) -> None:
        """1/σ² is a sum of what the data and the prior say (the latter exactly, if Gaussian)."""
        sd = self.sd()
        own = torch.zeros_like(sd)
        for start, stop, _, _, scale in prior.segments() if prior is not None else ():
            own[start:stop] = scale**-2
        self.widen(sharpened(sd, own, ratio) / sd)

    @torch.no_grad()
    def at_prior(self, prior: BoundPrior) -> Tensor | None:
        """Whose KL is below 0.1 nats: at most, σ is 0.7 or 1.35 s, or the mean 0.45 s off.

        Only of Gaussian priors: from others, a Gaussian q stays away.
        """
        sd, at = self.sd(), torch.zeros_like(self.mean, dtype=torch.bool)
        for start, stop, density, loc, scale in prior.segments():
            if isinstance(density, Normal):
                ratio, distance = sd[start:stop] / scale, (self.mean[start:stop] - loc) / scale
                kl = 0.5 * (distance**2 + ratio**2 - 1) - ratio.log()
                at[start:stop] = kl < _AT_PRIOR
        return at if self.keep is None else at & self.keep


def sharpened(sd: Tensor, own: Tensor | float, ratio: float) -> Tensor:
    """Standard deviations, as what the data say of 1/σ² comes to count ``ratio`` times.

    Args:
        sd: They, as they are.
        own: What the prior says of 1/σ².
        ratio: The factor.

    Example:
        >>> sharpened(torch.tensor([0.5, 1.0]), 1.0, 5.0)  # 1/4 = 1 + 3; at the prior nothing moves
        tensor([0.2500, 1.0000])
    """
    return (sd**-2 - own).clamp_(min=0).mul_(ratio).add_(own).rsqrt_()
