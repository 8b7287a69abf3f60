r"""The low-rank family: a spread for each weight, and R directions in which all move together.

A draw is :math:`w = \mu + s\odot\varepsilon + Uz` with :math:`z\sim N(0, I_R)`, so that
:math:`\Sigma = \mathrm{diag}(s^2) + UU^\top` over the weights of all layers. With
:math:`U = \mathrm{diag}(s)\,V/\sqrt R` the matrix determinant lemma is

.. math::
    \tfrac12\log\det\Sigma = \sum\log s + \tfrac12\log\det(I_R + V^\top V/R),

a determinant of R numbers a side. V is what is trained: a step of Adam then moves every standard
deviation by about as much as that of a mean field, whatever R and s are. V = 0 would have no slope,
so q begins with small random signs there, always the same. (Ong, Nott and Smith, 2018, *Gaussian
Variational Approximation with a Factor Covariance Structure*; Mishkin et al., 2018, *SLANG*.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_bnn.checks import check_whole
from lightning_bnn.families.gaussian import GaussianFamily
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.mixtures import at_least_float32
from lightning_bnn.posteriors import LowRankPosterior
from lightning_bnn.priors import BoundPrior
from lightning_bnn.random import seeded_generator

__all__ = ["LowRank"]

_SIZE = 0.1  # of V to begin with: a hundredth of the variance


class LowRank(GaussianFamily):
    """A Gaussian whose covariance is a diagonal and R columns.

    It takes R + 2 numbers for each weight, and each step as many operations.

    Args:
        rank: R, the number of columns; more than there are weights are not made.

    Example:
        >>> family = LowRank(2).bind({"w": torch.zeros(5)}, initial_scale=0.5)
        >>> family.columns.shape, family.noise_size
        (torch.Size([2, 5]), 7)
        >>> family.sd().detach()
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 0.5000])
    """

    can_prune = True

    def __init__(self, rank: int = 10) -> None:
        super().__init__()
        self.rank = check_whole("rank", rank, 1)

    def setup(self, flat: Tensor, initial_scale: float) -> None:
        """Make μ, log s and V, (R, P)."""
        self.rank = min(self.rank, flat.numel())
        self.mean = nn.Parameter(flat.clone())
        self._first = initial_scale
        rho, columns = self._starting(flat)
        self.rho, self.columns = nn.Parameter(rho), nn.Parameter(columns)

    def _starting(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """What log s and V are made with."""
        signs = torch.empty(self.rank, like.numel()).bernoulli_(
            generator=seeded_generator(0, "cpu")
        )
        size = math.log(self._first / math.sqrt(1 + _SIZE**2))
        return torch.full_like(like, size), _SIZE * (2 * signs - 1).to(like)

    @torch.no_grad()
    def begin(self, initial_scale: float) -> None:
        """Begin with another standard deviation, if log s and V are what q was made with."""
        rho, columns = self._starting(self.mean)
        if torch.equal(self.rho, rho) and torch.equal(self.columns, columns):
            self._first = initial_scale
            self.rho.copy_(self._starting(self.mean)[0])

    @property
    def noise_size(self) -> int:
        """A number for each weight, and one for each column."""
        return self.layout.size + self.rank

    def rsample(self, noise: Tensor) -> Tensor:
        """μ + s(ε + Vz/√R)."""
        own, common = noise.split([self.layout.size, self.rank])
        return self.mean + self.rho.exp() * (own + common @ self._relative())

    def _relative(self) -> Tensor:
        """V/√R."""
        return self.columns / math.sqrt(self.rank)

    def sd(self) -> Tensor:
        """The flat vector of standard deviations; parked where pruned."""
        return self.rho.exp() * (1 + self._relative().square().sum(0)).sqrt()

    def log_volume(self) -> Tensor:
        """½ log det Σ of the weights that are not pruned, by the matrix determinant lemma."""
        rho, columns = self.masked(self.rho), self.masked(at_least_float32(self._relative()))
        inner = columns @ columns.T
        root = torch.linalg.cholesky(inner + torch.eye(self.rank).to(inner))
        return rho.sum() + root.diagonal().log().sum().to(rho.dtype)

    @torch.no_grad()
    def widen(self, factors: Tensor) -> None:
        """Multiply s, in place, and with it U."""
        self.rho.add_(self.masked(factors.log()))

    @torch.no_grad()
    def prune(self, keep: Tensor, prior: BoundPrior) -> None:
        """Take weights out for good: what remains has the covariance that it had.

        Args:
            keep: Which weights remain, a flat boolean vector.
            prior: Where the others are parked.
        """
        self.restrict(keep)
        assert self.keep is not None
        for start, stop, _, loc, scale in prior.segments():
            part = slice(start, stop)
            pruned = ~self.keep[part]
            log_scale = torch.as_tensor(scale, dtype=self.rho.dtype).to(self.rho.device).log()
            self.rho[part] = torch.where(pruned, log_scale, self.rho[part])
            self.mean[part] = torch.where(pruned, loc, self.mean[part])

    @torch.no_grad()
    def posterior(
        self, net: nn.Module, likelihood: Likelihood, fixed: Mapping[str, Tensor]
    ) -> LowRankPosterior:
        """The Gaussian as it stands; pruned weights are zero."""
        scales = self.rho.exp()
        mean, variance, columns = (
            self.layout.views(self.masked(flat))
            for flat in (self.mean, scales.square(), scales * self._relative())
        )
        return LowRankPosterior.from_covariance(net, likelihood, mean, variance, columns, fixed)
