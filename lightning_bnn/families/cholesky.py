r"""A lower triangular factor L of a covariance, as a module, in units of its own scales.

.. math::
    L = \mathrm{diag}(e^\rho)\,(I + M/\sqrt n), \qquad M \text{ strictly lower triangular},

so :math:`\tfrac12\log\det LL^\top = \sum\rho` whatever M is, and a step of Adam, which is as long
in every parameter, changes all standard deviations by about as much as that of a mean field does: M
moves each row of L by its rate, relative to the diagonal, however many columns there are.

Only what lies below the diagonal is a parameter, as a rectangle: a short row of M and, backwards,
the long row that fills it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CholeskyFactor"]


class CholeskyFactor(nn.Module):
    """L of a covariance L Lᵀ, which begins as a multiple of the identity.

    Args:
        size: The number of rows.
        sd: What the diagonal begins with.
        like: A tensor of the kind of the parameters.
        correlated: Whether M is there; without it L is diagonal.

    Example:
        >>> factor = CholeskyFactor(3, 0.5, torch.zeros(1))
        >>> factor.root().diagonal().tolist(), factor.sd().tolist(), factor.lower.shape
        ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5], torch.Size([1, 3]))
    """

    lower: Tensor | None

    def __init__(self, size: int, sd: float, like: Tensor, correlated: bool = True) -> None:
        super().__init__()
        self.size = size
        self.rho = nn.Parameter(like.new_full((size,), math.log(sd)))
        empty = like.new_zeros(size // 2, size - 1 + size % 2) if correlated else None
        self.lower = None if empty is None else nn.Parameter(empty)

    def relative(self) -> Tensor | None:
        """M/√n, differentiable, if there is an M."""
        if self.lower is None:
            return None
        odd = self.size % 2
        short, long = self.lower.tril(odd - 1), self.lower.triu(odd).flip(0, 1)
        rows = torch.cat([long.new_zeros(odd, long.shape[1]), short, long])
        return F.pad(rows, (0, 1 - odd)) / math.sqrt(self.size)

    def times(self, matrix: Tensor) -> Tensor:
        """L times a matrix of as many rows."""
        relative = self.relative()
        mixed = matrix if relative is None else matrix + relative @ matrix
        return self.rho.exp()[:, None] * mixed

    def root(self) -> Tensor:
        """L, differentiable."""
        return self.times(torch.eye(self.size, dtype=self.rho.dtype, device=self.rho.device))

    def sd(self) -> Tensor:
        """The square roots of the diagonal of L Lᵀ, differentiable."""
        relative, scales = self.relative(), self.rho.exp()
        return scales if relative is None else scales * (1 + relative.square().sum(1)).sqrt()

    def begins(self, sd: float) -> bool:
        """Whether it is as it was made with this ``sd``."""
        first = torch.full_like(self.rho, math.log(sd))
        return torch.equal(self.rho, first) and (self.lower is None or not bool(self.lower.any()))
