"""Models are compared on the same rows, and an error says where they are not."""

import math

import numpy as np
import pytest
import torch

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.predictive import CategoricalPredictive
from lightning_bnn.report.common_rows import check_same_task, chosen_rows, common_rows
from lightning_bnn.report.sample import priorities
from lightning_bnn.report.statistics import Statistics
from tests.report.predictions import class_data, class_statistics, number_data, number_statistics


def test_all_rows_of_all_models():
    logits, targets = class_data(count=40)
    models = {"a": class_statistics(logits, targets), "b": class_statistics(2 * logits, targets)}
    rows = common_rows(models, most=1000)
    assert rows.complete
    np.testing.assert_array_equal(rows.example, np.arange(40))


def test_rows_that_every_model_could_predict():
    logits, targets = class_data(count=40)
    models = {}
    for name, broken in (("a", [3]), ("b", [5, 7]), ("c", [])):
        damaged = logits.clone()
        damaged[0, broken] = math.nan
        models[name] = class_statistics(damaged, targets)
    rows = common_rows(models, most=1000)
    assert not rows.complete
    np.testing.assert_array_equal(rows.example, [i for i in range(40) if i not in (3, 5, 7)])
    for model in models.values():
        chosen = chosen_rows(model.sample, rows.priority)
        np.testing.assert_array_equal(model.sample.example[chosen], rows.example)
    same = {"a": models["a"], "again": models["a"]}
    assert common_rows(same, most=1000).complete  # values over all rows are over the same rows


def test_at_most_so_many_by_priority():
    models = {"a": class_statistics(*class_data(count=200))}
    rows = common_rows(models, most=30)
    expected = np.argsort(priorities(np.arange(200), np.zeros(200)))[:30]
    np.testing.assert_array_equal(rows.example, np.sort(expected))


def test_invalid_rows_change_a_sample_without_harm():
    logits, targets = class_data(count=300)
    damaged = logits.clone()
    damaged[0, :20] = math.nan
    models = {
        "a": class_statistics(logits, targets, keep=100),
        "b": class_statistics(damaged, targets, keep=100),
    }
    rows = common_rows(models, most=1000)
    assert not rows.complete
    assert 80 <= len(rows.example) < 100
    assert rows.example.min() >= 20


def test_other_examples_or_targets():
    logits, targets = class_data(count=40)
    one = class_statistics(logits, targets)
    fewer = class_statistics(logits[:, :30], targets[:30])
    with pytest.raises(DataError, match="'a' was given 40 examples with 40 valid rows, 'b' 30"):
        common_rows({"a": one, "b": fewer}, most=100)
    moved = Statistics(bins=10)
    moved.update(CategoricalPredictive(logits), targets, torch.arange(1, 41))
    with pytest.raises(DataError, match="the same examples"):
        common_rows({"a": one, "b": moved}, most=100)
    with pytest.raises(DataError, match="same targets"):
        common_rows({"a": one, "b": class_statistics(logits, targets.flip(0))}, most=100)


def test_nothing_in_common():
    logits, targets = class_data(count=40)
    first, second = logits.clone(), logits.clone()
    first[:, :20], second[:, 20:] = math.nan, math.nan
    models = {"a": class_statistics(first, targets), "b": class_statistics(second, targets)}
    with pytest.raises(DataError, match=r"every model \(a, b\)"):
        common_rows(models, most=100)


def test_other_tasks():
    classes = class_statistics(*class_data(count=40))
    numbers = number_statistics(*number_data(count=40))
    more = class_statistics(*class_data(count=40, classes=7))
    with pytest.raises(ConfigurationError, match=r"'a' predicts classes \(classes: 4.*'b' numbers"):
        check_same_task({"a": classes, "b": numbers})
    with pytest.raises(ConfigurationError, match="classes: 7"):
        check_same_task({"a": classes, "b": more})
    with pytest.raises(ConfigurationError, match="bins: 5"):
        check_same_task({"a": classes, "b": class_statistics(*class_data(count=40), bins=5)})
