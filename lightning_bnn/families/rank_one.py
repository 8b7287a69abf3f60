r"""Rank-1 factors: one set of weights, and random factors for its rows and columns in components.

In component k of K a weight matrix is :math:`W = \bar W\circ r s^\top` and a vector
:math:`\bar w\circ r`, with independent Gaussian factors :math:`r_i\sim N(\mu_{ki},\sigma_{ki}^2)`,
the same of s, under the prior :math:`N(1, \tau^2)`; each component is as likely as any other. The
shared weights are a point estimate under the prior of the strategy. What is maximised is

.. math::
    \frac1K\sum_k \Big(\mathbb{E}_{q_k}[\log p(D\mid\bar w, r, s)] - \mathrm{KL}(q_k\|p)\Big)
    + \log p(\bar w)
    \;\le\; \log p(D, \bar w),

the mean of the components' own bounds. It is below the bound of their mixture by at most log K,
because the entropy of a mixture is at least the mean of its parts', and it bounds the evidence
*at* the shared weights: it does not rank models of other numbers of weights. A draw is of one
component, chosen at random, so each step trains the weights and one component on the data; with
``draws=K`` of the strategy about all of them. The components begin at draws from the prior of the
factors, which makes them different; a single one begins at 1.

The price is K vectors for each side of a weight, not K networks. (Dusenberry et al., 2020,
*Efficient and Scalable Bayesian Neural Nets with Rank-1 Factors*.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_bnn.checks import check_number, check_whole
from lightning_bnn.families.base import Family
from lightning_bnn.families.gaussian import sharpened
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import RankOnePosterior
from lightning_bnn.posteriors.matrices import factor_sides, scaled
from lightning_bnn.priors import BoundPrior
from lightning_bnn.random import seeded_generator
from lightning_bnn.selection import FlatLayout

__all__ = ["RankOne"]


class RankOne(Family):
    """Shared weights times Gaussian factors of rows and columns, in several components.

    Its ``mean`` are the shared weights, the network at which all factors are 1. The scale that a
    family begins with is that of the factors, relative to 1.

    Args:
        components: K, how many sets of factors there are.
        prior_scale: τ, the standard deviation of the factors around 1 under their prior.

    Example:
        >>> family = RankOne(components=4).bind({"w": torch.ones(2, 3), "b": torch.ones(2)}, 0.01)
        >>> family.centre.shape  # 2 + 3 factors of w, 2 of b
        torch.Size([4, 7])
        >>> family.rsample(torch.zeros(family.noise_size)).shape
        torch.Size([8])
    """

    can_prune = True

    def __init__(self, components: int = 4, prior_scale: float = 0.1) -> None:
        super().__init__()
        self.components = check_whole("components", components, 1)
        self.prior_scale = check_number("prior_scale", prior_scale)

    def setup(self, flat: Tensor, initial_scale: float) -> None:
        """Make the shared weights, and means and log standard deviations of the factors, (K, F)."""
        self.mean = nn.Parameter(flat.clone())
        sides = zip(self.layout.names, self.layout.shapes, strict=True)
        lengths = {k: n for name, shape in sides for k, n in factor_sides(name, shape)}
        self._sides = FlatLayout({name: flat.new_empty(n) for name, n in lengths.items()})
        centre = torch.zeros(self.components, self._sides.size)
        if self.components > 1:
            centre.normal_(generator=seeded_generator(0, "cpu"))
        self.centre = nn.Parameter((1 + self.prior_scale * centre).to(flat))
        self._first = initial_scale
        self.rho = nn.Parameter(torch.full_like(self.centre, math.log(initial_scale)))

    @torch.no_grad()
    def begin(self, initial_scale: float) -> None:
        """Begin with another standard deviation of the factors, if they are as q was made."""
        if torch.equal(self.rho, torch.full_like(self.rho, math.log(self._first))):
            self._first = initial_scale
            self.rho.fill_(math.log(initial_scale))

    @property
    def noise_size(self) -> int:
        """A number for each factor, and one that chooses the component."""
        return 1 + self._sides.size

    def per_weight(self) -> list[Tensor]:
        """The shared weights; the factors are of whole rows and columns."""
        return [self.mean]

    def rsample(self, noise: Tensor) -> Tensor:
        """Shared weights times the factors of the component that the first number chooses."""
        share = float(torch.special.ndtr(noise[0].double()))  # uniform
        component = min(int(share * self.components), self.components - 1)
        factors = self._sides.views(self.centre[component] + self.rho[component].exp() * noise[1:])
        weights = self.layout.views(self.mean).items()
        return torch.cat([scaled(name, one, factors).reshape(-1) for name, one in weights])

    def kl(self, draw: Tensor, prior: BoundPrior) -> Tensor:
        """−log p of the shared weights, and the mean over the components of the factors' KL."""
        ratio = self.rho.exp() * (math.sqrt(prior.power) / self.prior_scale)
        distance = (self.centre - 1) * (math.sqrt(prior.power) / self.prior_scale)
        each = 0.5 * (distance.square() + ratio.square() - 1) - ratio.log()
        return prior.energy(self.mean, self.keep) + each.sum() / self.components

    @torch.no_grad()
    def sharpen(self, ratio: float, prior: BoundPrior | None) -> None:
        """1/σ² of a factor is a sum of what the data and its prior say."""
        own = 0.0 if prior is None else self.prior_scale**-2
        self.rho.copy_(sharpened(self.rho.exp(), own, ratio).log())

    @torch.no_grad()
    def prune(self, keep: Tensor, prior: BoundPrior) -> None:
        """Take weights out for good, in all components."""
        self.restrict(keep)
        self.mean.copy_(self.masked(self.mean))

    @torch.no_grad()
    def posterior(
        self, net: nn.Module, likelihood: Likelihood, fixed: Mapping[str, Tensor]
    ) -> RankOnePosterior:
        """The mixture as it stands; pruned weights are zero."""
        shared = self.layout.views(self.masked(self.mean))
        factors, factor_sd = self._sides.views(self.centre), self._sides.views(self.rho.exp())
        return RankOnePosterior(net, likelihood, shared, factors, factor_sd, fixed)
