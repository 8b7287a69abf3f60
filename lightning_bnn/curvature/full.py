"""The whole curvature matrix: all covariances, for some thousands of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_bnn.coupling import Coupling
from lightning_bnn.curvature.base import Covariance, RowCurvature

__all__ = ["Full", "FullCovariance"]

_BAND = 512  # rows of the matrix


class FullCovariance(Covariance):
    """A covariance Σ = S Sᵀ, by S.

    Example:
        >>> from lightning_bnn.selection import FlatLayout
        >>> layout = FlatLayout({"w": torch.zeros(2)})
        >>> root = torch.tensor([[1.0, 1.0], [0.0, 2.0]])
        >>> FullCovariance(layout, {"root": root}).variance()
        tensor([2., 4.])
    """

    structure = "full"

    def deviation(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """A draw of N(0, Σ)."""
        root = self.tensors["root"]
        return root @ root.new_empty(root.shape[1]).normal_(generator=generator)

    def variance(self) -> Tensor:
        """The sums of squares of the rows of S."""
        return self.tensors["root"].square().sum(1)

    def project(self, rows: Tensor) -> Tensor:
        """Rows times S."""
        return rows @ self.tensors["root"]


class Full(RowCurvature):
    """H as a matrix.

    Example:
        >>> from lightning_bnn.curvature.linear import LinearisedNetwork
        >>> net = nn.Linear(2, 1, bias=False).eval()
        >>> curvature = Full(net, dict(net.named_parameters()))
        >>> linear = LinearisedNetwork(net, dict(net.named_parameters()), {})
        >>> curvature.add(linear, torch.tensor([[2.0, 3.0]]), [torch.ones(1, 1)])
        >>> curvature.matrix
        tensor([[4., 6.],
                [6., 9.]], dtype=torch.float64)
    """

    covariance_type = FullCovariance

    def __init__(
        self, net: nn.Module, weights: Mapping[str, Tensor], rank: int | None = None
    ) -> None:
        super().__init__(net, weights, rank)
        size = self.layout.size
        # of which only what is on and under the diagonal is summed and read
        self._lower = torch.zeros(size, size, dtype=self.dtype, device=self.device)
        self._constant = 0.0  # of a prior whose P is a matrix, ½ log(det diag P / det P)

    @property
    def matrix(self) -> Tensor:
        """H, (P, P)."""
        return self._lower.tril() + self._lower.tril(-1).T

    @classmethod
    def check(cls, net: nn.Module, names: Sequence[str], rank: int | None = None) -> int:
        """H, its factor, the factor's inverse, and room to compute them."""
        return 4 * 8 * sum(net.get_parameter(name).numel() for name in names) ** 2

    def set_prior(self, own: Tensor, coupling: Coupling | None) -> None:
        """H gets what couples weights, so that it is in all that is made of H + P."""
        super().set_prior(own, coupling)
        if coupling is not None:
            at = coupling.places
            self._lower[at[:, None], at] += coupling.matrix.to(self._lower)
            self._constant = float(coupling.constant)

    def add_rows(self, rows: Tensor) -> None:
        """Add the outer products, band by band, which is nearly half of the work for all."""
        rows = rows.to(self.dtype)
        for start in range(0, self.layout.size, _BAND):
            stop = start + _BAND
            self._lower[start:stop, :stop].addmm_(rows[:, start:stop].T, rows[:, :stop])

    def sums(self) -> list[Tensor]:
        """The matrix."""
        return [self._lower]

    def scale(self, factor: float) -> None:
        """Multiply H by a number."""
        self._lower *= factor

    def diagonal(self) -> Tensor:
        """The diagonal of H."""
        return self._lower.diagonal()

    def spectrum(self, precisions: Sequence[float]) -> Tensor:
        """The eigenvalues of P^(-1/2) H P^(-1/2)."""
        root = self.spread(precisions).rsqrt()
        return torch.linalg.eigvalsh(root[:, None] * self._lower * root).clamp(min=0)

    def log_determinant(self, precisions: Sequence[float]) -> float:
        """By a Cholesky factor, which is cheaper than the spectrum."""
        lower = self._factor(precisions)[1]
        return 2 * (float(lower.diagonal().log().sum()) + self._constant)

    def covariance(self, precisions: Sequence[float]) -> FullCovariance:
        """The inverse of H + P, by the inverse of its Cholesky factor."""
        root, lower = self._factor(precisions)
        inverse = torch.linalg.solve_triangular(
            lower.T, torch.diag(torch.ones_like(root)), upper=True
        )
        return FullCovariance(self.layout, {"root": root[:, None] * inverse})

    def _factor(self, precisions: Sequence[float]) -> tuple[Tensor, Tensor]:
        """P^(-1/2), and the Cholesky factor of P^(-1/2) H P^(-1/2) + 1, which is at least 1."""
        root = self.spread(precisions).rsqrt()
        scaled = root[:, None] * self._lower * root
        scaled.diagonal().add_(1)
        return root, torch.linalg.cholesky(scaled)
