"""The diagonal of the curvature: independent weights, whatever the network.

The gradient of a linear or convolutional layer is Σ b aᵀ over its places
(:mod:`lightning_bnn.curvature.layers`). At one place its square is b² (a²)ᵀ, so that a batch needs
one product of matrices for all columns. Other layers get the gradient of each example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.curvature.base import Covariance, RowCurvature
from lightning_bnn.curvature.layers import scatter, side_by_side
from lightning_bnn.curvature.linear import LinearisedNetwork

__all__ = ["Diagonal", "DiagonalCovariance"]

_NUMBERS = 2**25  # that are held at a time


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

    def add(self, linear: LinearisedNetwork, inputs: Any, columns: Iterable[Tensor]) -> None:
        """Add what a batch has, layer by layer if that can be."""
        run = linear.recorded_if_plain(linear.prepared(inputs))
        if run is None:
            super().add(linear, inputs, columns)
            return
        squares: dict[str, Tensor] = {}  # of b, or of the gradient where there are several places
        for column in columns:
            for layer, gradients in run.gradients(column).items():
                activations = run.inputs_of[layer]
                if activations.shape[1] == 1:
                    new = gradients[:, 0].square()
                else:
                    new = _sum_of_squares(gradients, activations)
                squares[layer] = squares[layer].add_(new) if layer in squares else new
        flat = torch.zeros_like(self.squares)
        for layer, activations in run.inputs_of.items():
            joined = squares[layer]
            if activations.shape[1] == 1:
                joined = joined.T @ activations[:, 0].square()
            scatter(self.layout, flat, layer, joined)
        self.squares += flat

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


def _sum_of_squares(gradients: Tensor, activations: Tensor) -> Tensor:
    """Of a layer's gradient of each example, summed over examples, (outputs, features)."""
    total = gradients.new_empty(gradients.shape[-1], activations.shape[-1])
    step = max(1, _NUMBERS // (len(gradients) * activations.shape[-1]))
    for start in range(0, len(total), step):
        some = slice(start, start + step)
        total[some] = (gradients[..., some].mT @ activations).square().sum(0)
    return total
