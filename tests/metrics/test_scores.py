"""The values of the metrics that average a score, against scikit-learn and direct NumPy."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, root_mean_squared_error

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.metrics import (
    Accuracy,
    BrierScore,
    ContinuousRankedProbabilityScore,
    IntervalCoverage,
    NegativeLogLikelihood,
    RootMeanSquaredError,
)
from lightning_bnn.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    PoissonPredictive,
)

DRAWS, CLASSES = 4, 3
SIZES = (50, 30, 1)  # batches of different sizes must weigh by their size


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(*positions: int) -> tuple[CategoricalPredictive, torch.Tensor]:
    targets = torch.randint(CLASSES, (81, *positions), generator=torch.Generator().manual_seed(1))
    return CategoricalPredictive(2 * randn(DRAWS, 81, CLASSES, *positions)), targets


def labels() -> tuple[BernoulliPredictive, torch.Tensor]:
    return BernoulliPredictive(2 * randn(DRAWS, 81, 2)), (randn(81, 2, seed=1) > 0).long()


def over_batches(metric, predictive, targets) -> float:
    start = 0
    for size in SIZES:
        piece = slice(start, start + size)
        metric.update(predictive[piece], targets[piece])
        start += size
    return metric.compute().item()


def test_classification_against_scikit_learn():
    predictive, targets = classes()
    mean = predictive.mean.numpy()
    accuracy = over_batches(Accuracy(), predictive, targets)
    assert accuracy == pytest.approx(accuracy_score(targets, mean.argmax(1)))
    nll = over_batches(NegativeLogLikelihood(), predictive, targets)
    assert nll == pytest.approx(log_loss(targets, mean, labels=range(CLASSES)), rel=1e-6)
    brier = over_batches(BrierScore(), predictive, targets)
    one_hot = np.eye(CLASSES)[targets]
    assert brier == pytest.approx(((mean - one_hot) ** 2).sum(1).mean(), rel=1e-6)


def test_labels_against_scikit_learn():
    predictive, targets = labels()
    mean, flat = predictive.mean.numpy().ravel(), targets.numpy().ravel()
    accuracy = over_batches(Accuracy(), predictive, targets)
    assert accuracy == pytest.approx(accuracy_score(flat, mean > 0.5))
    brier = over_batches(BrierScore(), predictive, targets)
    assert brier == pytest.approx(brier_score_loss(flat, mean), rel=1e-6)


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_coverage_of_calibrated_predictions(level):
    """Targets drawn from the mixture: within 5 standard errors (false alarm: 6e-7)."""
    number = 20000
    means = randn(DRAWS, number)
    component = torch.randint(DRAWS, (number,), generator=torch.Generator().manual_seed(2))
    targets = means[component, torch.arange(number)] + 0.3 * randn(number, seed=3)
    metric = IntervalCoverage(level)
    metric.update(GaussianPredictive(means, torch.tensor(0.3)), targets)
    error = 5 * (level * (1 - level) / number) ** 0.5
    assert metric.compute().item() == pytest.approx(level, abs=error)


def test_level_is_a_probability():
    with pytest.raises(ConfigurationError, match=r"between 0 and 1.*got 90"):
        IntervalCoverage(90)


def test_crps_is_the_mean_over_outputs():
    predictive, targets = GaussianPredictive(randn(4, 81, 2), torch.tensor(0.5)), randn(81, 2)
    crps = over_batches(ContinuousRankedProbabilityScore(), predictive, targets)
    assert crps == pytest.approx(predictive.crps(targets).mean().item(), rel=1e-6)


@pytest.mark.parametrize("event", [(), (1,), (3,)])
def test_rmse_against_scikit_learn(event):
    means, targets = randn(4, 81, *event), randn(81, *event, seed=1)
    predictive = GaussianPredictive(means, torch.tensor(1.0))
    expected = root_mean_squared_error(targets.flatten(), means.mean(0).flatten())
    rmse = over_batches(RootMeanSquaredError(), predictive, targets)
    assert rmse == pytest.approx(expected, rel=1e-5)


def test_rmse_of_column_against_row_and_whole_numbers():
    metric = RootMeanSquaredError()
    metric.update(PoissonPredictive(torch.zeros(2, 3, 1)), torch.tensor([0, 1, 4]))
    assert metric.compute().item() == pytest.approx((10 / 3) ** 0.5)
