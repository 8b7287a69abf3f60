"""The fraction of targets that the most probable class gets right."""

from __future__ import annotations

from torch import Tensor

from lightning_bnn.metrics.mean_score import MeanScore
from lightning_bnn.predictive import ClassPredictive

__all__ = ["Accuracy"]


class Accuracy(MeanScore[ClassPredictive]):
    """Fraction of targets (examples, positions or labels) equal to the most probable class.

    It is what torchmetrics calls micro accuracy, without having to know the number of classes
    before the first batch.

    Example:
        >>> import torch
        >>> from lightning_bnn.metrics import Accuracy
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> metric = Accuracy()
        >>> logits = torch.tensor([[[2.0, 0.0], [2.0, 0.0]]])  # one draw, two examples
        >>> metric.update(CategoricalPredictive(logits), torch.tensor([0, 1]))
        >>> metric.compute()
        tensor(0.5000)
    """

    higher_is_better: bool | None = True

    def score(self, predictive: ClassPredictive, targets: Tensor) -> Tensor:
        """1 where the most probable class came, else 0."""
        return predictive.hits(targets)
