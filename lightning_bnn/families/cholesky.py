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

    Example:
        >>> factor = CholeskyFactor(3, 0.5, torch.zeros(1))
        >>> factor.root().diagonal().tolist(), factor.sd().tolist(), factor.lower.shape
        ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5], torch.Size([1, 3]))
    """

    def __init__(self, size: int, sd: float, like: Tensor) -> None:
        super().__init__()
        self.size = size
        self.rho = nn.Parameter(like.new_full((size,), math.log(sd)))
        self.lower = nn.Parameter(like.new_zeros(size // 2, size - 1 + size % 2))

    def relative(self) -> Tensor:
        """M/√n, differentiable."""
        odd = self.size % 2
        short, long = self.lower.tril(odd - 1), self.lower.triu(odd).flip(0, 1)
        rows = torch.cat([long.new_zeros(odd, long.shape[1]), short, long])
        return F.pad(rows, (0, 1 - odd)) / math.sqrt(self.size)

    def root(self) -> Tensor:
        """L, differentiable."""
        scales = self.rho.exp()
        return scales[:, None] * self.relative() + torch.diag(scales)

    def sd(self) -> Tensor:
        """The square roots of the diagonal of L Lᵀ, differentiable."""
        return self.rho.exp() * (1 + self.relative().square().sum(1)).sqrt()

    def begins(self, sd: float) -> bool:
        """Whether it is as it was made with this ``sd``."""
        first = torch.full_like(self.rho, math.log(sd))
        return not bool(self.lower.any()) and torch.equal(self.rho, first)
