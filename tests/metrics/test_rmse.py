"""The root mean squared error of the mixture's mean."""

import pytest
import torch
from sklearn.metrics import root_mean_squared_error

from lightning_bnn.errors import DataError
from lightning_bnn.metrics import RootMeanSquaredError
from lightning_bnn.predictive import GaussianPredictive, PoissonPredictive


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("event", [(), (1,), (3,)])
def test_against_scikit_learn(event):
    means, targets = randn(4, 30, *event), randn(30, *event, seed=1)
    metric = RootMeanSquaredError()
    for piece in (slice(0, 20), slice(20, 30)):
        metric.update(GaussianPredictive(means[:, piece], torch.tensor(1.0)), targets[piece])
    expected = root_mean_squared_error(targets.flatten(), means.mean(0).flatten())
    assert metric.compute().item() == pytest.approx(expected, rel=1e-5)


def test_column_against_row_and_whole_numbers():
    metric = RootMeanSquaredError()
    metric.update(PoissonPredictive(torch.zeros(2, 3, 1)), torch.tensor([0, 1, 4]))
    assert metric.compute().item() == pytest.approx((10 / 3) ** 0.5)


def test_broadcasting_is_an_error():
    with pytest.raises(DataError, match="first axis is the batch"):
        RootMeanSquaredError().update(PoissonPredictive(torch.zeros(2, 3, 1)), torch.zeros(1, 3))
