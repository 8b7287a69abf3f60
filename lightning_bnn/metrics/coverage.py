"""How often the central intervals hold the target."""

from __future__ import annotations

from torch import Tensor

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.metrics.mean_score import MeanScore
from lightning_bnn.predictive import OrderedPredictive

__all__ = ["IntervalCoverage"]


class IntervalCoverage(MeanScore[OrderedPredictive]):
    """Fraction of outputs that lie in the central interval of the mixture.

    It should be near ``level``: below it the predictions are too sure, above it too cautious.

    Args:
        level: The probability that the interval holds.

    Example:
        >>> import torch
        >>> from lightning_bnn.metrics import IntervalCoverage
        >>> from lightning_bnn.predictive import GaussianPredictive
        >>> metric = IntervalCoverage(level=0.9)  # here the interval is [-1.645, 1.645]
        >>> predictive = GaussianPredictive(torch.zeros(1, 4), torch.ones(()))
        >>> metric.update(predictive, torch.tensor([-1.7, -1.6, 0.0, 1.6]))
        >>> metric.compute()
        tensor(0.7500)
    """

    higher_is_better: bool | None = None

    def __init__(self, level: float = 0.9) -> None:
        super().__init__()
        if not 0 < level < 1:
            raise ConfigurationError(
                f"expected level strictly between 0 and 1, got {level}. For 90 percent pass 0.9."
            )
        self.level = level

    def score(self, predictive: OrderedPredictive, targets: Tensor) -> Tensor:
        """1 where the interval holds the target, else 0."""
        return predictive.covers(targets, self.level)
