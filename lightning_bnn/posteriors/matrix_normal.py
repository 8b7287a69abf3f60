r"""A matrix normal posterior: correlations among the rows and among the columns of each weight.

A weight matrix is :math:`W = M + S \odot (A\,E\,B^\top)` with standard normal E, standard
deviations S, and factors A, B whose rows have length 1: roots of the correlations of its rows and
of its columns. Where S is the product of a scale for each row and one for each column this is the
matrix normal distribution; a change of S, such as zeros where weights were pruned, leaves the
correlations of the others as they are. Tensors of other shapes are matrices of their first axis by
all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn.checks import check_tensors
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors.gaussian import GaussianPosterior
from lightning_bnn.posteriors.matrices import as_matrix, matrix_shape, places_left
from lightning_bnn.posteriors.weights import Change, Correlations, Weights, changed

__all__ = ["MatrixNormalPosterior"]

_SIDES = ("rows", "columns")


class MatrixNormalPosterior(GaussianPosterior):
    """Gaussians over the weights, correlated among the rows and the columns of each matrix.

    Args:
        net: The network; the posterior keeps a copy.
        likelihood: How outputs of the network give targets.
        mean: The means of the Bayesian weights, by name.
        sd: Their standard deviations.
        factors: Roots A, B of the correlations AAᵀ of the rows and BBᵀ of the columns of a weight,
            as ``"<its name>.rows"`` and ``"<its name>.columns"``; independent where left out.
        fixed: Other parameters and buffers; the network's own values serve for those left out.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> one = {"weight": torch.ones(2, 1)}
        >>> posterior = MatrixNormalPosterior(
        ...     nn.Linear(1, 2, bias=False), Gaussian(0.1), one, one,
        ...     {"weight.rows": torch.tensor([[1.0, 0.0], [1.0, 0.0]])})
        >>> draw = posterior.sample(1)["weight"].flatten()
        >>> bool(draw[0] == draw[1])
        True
    """

    kind = "matrix_normal"
    groups: ClassVar[tuple[str, ...]] = ("mean", "sd", "factors")

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        mean: Mapping[str, Tensor],
        sd: Mapping[str, Tensor],
        factors: Mapping[str, Tensor] | None = None,
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(net, likelihood, mean, sd, fixed)
        self.factors: Weights = {}
        sides = {
            f"{name}.{side}": length
            for name, tensor in self.mean.items()
            for side, length in zip(_SIDES, matrix_shape(tensor.shape), strict=True)
        }
        factors = {} if factors is None else factors
        check_tensors("factors", factors)
        for name, factor in factors.items():
            if factor.shape != (sides.get(name), sides.get(name)):
                raise ConfigurationError(
                    f"factors has {name!r} in the shape {list(factor.shape)}; expected square ones "
                    f"of the sides {dict(list(sides.items())[:4])}."
                )
            self.factors[name] = factor.detach().clone()

    @property
    def has_variance(self) -> bool:
        """Whether a weight varies."""
        return bool(self._spread.any())

    @property
    def correlations(self) -> Correlations:
        """Known, if there are factors."""
        return "known" if self.factors else "none"

    def covariance_matrix(self) -> Tensor:
        """The covariance of all weights that vary, (P, P), in float64."""
        blocks = []
        for name, sd in self.sd.items():
            sides = [
                _correlation(self.factors.get(f"{name}.{side}"), length)
                for side, length in zip(_SIDES, matrix_shape(sd.shape), strict=True)
            ]
            scale = sd.double().cpu().flatten()
            blocks.append(scale[:, None] * torch.kron(*sides) * scale)
        return torch.block_diag(*blocks)

    def _sampler(self, generator: torch.Generator | None) -> Callable[[Tensor], Any]:
        def fill(row: Tensor) -> None:
            row.normal_(generator=generator)
            for name, view in self._layout.views(row).items():
                rows, columns = (self.factors.get(f"{name}.{side}") for side in _SIDES)
                matrix = as_matrix(view).clone()  # a product's last bit depends on where it lies
                matrix = matrix if rows is None else rows @ matrix
                matrix = matrix if columns is None else matrix @ columns.T
                view.copy_(matrix.view_as(view))
            row.mul_(self._spread).add_(self._mean)

        return fill

    def map(self, change: Change, net: nn.Module | None = None) -> Self:
        """The same with mean and standard deviations changed, and what is left of the factors."""
        mean, sd, fixed = (changed(change, group) for group in (self.mean, self.sd, self.fixed))
        factors = self.factors
        if net is not None:
            left = {
                f"{name}.{side}": places
                for name, tensor in self.mean.items()
                for side, places in zip(
                    _SIDES, places_left(change, name, tensor.shape), strict=True
                )
            }
            factors = {name: _shrunk(factor, left[name]) for name, factor in factors.items()}
        made = type(self)(net or self.net, self.likelihood, mean, sd, factors, fixed)
        return made.made_from(self, net)


def _correlation(root: Tensor | None, length: int) -> Tensor:
    """What a root is of, in float64; of none, that of independent rows."""
    if root is None:
        return torch.eye(length, dtype=torch.float64)
    return root.double().cpu() @ root.double().cpu().T


def _shrunk(factor: Tensor, places: Tensor) -> Tensor:
    """A root of the correlations of what is left; rows of zeros where nothing is."""
    places = places.to(factor.device)
    if torch.equal(places, torch.arange(len(factor), device=factor.device)):
        return factor
    rows = torch.where(places[:, None] >= 0, factor[places.clamp(min=0)], 0)
    # rows = LQ, so LLᵀ is theirs; never is a product of them taken, which might not be positive
    return torch.linalg.qr(rows.T, mode="r").R.T.contiguous()
