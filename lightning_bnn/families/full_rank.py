r"""The full-rank Gaussian family: every weight may depend on every other.

A draw is :math:`w = \mu + L\varepsilon`, with a lower triangular L
(:mod:`lightning_bnn.families.cholesky`): the covariance :math:`\Sigma = LL^\top` is any, and

.. math::
    \mathrm{KL}(q\|p) = \mathbb{E}_q[-\log p(w)] - \sum_j\log L_{jj} - \tfrac P2\log 2\pi e .

On a Gaussian posterior, such as that of a linear model, the best fit is the posterior itself and
the ELBO is the log evidence. The factor has P(P + 1)/2 numbers: it is for the few weights of a
small network or of a last layer. (Titsias and Lázaro-Gredilla, 2014, *Doubly Stochastic
Variational Bayes for non-Conjugate Inference*; Kucukelbir et al., 2017, *Automatic Differentiation
Variational Inference*.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_bnn.checks import check_number
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families.cholesky import CholeskyFactor
from lightning_bnn.families.gaussian import GaussianFamily
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import LowRankPosterior

__all__ = ["FullRank"]

# The factor below the diagonal, its gradient and Adam's two moments are half of a square each; a
# step holds about five squares more.
_SQUARES = 7


class FullRank(GaussianFamily):
    """A Gaussian with a covariance of its own for each pair of weights.

    Args:
        max_gigabytes: The most memory that training may take for it. It grows with the square of
            the number of Bayesian weights; in float32, 10,000 take about 3 GB.

    Example:
        >>> family = FullRank().bind({"w": torch.zeros(3)}, initial_scale=0.5)
        >>> family.noise_size, family.sd()
        (3, tensor([0.5000, 0.5000, 0.5000], grad_fn=<MulBackward0>))
    """

    def __init__(self, max_gigabytes: float = 4.0) -> None:
        super().__init__()
        self.max_gigabytes = check_number("max_gigabytes", max_gigabytes)

    def setup(self, flat: Tensor, initial_scale: float) -> None:
        """Make μ and the factor, if there is room for it."""
        gigabytes = _SQUARES * flat.numel() ** 2 * flat.element_size() / 1e9
        if gigabytes > self.max_gigabytes:
            raise ConfigurationError(
                f"FullRank() keeps a covariance for each pair of its {flat.numel():,} weights, "
                f"about {gigabytes:,.1f} GB while it trains; max_gigabytes= allows "
                f"{self.max_gigabytes:g}. Use family=LowRank(10) or Kronecker(), or make fewer "
                "weights Bayesian, as bayesian=lightning_bnn.selection.last_layer does."
            )
        self.mean = nn.Parameter(flat.clone())
        self._first = initial_scale
        self.factor = CholeskyFactor(flat.numel(), initial_scale, flat)

    def begin(self, initial_scale: float) -> None:
        """Begin with another standard deviation, if the factor is what q was made with."""
        if self.factor.begins(self._first):
            self._first = initial_scale
            nn.init.constant_(self.factor.rho, math.log(initial_scale))

    def sd(self) -> Tensor:
        """The flat vector of standard deviations."""
        return self.factor.sd()

    def log_volume(self) -> Tensor:
        """½ log det Σ: the sum of the logarithms of the factor's diagonal."""
        return self.factor.rho.sum()

    def rsample(self, noise: Tensor) -> Tensor:
        """μ + Lε."""
        return self.mean + self.factor.times(noise[:, None])[:, 0]

    @torch.no_grad()
    def widen(self, factors: Tensor) -> None:
        """Multiply the rows of the factor, in place."""
        self.factor.rho.add_(factors.log())

    @torch.no_grad()
    def posterior(
        self, net: nn.Module, likelihood: Likelihood, fixed: Mapping[str, Tensor]
    ) -> LowRankPosterior:
        """The Gaussian as it stands: a covariance of which no part is diagonal, and all columns."""
        views = self.layout.views
        nothing = views(torch.zeros_like(self.mean))
        columns = views(self.factor.root().T.contiguous())
        return LowRankPosterior.from_covariance(
            net, likelihood, views(self.mean.detach()), nothing, columns, fixed
        )
