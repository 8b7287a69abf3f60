"""The mean of a score over everything seen: what most metrics of a predictive are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_bnn.predictive import Predictive

__all__ = ["MeanScore"]

Kind = TypeVar("Kind", bound=Predictive)


class MeanScore(Metric, ABC, Generic[Kind]):
    """Mean of a score of a predictive; a subclass says which score.

    The states are two sums, so that batches and processes of different sizes weigh right.

    Example:
        >>> import torch
        >>> from lightning_bnn.metrics import MeanScore
        >>> from lightning_bnn.predictive import GaussianPredictive
        >>> class AbsoluteError(MeanScore):
        ...     def score(self, predictive, targets):
        ...         return (predictive.mean - targets).abs()
        >>> metric = AbsoluteError()
        >>> metric.update(GaussianPredictive(torch.zeros(4, 2), torch.ones(())), torch.ones(2))
        >>> metric.compute()
        tensor(1.)
    """

    is_differentiable: bool | None = False
    full_state_update: bool | None = False

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    @abstractmethod
    def score(self, predictive: Kind, targets: Tensor) -> Tensor:
        """The scores of a batch, as a tensor of any shape; each entry weighs the same."""

    def update(self, predictive: Kind, targets: Tensor) -> None:
        """Add the scores of a batch.

        Args:
            predictive: The predictive of the batch.
            targets: Its targets, in the shape that the data loader gives them.
        """
        score = self.score(predictive, targets)
        self.total += score.sum()
        self.count += score.numel()

    def compute(self) -> Tensor:
        """The mean of all scores so far."""
        return self.total / self.count
