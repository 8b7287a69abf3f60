r"""The matrix normal family: a covariance for the rows and one for the columns of each weight.

A weight matrix W, (out, in), is drawn as :math:`W = M + A\,E\,B^\top` with E standard normal and
lower triangular A, B (:mod:`lightning_bnn.families.cholesky`), so that
:math:`\mathrm{Cov}(\mathrm{vec}\,W) = AA^\top \otimes BB^\top`, and

.. math::
    \tfrac12\log\det\Sigma = \text{in}\sum\log A_{ii} + \text{out}\sum\log B_{jj}, \qquad
    \mathrm{Var}\,W_{ij} = (AA^\top)_{ii}\,(BB^\top)_{jj}.

Weights of convolutions and other tensors are matrices of their first axis by all others. Vectors
(biases, normalisation) have independent weights, and so have the rows or the columns along a side
that is too long. Different tensors are independent. It is exact where the posterior is a Kronecker
product, as in linear regression of several outputs on the same inputs. (Louizos and Welling, 2016,
*Structured and Efficient Variational Deep Learning with Matrix Gaussian Posteriors*; Sun et al.,
2017, *Learning Structured Weight Uncertainty in Bayesian Neural Networks*.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.checks import check_whole
from lightning_bnn.curvature.base import check_room
from lightning_bnn.families.cholesky import CholeskyFactor
from lightning_bnn.families.gaussian import GaussianFamily
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import MatrixNormalPosterior
from lightning_bnn.posteriors.matrices import as_matrix, matrix_shape

__all__ = ["Kronecker"]

_COPIES = 2  # below the diagonal: the factor, its gradient and Adam's two moments, half of each


class Kronecker(GaussianFamily):
    """A matrix normal distribution for each weight matrix.

    Args:
        longest: A side of a matrix that is longer has no covariances along it, only scales: its
            factor would have half of the square of its length in numbers.

    Example:
        >>> family = Kronecker().bind({"w": torch.zeros(2, 3), "b": torch.zeros(2)}, 0.5)
        >>> [factor.root().shape for factor in (family.rows[0], family.columns[0])]
        [torch.Size([2, 2]), torch.Size([3, 3])]
        >>> family.sd().detach()
        tensor([0.5000, 0.5000, 0.5000, 0.5000, 0.5000, 0.5000, 0.5000, 0.5000])
    """

    def __init__(self, longest: int = 1024) -> None:
        super().__init__()
        self.longest = check_whole("longest", longest, 1)

    def setup(self, flat: Tensor, initial_scale: float) -> None:
        """Make μ and the factors of each tensor."""
        sides = [n for shape in self.layout.shapes if len(shape) > 1 for n in matrix_shape(shape)]
        sides = [side for side in sides if side <= self.longest]
        check_room(
            f"Kronecker(longest={self.longest}), of up to {max(sides, default=0):,} rows,",
            _COPIES * sum(side**2 for side in sides) * flat.element_size(), flat.device,
            "Pass a smaller longest=, or family=LowRank(10).",
        )  # fmt: skip
        self.mean = nn.Parameter(flat.clone())
        self._first = initial_scale
        self.rows, self.columns = nn.ModuleList(), nn.ModuleList()
        for shape in self.layout.shapes:
            for factors, side, sd in zip(
                (self.rows, self.columns), matrix_shape(shape), (initial_scale, 1.0), strict=True
            ):
                correlated = len(shape) > 1 and 1 < side <= self.longest
                factors.append(CholeskyFactor(side, sd, flat, correlated))

    @torch.no_grad()
    def begin(self, initial_scale: float) -> None:
        """Begin with another standard deviation, if the factors are what q was made with."""
        pairs = self._pairs()
        if all(row.begins(self._first) and column.begins(1.0) for _, row, column in pairs):
            self._first = initial_scale
            for _, row, _ in pairs:
                row.rho.fill_(math.log(initial_scale))

    def _pairs(self) -> list[tuple[str, Any, Any]]:
        """The name of each tensor, with the factors of its rows and of its columns."""
        return list(zip(self.layout.names, self.rows, self.columns, strict=True))

    def rsample(self, noise: Tensor) -> Tensor:
        """M + A E Bᵀ of each tensor."""
        views = self.layout.views(noise)
        steps = [
            row.times(column.times(as_matrix(views[name]).T).T).reshape(-1)
            for name, row, column in self._pairs()
        ]
        return self.mean + torch.cat(steps)

    def sd(self) -> Tensor:
        """The flat vector of standard deviations: products of those of rows and of columns."""
        return torch.cat([torch.outer(a.sd(), b.sd()).flatten() for _, a, b in self._pairs()])

    def log_volume(self) -> Tensor:
        """½ log det Σ: each row's scale counts once for each column, and the reverse."""
        parts = [b.size * a.rho.sum() + a.size * b.rho.sum() for _, a, b in self._pairs()]
        return torch.stack(parts).sum()

    @torch.no_grad()
    def widen(self, factors: Tensor) -> None:
        """Multiply the scales of rows and columns by what fits the factors best."""
        for (_, row, column), view in zip(
            self._pairs(), self.layout.views(factors.log()).values(), strict=True
        ):
            logs = as_matrix(view)
            row.rho.add_(logs.mean(1) - logs.mean() / 2)
            column.rho.add_(logs.mean(0) - logs.mean() / 2)

    @torch.no_grad()
    def posterior(
        self, net: nn.Module, likelihood: Likelihood, fixed: Mapping[str, Tensor]
    ) -> MatrixNormalPosterior:
        """The matrix normals as they stand."""
        factors = {
            f"{name}.{side}": factor.root() / factor.sd()[:, None]
            for name, *both in self._pairs()
            for side, factor in zip(("rows", "columns"), both, strict=True)
            if factor.lower is not None
        }
        mean, sd = self.layout.views(self.mean), self.layout.views(self.sd())
        return MatrixNormalPosterior(net, likelihood, mean, sd, factors, fixed)
