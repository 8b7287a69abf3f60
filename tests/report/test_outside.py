"""Scores on foreign data."""

import math
import pickle

import numpy as np
import pytest
import torch

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.predictive import CategoricalPredictive, GaussianPredictive
from lightning_bnn.report.outside import Outside
from tests.report.predictions import class_data, number_data


def test_scores_of_classes():
    logits, _ = class_data(count=50)
    logits[0, 3] = math.nan
    outside, other = Outside(), Outside()
    outside.update(CategoricalPredictive(logits[:, :20].float()), torch.arange(20))
    other.update(CategoricalPredictive(logits[:, 20:].float()), torch.arange(20, 50))
    outside.merge(pickle.loads(pickle.dumps(other)))
    outside.merge(Outside())
    p = logits.float().double().softmax(2)
    entropy = torch.special.entr(p.mean(0)).sum(1)
    within = torch.special.entr(p).sum(2).mean(0)
    valid = [i for i in range(50) if i != 3]
    assert (outside.examples, outside.invalid, outside.classes) == (50, 1, 4)
    np.testing.assert_array_equal(outside.sample.example, valid)
    np.testing.assert_allclose(outside.scores("entropy"), entropy[valid])
    np.testing.assert_allclose(outside.scores("mutual_information"), (entropy - within)[valid])
    np.testing.assert_allclose(
        outside.scores("maximum_probability"), p.mean(0).amax(1)[valid], atol=1e-6
    )


def test_scores_of_numbers():
    predictive, _ = number_data(count=30, outputs=2)
    outside = Outside()
    outside.update(predictive)
    np.testing.assert_allclose(outside.scores("sd"), predictive.variance.sqrt().ravel())
    np.testing.assert_allclose(outside.scores("epistemic_sd"), predictive.epistemic.sqrt().ravel())


def test_the_sample_is_bounded():
    outside = Outside(keep=40)
    for _ in range(10):
        outside.update(CategoricalPredictive(torch.zeros(1, 30, 2)))
    assert (outside.examples, len(outside.sample)) == (300, 40)


def test_another_task():
    outside, other = Outside(), Outside()
    outside.update(CategoricalPredictive(torch.zeros(1, 5, 2)))
    numbers = GaussianPredictive(torch.zeros(1, 2), torch.ones(1, 2))
    other.update(numbers)
    with pytest.raises(ConfigurationError, match="were a task of classes, this one is of numbers"):
        outside.update(numbers)
    with pytest.raises(ConfigurationError, match="classes with those of numbers"):
        outside.merge(other)
