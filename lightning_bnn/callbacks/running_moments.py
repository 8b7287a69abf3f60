r"""The running moments of snapshots: mean, second central moment, the last deviations.

Snapshot :math:`w_n` of the weights changes the mean m and the sum of squares S by Welford's rule,

.. math::
    \delta = w_n - m_{n-1}, \qquad m_n = m_{n-1} + \delta / n, \qquad
    S_n = S_{n-1} + \delta\,(w_n - m_n),

which loses no digits where the mean is large beside the spread. The variance is S/n. Deviation n is
:math:`w_n - m_n`, from the mean as it was then, so that of the first snapshot is zero. (Welford,
1962, *Note on a Method for Calculating Corrected Sums of Squares and Products*.)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

__all__ = ["RunningMoments"]


@dataclass(frozen=True)
class RunningMoments:
    """Moments of n snapshots; never changed in place, so that a checkpoint can hold them.

    Args:
        count: n, the number of snapshots.
        mean: Their mean, of any shape.
        squares: The sum of squares about the mean.
        deviations: The last deviations, oldest first.

    Example:
        >>> moments = RunningMoments.of(torch.tensor([1.0]), rank=2)
        >>> for value in (2.0, 6.0):
        ...     moments = moments.add(torch.tensor([value]), rank=2)
        >>> moments.mean, moments.variance
        (tensor([3.]), tensor([4.6667]))
        >>> moments.deviations
        [tensor([0.5000]), tensor([3.])]
    """

    count: int
    mean: Tensor
    squares: Tensor
    deviations: list[Tensor]

    @classmethod
    def of(cls, first: Tensor, rank: int) -> RunningMoments:
        """The moments of one snapshot."""
        zero = torch.zeros_like(first)
        return cls(1, first.clone(), zero, [zero][:rank])

    def add(self, snapshot: Tensor, rank: int) -> RunningMoments:
        """The moments with one more snapshot, and its deviation among the last ``rank``."""
        count = self.count + 1
        delta = snapshot - self.mean
        mean = self.mean + delta / count
        deviation = snapshot - mean
        squares = self.squares + delta * deviation
        kept = [*self.deviations, deviation][-rank:] if rank else []
        return RunningMoments(count, mean, squares, kept)

    @property
    def variance(self) -> Tensor:
        """The mean square about the mean."""
        return self.squares / self.count

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values and tensors.

        Example:
            >>> moments = RunningMoments.of(torch.ones(1), rank=1)
            >>> RunningMoments(**moments.state_dict()).count
            1
        """
        return {field.name: getattr(self, field.name) for field in fields(self)}
