"""The stated Monte Carlo error of the NLL against the spread of many repetitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_bnn.errors import DataError
from lightning_bnn.metrics import MonteCarloStandardError, NegativeLogLikelihood
from lightning_bnn.predictive import CategoricalPredictive, GaussianPredictive, Predictive

INPUTS = torch.linspace(-1, 1, 12, dtype=torch.float64)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def regression(weights: Tensor) -> tuple[Predictive, Tensor]:
    """Functions w x + v, one for each row of weights, and targets that they explain."""
    outputs = weights[:, :1] * INPUTS + weights[:, 1:]
    return GaussianPredictive(outputs[..., None], torch.tensor(0.7).double()), INPUTS.sin()


def classification(weights: Tensor) -> tuple[Predictive, Tensor]:
    outputs = torch.stack([weights[:, :1] * INPUTS, weights[:, 1:] * INPUTS.square()], 2)
    return CategoricalPredictive(outputs), (INPUTS > 0.1).long()


@pytest.mark.parametrize("task", [regression, classification])
def test_it_is_the_spread_over_independent_draws(task) -> None:
    """Over R = 800 repetitions with S = 200 draws each.

    The spread is known to 1 / sqrt(2 R) = 2.5 %, and the delta method is right to O(1 / S): a
    false alarm beyond 12 % is a deviation of more than four standard errors (1e-4). Examples share
    draws here; taken to be independent, the error would come out at less than half.
    """
    draws = 0.6 * torch.randn(800, 200, 2, generator=generator(0), dtype=torch.float64)
    nll, error = [], []
    for weights in draws:
        predictive, targets = task(weights)
        nll.append(-predictive.log_prob(targets).mean())
        (metric := MonteCarloStandardError()).update(predictive, targets)
        error.append(metric.compute())
    stated = torch.stack(error).square().mean().sqrt()
    assert stated.item() == pytest.approx(torch.stack(nll).std().item(), rel=0.12)


def test_it_adds_up_over_batches_and_processes() -> None:
    weights = torch.randn(7, 2, generator=generator(1), dtype=torch.float64)
    predictive, targets = regression(weights)
    whole, *ranks = (MonteCarloStandardError() for _ in range(3))
    whole.update(predictive, targets)
    for start, metric in ((0, ranks[0]), (5, ranks[1]), (6, ranks[0])):
        stop = {0: 5, 5: 6, 6: 12}[start]
        metric.update(predictive[start:stop], targets[start:stop])
    for name in ("excess", "count"):  # as a reduction by "sum" does
        setattr(ranks[0], name, getattr(ranks[0], name) + getattr(ranks[1], name))
    torch.testing.assert_close(ranks[0].compute(), whole.compute())
    densities = predictive.component_log_prob(targets).exp()
    shares = (densities / densities.mean(0)).mean(1)
    torch.testing.assert_close(whole.compute(), (shares.var() / 7).sqrt())
    assert set(whole._reductions) == {"excess", "count"}
    whole.reset()
    assert whole.draws == 1
    assert whole.excess.item() == 0


def test_examples_without_a_label_do_not_count() -> None:
    outputs = torch.randn(5, 6, 3, generator=generator(2))
    targets = torch.tensor([0, 9, 2, 1, 9, 0])
    all_rows, known = MonteCarloStandardError(), MonteCarloStandardError()
    all_rows.update(CategoricalPredictive(outputs, ignore_index=9), targets)
    known.update(CategoricalPredictive(outputs[:, targets != 9]), targets[targets != 9])
    torch.testing.assert_close(all_rows.compute(), known.compute())


def test_densities_that_underflow_are_no_matter() -> None:
    predictive = GaussianPredictive(torch.tensor([[[60.0]], [[61.0]]]), torch.ones(()))
    (metric := MonteCarloStandardError()).update(predictive, torch.zeros(1))
    (nll := NegativeLogLikelihood()).update(predictive, torch.zeros(1))
    assert nll.compute() > 1000
    assert metric.compute().item() == pytest.approx(1.0, abs=1e-4)  # g is 2 and 0


def test_one_draw_has_no_error_and_batches_must_agree() -> None:
    metric = MonteCarloStandardError()
    metric.update(*regression(torch.zeros(1, 2).double()))
    assert metric.compute().isnan()
    metric.update(*regression(torch.zeros(4, 2).double()))
    with pytest.raises(DataError, match="this one has 3, those before it had 4"):
        metric.update(*regression(torch.zeros(3, 2).double()))
