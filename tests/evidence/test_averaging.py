"""Weights of models: by evidence, by stacking, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import (
    AveragePosterior,
    DrawsPosterior,
    PolynomialRegression,
    Posterior,
    average,
    mc_dropout,
)
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.evidence import Evidence, log_scores, model_probabilities, stacking_weights
from lightning_bnn.evidence.averaging import known_evidences
from lightning_bnn.likelihoods import Categorical, Gaussian
from tests.trainers import quiet_trainer


def point(value: float, scale: float = 1.0, evidence: float | None = None) -> DrawsPosterior:
    net = nn.Linear(1, 1)
    draw = {"weight": torch.zeros(1, 1), "bias": torch.full((1,), value)}
    posterior = DrawsPosterior(net, Gaussian(scale), [draw])
    posterior.evidence = None if evidence is None else Evidence(evidence)
    return posterior


# ---------------------------------------------------------------- by evidence


def test_weights_by_evidence_are_bayes_rule_over_models() -> None:
    models = {"a": point(0.0, evidence=-1000.0), "b": point(1.0, evidence=-1001.0)}
    made = average(models)
    assert isinstance(made, AveragePosterior)
    assert made.weights[1] / made.weights[0] == pytest.approx(np.exp(-1))
    prior = average(models, prior=[1, 3])
    assert prior.weights[1] / prior.weights[0] == pytest.approx(3 * np.exp(-1))
    assert average(models, prior=[0.0, 1.0]).weights == [0.0, 1.0]
    given = average(list(models.values()), log_evidence=[-2.0, Evidence(-1.0, 0.1, "AIS")])
    assert given.weights[1] / given.weights[0] == pytest.approx(np.exp(1))
    assert average(list(models.values()), "equal").weights == [0.5, 0.5]
    assert average(list(models.values()), [0.2, 0.8]).weights == pytest.approx([0.2, 0.8])
    far = average(list(models.values()), log_evidence=[0.0, -5000.0])
    assert far.weights == [1.0, 0.0]
    assert far.predict(torch.zeros(2, 1)).draws == 1


def test_bounds_beside_evidences_are_told_of() -> None:
    models = [point(0.0, evidence=-2.0), point(1.0, evidence=-1.0)]
    models[1].evidence = Evidence(-1.0, 0.1, "ELBO")
    with pytest.warns(UserWarning, match=r"of the models \[1\] is a lower bound.*log_evidence="):
        average(models)
    models[0].evidence = models[1].evidence  # all are: nothing to say
    assert average(models).weights == [0.5, 0.5]


def test_errors_of_probabilities_are_those_of_simulated_evidences() -> None:
    """By 20,000 simulations, to 3%: the delta method holds at these errors (0.05 nats)."""
    evidences = [Evidence(-3.0, 0.05), Evidence(-3.5, 0.02), Evidence(-5.0, 0.0)]
    found, errors = model_probabilities(evidences)
    chance = np.random.default_rng(0)
    values = np.array([e.value for e in evidences]) + chance.normal(size=(20_000, 3)) * [
        e.error for e in evidences
    ]
    relative = np.exp(values) / np.exp(values).sum(1, keepdims=True)
    np.testing.assert_allclose(found, relative.mean(0), rtol=3e-3)
    np.testing.assert_allclose(errors, relative.std(0), rtol=0.03)


def test_polynomials_by_their_evidence_put_the_weight_on_the_true_order(tmp_path: Any) -> None:
    """From fits to files and back: the posteriors know their evidence."""
    torch.manual_seed(0)
    x = torch.rand(50, 1) * 4 - 2
    y = 1 - x + 0.5 * x**2 + 0.3 * torch.randn(50, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=50)
    models = []
    for order in (1, 2, 3):
        bnn = PolynomialRegression(order)
        quiet_trainer(max_epochs=1).fit(bnn, loader)
        bnn.posterior().save(tmp_path / str(order))
        models.append(Posterior.load(tmp_path / str(order)))
        known = models[-1].evidence
        assert known == Evidence(bnn.log_evidence(), 0.0, "closed form")
    made = average(models)
    assert int(np.argmax(made.weights)) == 1
    assert made.weights[0] < 1e-6
    expected = sum(w * m.predict(x).mean for w, m in zip(made.weights, models, strict=True))
    torch.testing.assert_close(made.predict(x).mean, expected)


# ---------------------------------------------------------------- stacking


def test_stacking_weights_are_optimal() -> None:
    """No direction scores better: the largest slope is 1 to 1e-5, and 1 where a weight is used."""
    chance = np.random.default_rng(1)
    for models in (2, 5, 30):
        scores = chance.normal(size=(200, models)) * 2 - 1000 * chance.random((200, 1))
        weights, _ = stacking_weights(scores, resamples=0)
        densities = np.exp(scores - scores.max(1, keepdims=True))
        slopes = (densities / (densities @ weights)[:, None]).mean(0)
        assert weights.sum() == pytest.approx(1)
        assert slopes.max() < 1 + 1e-5
        np.testing.assert_allclose(slopes[weights > 1e-3], 1, atol=1e-3)


def test_stacking_is_right_where_no_model_is_true() -> None:
    """Targets of 0.3 N(-2, 1) + 0.7 N(2, 1): evidence would take one, stacking finds the shares."""
    chance = np.random.default_rng(0)
    count = 2000
    y = torch.tensor(np.where(chance.random(count) < 0.3, -2, 2) + chance.normal(size=count))
    data = DataLoader(
        TensorDataset(torch.zeros(count, 1), y.float()[:, None]), batch_size=300, shuffle=True
    )
    models = [point(-2.0), point(2.0), point(0.0, 0.1)]
    made = average(models, "stacking", data=data)
    # the sd of a share is about √(.21/2000) = 0.01
    assert made.weights == pytest.approx([0.3, 0.7, 0.0], abs=0.05)
    scores = log_scores(models, data)
    assert scores.shape == (2000, 3)
    weights, errors = stacking_weights(scores, resamples=40)
    assert 0.006 < errors[0] < 0.02
    best = float(made.predict(torch.zeros(count, 1)).log_prob(y.float()[:, None]).mean())
    equal = float(
        average(models, "equal").predict(torch.zeros(count, 1)).log_prob(y.float()[:, None]).mean()
    )
    assert best == pytest.approx(np.log(np.exp(scores) @ weights).mean(), abs=1e-4)
    assert best > equal + 0.3


def test_scores_of_unlabelled_examples_do_not_count() -> None:
    net = nn.Linear(1, 3)
    draw = {name: tensor.detach() for name, tensor in net.named_parameters()}
    model = DrawsPosterior(net, Categorical(ignore_index=-1), [draw])
    data = [(torch.zeros(4, 1), torch.tensor([0, -1, 2, -1]))]
    assert log_scores([model, model], data).shape == (2, 2)


def test_stacking_where_a_model_gives_nothing() -> None:
    scores = np.array([[0.0, -np.inf], [-np.inf, 0.0], [0.0, -np.inf], [0.0, -1.0]])
    weights, _ = stacking_weights(scores, resamples=0)
    assert 0.5 < weights[0] < 1
    with pytest.raises(DataError, match="under at least one model"):
        stacking_weights([[-np.inf, -np.inf]])
    with pytest.raises(DataError, match="NaN"):
        stacking_weights([[np.nan, 0.0]])
    with pytest.raises(DataError, match="log scores are numbers"):
        stacking_weights(np.zeros((0, 2)))


# ---------------------------------------------------------------- what is refused


LOADER = [(torch.zeros(2, 1), torch.zeros(2, 1))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "evidence of model 0, a DrawsPosterior, is not known.*BayesianLinear.*LaplaceBNN"),
        ({"weights": "stacking"}, "Pass data="),
        ({"weights": "bayes"}, "'evidence', 'stacking' or 'equal'"),
        ({"weights": "equal", "data": LOADER}, "data= is for weights='stacking'"),
        ({"weights": "stacking", "data": LOADER, "prior": [1, 1]}, "prior= is for weights='evid"),
        ({"weights": [0.5, 0.5], "log_evidence": [1, 2]}, "log_evidence= is for"),
        ({"weights": [0.5, 0.6]}, "whose sum is 1"),
        ({"log_evidence": [1.0]}, "one for each of 2 models"),
        ({"log_evidence": [1.0, float("nan")]}, "finite numbers, in nats"),
        ({"log_evidence": [1.0, "much"]}, "finite numbers, in nats"),
        ({"log_evidence": [1.0, 2.0], "prior": [1.0]}, "each of 2 models"),
        ({"log_evidence": [1.0, 2.0], "prior": [-1.0, 1.0]}, "from 0 on"),
        ({"weights": "stacking", "data": 3}, "data= is a loader"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        average([point(0.0), point(1.0)], **options)


@pytest.mark.parametrize("models", [None, 3, [], [point(0.0), nn.Linear(1, 1)], {"a": 1}])
def test_what_is_no_list_of_posteriors(models: Any) -> None:
    with pytest.raises(ConfigurationError, match="An average is of a list of posteriors"):
        average(models)


def test_dropout_says_that_it_has_none() -> None:
    net = nn.Sequential(nn.Linear(1, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    with pytest.raises(ConfigurationError, match="draws, ensembles and dropout have none"):
        known_evidences([mc_dropout(net, Gaussian(1.0))])
    assert average([mc_dropout(net, Gaussian(1.0)), point(0.0)], "equal").weights == [0.5, 0.5]
