"""The diagonal of the curvature: independent weights, whatever the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_bnn.curvature.base import Covariance, RowCurvature
from lightning_bnn.curvature.layers import side_by_side

__all__ = ["Diagonal", "DiagonalCovariance"]


class DiagonalCovariance(Covariance):
    """Independent weights, each with a standard deviation.

    Example:
        >>> from lightning_bnn.selection import FlatLayout
        >>> layout = FlatLayout({"w": torch.zeros(2)})
        >>> DiagonalCovariance(layout, {"sd": torch.tensor([1.0, 2.0])}).variance()
        tensor([1., 4.])
    """

    structure = "diagonal"
    layered = True

    def factors(self, layer: str) -> tuple[None, None, Tensor]:
        """The standard deviations of a layer, in no other basis."""
        return None, None, side_by_side(self.layout, self.tensors["sd"], layer)

    def deviation(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """A draw of N(0, Σ)."""
        sd = self.tensors["sd"]
        return torch.empty_like(sd).normal_(generator=generator).mul_(sd)

    def variance(self) -> Tensor:
        """The squared standard deviations."""
        return self.tensors["sd"].square()

    def project(self, rows: Tensor) -> Tensor:
        """Rows times the standard deviations."""
        return rows * self.tensors["sd"]


class Diagonal(RowCurvature):
    """diag(H), the sum of squared gradients of each example and column.

    Example:
        >>> from lightning_bnn.curvature.linear import LinearisedNetwork
        >>> net = nn.Linear(1, 1, bias=False).eval()
        >>> curvature = Diagonal(net, dict(net.named_parameters()))
        >>> linear = LinearisedNetwork(net, dict(net.named_parameters()), {})
        >>> curvature.add(linear, torch.tensor([[2.0], [3.0]]), [torch.ones(2, 1)])
        >>> curvature.diagonal()
        tensor([13.], dtype=torch.float64)
    """

    covariance_type = DiagonalCovariance

    def __init__(
        self, net: nn.Module, weights: Mapping[str, Tensor], rank: int | None = None
    ) -> None:
        super().__init__(net, weights, rank)
        self.squares = torch.zeros(self.layout.size, dtype=self.dtype, device=self.device)

    @classmethod
    def check(cls, net: nn.Module, names: Sequence[str], rank: int | None = None) -> int:
        """Some vectors of the size of the weights."""
        return 4 * 8 * sum(net.get_parameter(name).numel() for name in names)

    def add_rows(self, rows: Tensor) -> None:
        """Add the squares."""
        self.squares += rows.square().sum(0)

    def sums(self) -> list[Tensor]:
        """The squares."""
        return [self.squares]

    def scale(self, factor: float) -> None:
        """Multiply H by a number."""
        self.squares *= factor

    def diagonal(self) -> Tensor:
        """The diagonal of H."""
        return self.squares

    def spectrum(self, precisions: Sequence[float]) -> Tensor:
        """The ratios of H to P."""
        return self.squares / self.spread(precisions)

    def covariance(self, precisions: Sequence[float]) -> DiagonalCovariance:
        """1 / (H + P)."""
        sd = (self.squares + self.spread(precisions)).rsqrt()
        return DiagonalCovariance(self.layout, {"sd": sd})
