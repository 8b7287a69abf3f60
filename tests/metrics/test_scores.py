"""The values of the metrics that average a score, against scikit-learn and direct NumPy."""

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, root_mean_squared_error
from torchmetrics.functional.classification import multiclass_accuracy

from lightning_bnn.errors import ConfigurationError, DataError
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


def test_accuracy_with_positions_is_micro_accuracy():
    predictive, targets = classes(5)
    expected = multiclass_accuracy(
        predictive.mean, targets, num_classes=CLASSES, average="micro"
    ).item()
    assert over_batches(Accuracy(), predictive, targets) == pytest.approx(expected)


def test_labels_against_scikit_learn():
    predictive, targets = labels()
    mean, flat = predictive.mean.numpy().ravel(), targets.numpy().ravel()
    accuracy = over_batches(Accuracy(), predictive, targets)
    assert accuracy == pytest.approx(accuracy_score(flat, mean > 0.5))
    brier = over_batches(BrierScore(), predictive, targets)
    assert brier == pytest.approx(brier_score_loss(flat, mean), rel=1e-6)


def test_nll_is_of_the_mixture_and_not_the_mean_of_the_losses():
    predictive, targets = classes()
    nll = over_batches(NegativeLogLikelihood(), predictive, targets)
    losses = [
        torch.nn.functional.cross_entropy(draw, targets).item() for draw in predictive.outputs
    ]
    assert nll < np.mean(losses) - 0.1


def test_crps_against_samples():
    predictive, targets = GaussianPredictive(randn(DRAWS, 81), torch.tensor(0.5)), randn(81, seed=1)
    metric = ContinuousRankedProbabilityScore()
    # E|X - y| - E|X - X'| / 2 with the mixture replaced by its 2000 mid-quantiles.
    levels = [(i + 0.5) / 2000 for i in range(2000)]
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    cdf = stats.norm.cdf(grid.numpy()[:, None, None], predictive.means.numpy(), 0.5).mean(1)
    values = np.stack([np.interp(levels, cdf[:, b], grid) for b in range(81)])
    to_target = np.abs(values - targets.numpy()[:, None]).mean(1)
    between = (values * (2 * np.array(levels) - 1)).mean(1)  # E|X - X'| / 2 of sorted values
    expected = (to_target - between).mean()
    assert over_batches(metric, predictive, targets) == pytest.approx(expected, abs=1e-3)


def test_crps_of_counts_against_a_sum():
    log_rates = randn(DRAWS, 81, 2)
    targets = torch.randint(6, (81, 2), generator=torch.Generator().manual_seed(1))
    support = np.arange(200)
    cdf = stats.poisson(log_rates.exp().numpy()[..., None]).cdf(support).mean(0)
    expected = ((cdf - (support >= targets.numpy()[..., None])) ** 2).sum(-1).mean()
    metric = ContinuousRankedProbabilityScore()
    actual = over_batches(metric, PoissonPredictive(log_rates), targets)
    assert actual == pytest.approx(expected, rel=1e-5)


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


def test_coverage_counts_the_ends_of_an_interval_of_counts():
    predictive = PoissonPredictive(torch.full((1, 4), 3.0).log())
    lower, upper = stats.poisson(3.0).ppf([0.05, 0.95])
    metric = IntervalCoverage(0.9)
    metric.update(predictive, torch.tensor([lower - 1, lower, upper, upper + 1]))
    assert metric.compute().item() == 0.5


@pytest.mark.parametrize("level", [0, 1, 90])
def test_level_is_a_probability(level):
    with pytest.raises(ConfigurationError, match=f"between 0 and 1, got {level}"):
        IntervalCoverage(level)


def test_nan_is_seen():
    metric = NegativeLogLikelihood()
    metric.update(CategoricalPredictive(torch.full((1, 2, 2), torch.nan)), torch.tensor([0, 1]))
    assert metric.compute().isnan()


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


def test_rmse_never_broadcasts():
    with pytest.raises(DataError, match="first axis is the batch"):
        RootMeanSquaredError().update(PoissonPredictive(torch.zeros(2, 3, 1)), torch.zeros(1, 3))
