"""The root mean squared error of the predictive mean."""

from __future__ import annotations

from torch import Tensor
from torchmetrics import MeanSquaredError

from lightning_bnn.predictive import Predictive
from lightning_bnn.predictive.base import reshape_targets

__all__ = ["RootMeanSquaredError"]


class RootMeanSquaredError(MeanSquaredError):
    """Root of the mean squared error of the mixture's mean over all outputs.

    Example:
        >>> import torch
        >>> from lightning_bnn.metrics import RootMeanSquaredError
        >>> from lightning_bnn.predictive import GaussianPredictive
        >>> metric = RootMeanSquaredError()
        >>> predictive = GaussianPredictive(torch.zeros(5, 2), torch.ones(()))
        >>> metric.update(predictive, torch.tensor([3.0, 4.0]))
        >>> metric.compute()  # sqrt(12.5)
        tensor(3.5355)
    """

    def __init__(self) -> None:
        super().__init__(squared=False)

    def update(self, predictive: Predictive, targets: Tensor) -> None:  # type: ignore[override]
        """Add the errors of a batch."""
        values = reshape_targets(targets, predictive.mean.shape).to(predictive.mean.dtype)
        super().update(predictive.mean.flatten(), values.flatten())
