"""Scores of predictives, averaged over everything seen, and the collections of each task.

Each class is a thin metric over a method of the predictive, which knows the shape of its targets.
The score of Brier is from Brier (1950), the continuous ranked probability score from Matheson and
Winkler (1976).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_bnn.checks import check_probability
from lightning_bnn.metrics.calibration import ExpectedCalibrationError
from lightning_bnn.mixtures import ClassPredictive, OrderedPredictive, Predictive

__all__ = [
    "Accuracy",
    "BrierScore",
    "ContinuousRankedProbabilityScore",
    "IntervalCoverage",
    "MeanScore",
    "NegativeLogLikelihood",
    "RootMeanSquaredError",
    "classification_metrics",
    "regression_metrics",
]

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
        """1 where the most probable class is the observed one, else 0."""
        return predictive.hits(targets)


class BrierScore(MeanScore[ClassPredictive]):
    """Mean squared distance from the stated probabilities to what was observed; 0 is best.

    For K classes it sums over the classes and lies in [0, 2]; for yes-or-no labels it is the
    squared error of the probability of a 1, in [0, 1].

    Example:
        >>> import torch
        >>> from lightning_bnn.metrics import BrierScore
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> metric = BrierScore()
        >>> metric.update(CategoricalPredictive(torch.zeros(1, 3, 2)), torch.tensor([0, 1, 1]))
        >>> metric.compute()
        tensor(0.5000)
    """

    higher_is_better: bool | None = False

    def score(self, predictive: ClassPredictive, targets: Tensor) -> Tensor:
        """Brier's score of each target."""
        return predictive.brier(targets)


class NegativeLogLikelihood(MeanScore[Predictive]):
    r"""Mean over examples of :math:`-\log \frac1S \sum_s p(y | x, w_s)`, in nats.

    The density is that of all outputs of an example together, and of the mixture: the mean of the
    draws' own losses would be larger.

    Example:
        >>> import torch
        >>> from lightning_bnn.metrics import NegativeLogLikelihood
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> metric = NegativeLogLikelihood()
        >>> metric.update(CategoricalPredictive(torch.zeros(3, 2, 2)), torch.tensor([0, 1]))
        >>> metric.compute()  # log 2
        tensor(0.6931)
    """

    higher_is_better: bool | None = False

    def score(self, predictive: Predictive, targets: Tensor) -> Tensor:
        """Negative log density of each example that has a target."""
        score, labelled = -predictive.log_prob(targets), predictive.labelled(targets)
        return score if labelled is None else score[labelled]


class ContinuousRankedProbabilityScore(MeanScore[OrderedPredictive]):
    r"""Mean of :math:`\int (F(z) - 1[z \ge y])^2 dz` over all outputs.

    It is in the unit of the targets, 0 is best, and for a point prediction it is the absolute
    error. For counts F is a step function, and the integral the sum of the ranked probability
    score.

    Example:
        >>> import torch
        >>> from lightning_bnn.metrics import ContinuousRankedProbabilityScore
        >>> from lightning_bnn.predictive import GaussianPredictive
        >>> metric = ContinuousRankedProbabilityScore()
        >>> predictive = GaussianPredictive(torch.zeros(1, 1), torch.ones(()))
        >>> metric.update(predictive, torch.zeros(1))
        >>> metric.compute()  # (sqrt(2) - 1) / sqrt(pi)
        tensor(0.2337)
    """

    higher_is_better: bool | None = False

    def score(self, predictive: OrderedPredictive, targets: Tensor) -> Tensor:
        """CRPS of each output."""
        return predictive.crps(targets)


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
        check_probability("level", level)
        self.level = level

    def score(self, predictive: OrderedPredictive, targets: Tensor) -> Tensor:
        """1 where the interval holds the target, else 0."""
        return predictive.covers(targets, self.level)


class RootMeanSquaredError(MeanScore[OrderedPredictive]):
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

    higher_is_better: bool | None = False

    def score(self, predictive: OrderedPredictive, targets: Tensor) -> Tensor:
        """Squared error of each output."""
        return (predictive.mean - predictive.align(targets)).square()

    def compute(self) -> Tensor:
        """The root of the mean of all squared errors so far."""
        return super().compute().sqrt()


# compute_groups=False: torchmetrics would otherwise merge metrics whose states are equal after
# the first batch (a perfect one has nll = brier = 0) and report one for the other ever after.


def classification_metrics() -> MetricCollection:
    """Accuracy, nll, brier and ece.

    Example:
        >>> from lightning_bnn.metrics import classification_metrics
        >>> sorted(classification_metrics())
        ['accuracy', 'brier', 'ece', 'nll']
    """
    return MetricCollection(
        {
            "accuracy": Accuracy(),
            "nll": NegativeLogLikelihood(),
            "brier": BrierScore(),
            "ece": ExpectedCalibrationError(),
        },
        compute_groups=False,
    )


def regression_metrics() -> MetricCollection:
    """Rmse, nll, crps and the coverage of the central 90% interval, for numbers and counts.

    Example:
        >>> from lightning_bnn.metrics import regression_metrics
        >>> sorted(regression_metrics())
        ['coverage', 'crps', 'nll', 'rmse']
    """
    return MetricCollection(
        {
            "rmse": RootMeanSquaredError(),
            "nll": NegativeLogLikelihood(),
            "crps": ContinuousRankedProbabilityScore(),
            "coverage": IntervalCoverage(0.9),
        },
        compute_groups=False,
    )
