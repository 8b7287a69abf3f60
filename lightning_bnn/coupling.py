r"""What a Gaussian prior with correlations adds to one of independent weights.

With a precision matrix Λ = diag(Λ) + B the energy of flat weights is that of independent weights of
the precisions :math:`\Lambda_{jj}` (those of each weight given all others), and

.. math::
    \tfrac12 (w-m)^\top B\,(w-m)
        + \tfrac12\Big(\sum_j \log\Lambda_{jj} - \log\det\Lambda\Big),

whose gradient is :math:`B(w-m)`. Its expectation under q has the terms of the mean of q, and
:math:`\tfrac12\mathrm{tr}(B\,\mathrm{Cov}_q)`. This is 0 where weights of q are independent;
else it is estimated, without bias, by :math:`\tfrac12\delta^\top B\,\delta` at the step δ of a
draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Coupling"]


class Coupling(nn.Module):
    """The off-diagonal part B of precision matrices over some places of a flat vector.

    Args:
        blocks: For each matrix the places of its weights, (n,), and the matrix, (n, n).
        like: A tensor of the kind of the buffers.

    Attributes:
        places: The places of all, (n,).
        matrix: B, (n, n).
        constant: The second term above.

    Example:
        >>> precision = torch.tensor([[2.0, 1.0], [1.0, 2.0]]).double()
        >>> coupling = Coupling([(torch.tensor([0, 2]), precision)], like=torch.zeros(1))
        >>> coupling.quadratic(torch.tensor([1.0, 5.0, 3.0]))
        tensor(3.)
    """

    same_on_all_ranks = True
    places: Tensor
    matrix: Tensor
    constant: Tensor

    def __init__(self, blocks: Sequence[tuple[Tensor, Tensor]], like: Tensor) -> None:
        super().__init__()
        whole = torch.block_diag(*(precision for _, precision in blocks))
        constant = 0.5 * (whole.diagonal().log().sum() - torch.logdet(whole))
        whole.diagonal().zero_()
        self.register_buffer("places", torch.cat([where for where, _ in blocks]).to(like.device))
        self.register_buffer("matrix", whole.to(like))
        self.register_buffer("constant", constant.to(like))

    def quadratic(self, centred: Tensor) -> Tensor:
        """½ (w − m)ᵀ B (w − m) over the last axis of w − m; leading axes stay."""
        some = centred[..., self.places].to(self.matrix.dtype)
        return 0.5 * (some * self._times(some)).sum(-1)

    def quadratic_within(self, centred: Tensor, groups: Tensor) -> Tensor:
        """The same of a flat w − m, (P,), with what B has between weights of one group, (P,)."""
        some, of = centred[self.places].to(self.matrix.dtype), groups[self.places]
        return 0.5 * (some @ (self.matrix * (of[:, None] == of)) @ some)

    def energy(self, centred: Tensor, power: float = 1.0) -> Tensor:
        """The whole term, of a density to a power that is normalised."""
        return power * self.quadratic(centred) + self.constant

    def add_gradient(self, gradient: Tensor, weight: Tensor, centred: Tensor) -> None:
        """Add ``weight`` times B(w − m), in place."""
        some = self._times(centred[..., self.places].to(self.matrix.dtype))
        gradient.index_add_(-1, self.places, (weight * some).to(gradient.dtype))

    def correlate(self, noise: Tensor, scales: Tensor, power: float = 1.0) -> Tensor:
        """Draws of N(0, Λ⁻¹) at the places, of standard normal ``noise`` (..., n).

        Args:
            noise: The noise.
            scales: 1/√Λ_jj of each weight, to the power, (n,).
            power: What the density is raised to.
        """
        precision = power * self.matrix.double() + scales.double().pow(-2).diag()
        lower = torch.linalg.cholesky(precision)
        rows = noise.double().reshape(-1, len(precision))
        drawn = torch.linalg.solve_triangular(lower.T, rows.T, upper=True).T
        return drawn.reshape(noise.shape).to(noise.dtype)

    def _times(self, some: Tensor) -> Tensor:
        """B times vectors one by one, so that a chain moves as it would alone."""
        if some.dim() == 1:
            return self.matrix @ some
        rows = [self.matrix @ row for row in some.flatten(0, -2)]
        return torch.stack(rows).view_as(some)
