r"""Scales of priors that are inferred: groups of weights under one precision, integrated out.

The d weights of a group have :math:`w_j \sim N(m_j, 1/(\tau f_j))` with known
:math:`f_j` (the fan-in, or 1) and :math:`\tau \sim \mathrm{Gamma}(a, \mathrm{rate}\ b)`. With
:math:`s = \sum_j f_j (w_j - m_j)^2` and :math:`k = a + d/2`,

.. math::
    -\log p(w) = k\,\log(b + s/2) + \log\Gamma(a) - a\log b - \log\Gamma(k)
        + \tfrac d2\log 2\pi - \tfrac12\sum_j\log f_j,

whose gradient is :math:`\mathbb{E}[\tau\mid w]\,f_j (w_j - m_j)` with
:math:`\mathbb{E}[\tau\mid w] = k/(b + s/2)`. So nothing has to be alternated or kept:

* point estimates: descent on it is EM with an E step in every step;
* sampling: chains on it sample the marginal posterior of the weights, and to any draw of them
  :math:`\tau\mid w \sim \mathrm{Gamma}(k, b + s/2)` is a draw of the joint posterior;
* variational inference: with :math:`\mathbb{E}_q[s]` in the place of s it is the bound's term of
  weights and τ for q(τ) at its optimum :math:`\mathrm{Gamma}(k, b + \mathbb{E}_q[s]/2)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Group", "GroupScales"]

_LOG_TWO_PI = math.log(2 * math.pi)


@dataclass
class Group:
    """Tensors that share one learned scale.

    Args:
        name: What the scale is called.
        shape: a of the Gamma prior of τ.
        rate: b of it.
        tensors: The place of each tensor among all that have a learned scale.
    """

    name: str
    shape: float
    rate: float
    tensors: list[int] = field(default_factory=list)


class GroupScales:
    """The learned scales of a flat vector of weights.

    Args:
        groups: The groups of tensors.
        sizes: How many weights each tensor has.
        fans: f of each tensor.

    Attributes:
        power: What the density is raised to where a temperature says so; 1 by default.

    Example:
        >>> scales = GroupScales([Group("w", 1.0, 0.5, [0])], sizes=[2], fans=[1.0])
        >>> squares = torch.tensor([9.0])                     # of the two weights, summed
        >>> scales.expected_precisions(squares)               # (1 + 2/2) / (0.5 + 9/2)
        tensor([0.4000])
    """

    def __init__(
        self, groups: Sequence[Group], sizes: Sequence[int], fans: Sequence[float]
    ) -> None:
        self.groups, self.sizes, self.fans = list(groups), list(sizes), list(fans)
        self.power = 1.0
        owner = {tensor: g for g, group in enumerate(groups) for tensor in group.tensors}
        self._owner = [owner[tensor] for tensor in range(len(self.sizes))]

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def names(self) -> list[str]:
        """What the scales are called."""
        return [group.name for group in self.groups]

    def energy(self, squares: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """−log p(w) in nats, summed over the groups, with every τ integrated out.

        Args:
            squares: Σ (w − m)² of each tensor, (..., tensors).
            counts: How many weights of each tensor count; by default all.
        """
        counts = self.sizes if counts is None else counts
        shapes, rates = self._posterior(squares, counts)
        # log of a mean square and not of a sum: the numbers stay small against their rounding
        logs = torch.log(rates / rates.new_tensor(shapes)) * rates.new_tensor(shapes)
        return self.power * (logs.sum(-1) + self._constant(shapes, counts))

    def _constant(self, shapes: Sequence[float], counts: Sequence[int]) -> float:
        total = 0.0
        for group, shape in zip(self.groups, shapes, strict=True):
            total += shape * math.log(shape) - math.lgamma(shape)
            total += math.lgamma(group.shape) - group.shape * math.log(group.rate)
        for count, fan in zip(counts, self.fans, strict=True):
            total += 0.5 * count * (_LOG_TWO_PI - math.log(fan))
        return total

    def expected_precisions(self, squares: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """E[τ | w] of each group, (..., groups); arguments as for :meth:`energy`."""
        shapes, rates = self._posterior(squares, self.sizes if counts is None else counts)
        return rates.new_tensor(shapes) / rates

    def precisions(self, squares: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """E[τ | w]·f of each tensor, (..., tensors), to the power: how the gradient pulls."""
        expected = self.expected_precisions(squares, counts)
        if not self._one_each:
            expected = expected[..., self._owner]
        return expected * expected.new_tensor([self.power * fan for fan in self.fans])

    def draw_precisions(self, squares: Tensor, generator: torch.Generator) -> Tensor:
        """A draw of each τ from its conditional given the weights, (..., groups)."""
        shapes, rates = self._posterior(squares.double(), self.sizes)
        shape = rates.new_tensor(shapes).expand_as(rates).contiguous()
        return torch._standard_gamma(shape, generator=generator) / rates

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws of τ·f of each tensor from the prior, (count, tensors), in float64."""
        shape = torch.tensor([[g.shape for g in self.groups]] * count, dtype=torch.float64)
        drawn = torch._standard_gamma(shape.to(generator.device), generator=generator)
        drawn = drawn / drawn.new_tensor([group.rate for group in self.groups])
        return drawn[:, self._owner] * drawn.new_tensor(self.fans)

    def _posterior(self, squares: Tensor, counts: Sequence[int]) -> tuple[list[float], Tensor]:
        """Shape and rate of the conditional of each τ."""
        shapes = [
            group.shape + 0.5 * sum(counts[t] for t in group.tensors) for group in self.groups
        ]
        squares = squares * squares.new_tensor(self.fans)
        if not self._one_each:
            index = torch.tensor(self._owner, device=squares.device)
            empty = squares.new_zeros(*squares.shape[:-1], len(self.groups))
            squares = empty.index_add(-1, index, squares)
        return shapes, 0.5 * squares + squares.new_tensor([group.rate for group in self.groups])

    @property
    def _one_each(self) -> bool:
        return len(self.groups) == len(self.sizes)
