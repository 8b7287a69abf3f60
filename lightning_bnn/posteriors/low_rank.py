r"""A Gaussian posterior whose covariance is half diagonal, half of low rank: that of SWAG.

With a mean :math:`\bar w`, a variance v for each weight, R deviations as the columns of D and a
scale s, a draw is

.. math::
    w = \bar w + \sqrt s\,\Big(\sqrt{\tfrac12 v}\odot z_1 + \frac{D z_2}{\sqrt{2(R-1)}}\Big),
    \qquad z_1\sim N(0, I_P),\; z_2\sim N(0, I_R),

so its covariance is :math:`s\,(\tfrac12\,\mathrm{diag}(v) + \tfrac12\,DD^\top/(R-1))`. There is one
:math:`z_2` for all tensors together: weights of different layers move together as they did in the
deviations. Without deviations (R = 0) the covariance is s·diag(v), the whole of it. Any sum of a
diagonal and a low-rank covariance can be written so (:meth:`LowRankPosterior.from_covariance`).

Maddox, Garipov, Izmailov, Vetrov and Wilson (2019), *A Simple Baseline for Bayesian Uncertainty in
Deep Learning*.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn.checks import check_kind, check_number
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import in_network_order
from lightning_bnn.posteriors.draws import unstack
from lightning_bnn.posteriors.gaussian import FlatGaussian
from lightning_bnn.posteriors.moments import at_least_float32
from lightning_bnn.posteriors.weights import Correlations, Weights
from lightning_bnn.storage.manifest import Form

__all__ = ["LowRankPosterior"]


class LowRankPosterior(FlatGaussian):
    """A Gaussian over the weights with a covariance that is half diagonal, half of low rank.

    A draw needs no more memory than its own weights, whatever the rank.

    Args:
        net: The network; the posterior keeps a copy.
        likelihood: How outputs of the network give targets.
        mean: The means of the Bayesian weights, by name.
        variance: Their variances.
        deviations: R deviations from the mean, each tensor with a leading axis of R: at least two,
            or none.
        fixed: Other parameters and buffers; the network's own values serve for those left out.
        scale: What the covariance is multiplied by.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Linear(1, 1)
        >>> zero = {"weight": torch.zeros(1, 1), "bias": torch.zeros(1)}
        >>> columns = {"weight": torch.tensor([1.0, 2.0]).view(2, 1, 1),
        ...            "bias": torch.tensor([1.0, 2.0]).view(2, 1)}
        >>> posterior = LowRankPosterior(net, Gaussian(0.1), zero, zero, columns)
        >>> draws = posterior.sample(5)
        >>> bool((draws["weight"].flatten() == draws["bias"].flatten()).all())
        True
    """

    kind = "low_rank"
    groups = ("mean", "variance", "deviations")
    options = ("scale",)
    form: ClassVar[Form] = {"scale": float}

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        mean: Mapping[str, Tensor],
        variance: Mapping[str, Tensor],
        deviations: Mapping[str, Tensor] | None = None,
        fixed: Mapping[str, Tensor] | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__(net, likelihood, mean, variance, fixed)
        if not bool((self._spread >= 0).all()):
            raise ConfigurationError("variance holds numbers that are negative or NaN.")
        self.scale = check_number("scale", scale)
        self._columns = self._mean.new_empty(0, self._layout.size)
        if deviations is not None:
            check_kind("deviations", deviations, Mapping, "a mapping of names to tensors")
            for tensor in deviations.values():
                check_kind("deviations", tensor, Tensor, "a mapping of names to tensors")
        if deviations:
            rows = [in_network_order(net, row, "deviations") for row in unstack(deviations)]
            if len(rows) < 2 or list(rows[0]) != self._layout.names:
                raise ConfigurationError(
                    f"A covariance needs at least 2 deviations of all of {self._layout.names[:3]}, "
                    f"...; got {len(rows)} of {list(deviations)[:3]}. Leave deviations= out for "
                    "the diagonal alone."
                )
            self._columns = torch.stack([self._layout.flatten(row) for row in rows])  # (R, P)

    @classmethod
    def from_covariance(
        cls,
        net: nn.Module,
        likelihood: Likelihood,
        mean: Mapping[str, Tensor],
        variance: Mapping[str, Tensor],
        columns: Mapping[str, Tensor],
        fixed: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """The Gaussian whose covariance is diag(variance) + Σ c cᵀ over the columns c, no halves.

        Args:
            net: The network.
            likelihood: How outputs of the network give targets.
            mean: The means of the Bayesian weights, by name.
            variance: What each has of its own.
            columns: At least one column, each tensor with a leading axis of them.
            fixed: Other parameters and buffers.

        Example:
            >>> from lightning_bnn.likelihoods import Gaussian
            >>> net = nn.Linear(1, 1, bias=False)
            >>> one = {"weight": torch.ones(1, 1)}
            >>> LowRankPosterior.from_covariance(
            ...     net, Gaussian(0.1), one, one, {"weight": torch.full((1, 1, 1), 2.0)}
            ... ).moments().variance
            {'weight': tensor([[5.]])}
        """
        rank = len(next(iter(columns.values())))
        room = max(rank, 2)  # a column of zeros changes nothing
        deviations = {
            name: torch.cat([tensor, tensor.new_zeros(room - rank, *tensor.shape[1:])])
            * math.sqrt(2 * (room - 1))
            for name, tensor in columns.items()
        }
        double = {name: 2 * tensor for name, tensor in variance.items()}
        return cls(net, likelihood, mean, double, deviations, fixed)

    @property
    def variance(self) -> Weights:
        """The variances of the diagonal part, by name, before the half and the scale."""
        return self._layout.views(self._spread)

    @property
    def deviations(self) -> Weights:
        """The deviations, by name, with a leading axis of R; nothing if there are none."""
        return self._layout.views(self._columns) if self.rank else {}

    @property
    def rank(self) -> int:
        """R, the number of deviations."""
        return len(self._columns)

    @property
    def correlations(self) -> Correlations:
        """Known, if there are deviations."""
        return "known" if self.rank else "none"

    def covariance_matrix(self) -> Tensor:
        """The covariance of all weights that vary, (P, P), in float64."""
        diagonal = self._spread.double().cpu().diag()
        if not self.rank:
            return self.scale * diagonal
        columns = self._columns.double().cpu()
        return 0.5 * self.scale * (diagonal + columns.T @ columns / (self.rank - 1))

    def _sampler(self, generator: torch.Generator | None) -> Callable[[Tensor], Any]:
        half = 0.5 if self.rank else 1.0
        sd = (self._spread * (half * self.scale)).sqrt_()

        def fill(row: Tensor) -> None:
            row.normal_(generator=generator).mul_(sd).add_(self._mean)
            if self.rank:
                # one vector for all tensors: it is what ties the layers together
                z = row.new_empty(self.rank).normal_(generator=generator)
                row.addmv_(self._columns.T, z, alpha=math.sqrt(self.scale / (2 * self.rank - 2)))

        return fill

    def _variance(self) -> Tensor:
        variance = at_least_float32(self._spread)
        if self.rank:
            squares = torch.zeros_like(variance)
            for column in self._columns:  # no copy of all of them
                deviation = at_least_float32(column)
                squares.addcmul_(deviation, deviation)
            variance = 0.5 * variance + squares.mul_(0.5 / (self.rank - 1))
        return self.scale * variance
