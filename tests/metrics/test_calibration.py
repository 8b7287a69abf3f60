"""The expected calibration error against a direct computation and torchmetrics' own classes."""

import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from lightning_bnn.calibration.bins import bin_sums, width_edges
from lightning_bnn.calibration.error import expected_calibration_error
from lightning_bnn.metrics import ExpectedCalibrationError
from lightning_bnn.predictive import BernoulliPredictive, CategoricalPredictive


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def direct(probabilities: np.ndarray, outcomes: np.ndarray, bins: int) -> float:
    error = 0.0
    which = np.floor(probabilities * bins)
    for index in np.unique(which):
        inside = which == index
        gap = probabilities[inside].mean() - outcomes[inside].mean()
        error += inside.mean() * abs(gap)
    return error


@pytest.mark.parametrize("bins", [5, 15])
@pytest.mark.parametrize("positions", [(), (4,)])
def test_classes(bins, positions):
    predictive = CategoricalPredictive(2 * randn(3, 40, 5, *positions))
    targets = torch.randint(5, (40, *positions), generator=torch.Generator().manual_seed(1))
    metric = ExpectedCalibrationError(bins)
    metric.update(predictive, targets)
    mean = predictive.mean
    hits = (mean.argmax(1) == targets).numpy().ravel()
    expected = direct(mean.amax(1).numpy().ravel(), hits, bins)
    assert metric.compute().item() == pytest.approx(expected, rel=1e-6)
    theirs = multiclass_calibration_error(mean, targets, num_classes=5, n_bins=bins).item()
    assert metric.compute().item() == pytest.approx(theirs, rel=1e-6)


def test_labels():
    predictive, targets = BernoulliPredictive(2 * randn(3, 40, 2)), randn(40, 2, seed=1) > 0
    metric = ExpectedCalibrationError()
    metric.update(predictive, targets)
    expected = direct(predictive.mean.numpy().ravel(), targets.numpy().ravel(), 15)
    assert metric.compute().item() == pytest.approx(expected, rel=1e-6)


def test_probabilities_just_above_one_are_not_taken_for_logits():
    predictive = CategoricalPredictive(torch.tensor([[[30.0, 0.0], [0.0, 0.0]]]))
    predictive.mean = torch.tensor([[1 + 1e-6, 0.0], [0.5, 0.5]])
    metric = ExpectedCalibrationError()
    metric.update(predictive, torch.tensor([0, 0]))
    assert metric.compute().item() == pytest.approx(0.25)


def stating(probabilities: torch.Tensor, outcomes: torch.Tensor, bins: int = 15) -> torch.Tensor:
    """Give the metric of yes-or-no statements with exactly these probabilities."""
    predictive = BernoulliPredictive(torch.zeros(1, len(probabilities)))
    predictive.mean = probabilities
    metric = ExpectedCalibrationError(bins)
    metric.update(predictive, outcomes)
    return metric.compute()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [1, 2, 7, 10, 15, 100])
def test_the_report_gives_the_same_number_at_edges_and_at_one(bins, dtype):
    generator = torch.Generator().manual_seed(bins)
    edges = torch.arange(bins + 1, dtype=torch.float64) / bins
    near = torch.cat([edges, edges.nextafter(edges + 1), edges.nextafter(edges - 1)])
    random = torch.rand(50, generator=generator, dtype=torch.float64)
    probabilities = torch.cat([near, random, torch.ones(9)]).to(dtype).clamp(0, 1)
    outcomes = torch.rand(len(probabilities), generator=generator) < 0.4
    stated = probabilities.double().numpy()
    sums = bin_sums(stated, outcomes.numpy(), width_edges(bins))
    value = stating(probabilities, outcomes, bins)
    assert value.dtype == dtype
    assert value == value.new_tensor(expected_calibration_error(sums))  # to the last digit


def test_a_prediction_that_is_not_a_number_shows():
    assert stating(torch.tensor([0.5, torch.nan]), torch.tensor([True, True])).isnan()
