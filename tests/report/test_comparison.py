"""The table: common rows, values, intervals, the best and the tied."""

import math

import numpy as np
import pytest
import torch

from lightning_bnn.errors import DataError
from lightning_bnn.predictive import CategoricalPredictive, GaussianPredictive
from lightning_bnn.report.comparison import _row, common_rows, comparison
from lightning_bnn.report.document import model_block
from tests.report.predictions import (
    class_data,
    class_statistics,
    outside_of,
    regression_data,
    regression_statistics,
    with_others,
)


def table_of(models, outside=None):
    models = with_others(models, outside)
    blocks = [model_block(name, model, 0.1) for name, model in models.items()]
    return comparison(models, blocks), blocks


def rows_of(table):
    return {row["key"]: row for row in table["rows"]}


@pytest.fixture(scope="module")
def two():
    logits, targets = class_data(count=400)
    noisy = logits + 1.5 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))
    models = {
        "good": class_statistics(logits, targets),
        "noisy": class_statistics(noisy, targets),
        "again": class_statistics(logits.flip(0), targets),
    }
    foreign = 0.2 * class_data(count=100, seed=4)[0]
    outside = {
        "good": {"letters": outside_of(CategoricalPredictive(foreign))},
        "again": {"letters": outside_of(CategoricalPredictive(foreign))},
    }
    return table_of(models, outside)


def test_rows_and_values(two):
    table, blocks = two
    assert table["columns"] == ["good", "noisy", "again"]
    assert (table["replicates"], table["examples"], table["complete"]) == (1000, 400, True)
    assert [row["key"] for row in table["rows"]] == [
        "accuracy",
        "nll",
        "brier",
        "ece",
        "adaptive_ece",
        "classwise_ece",
        "aurc",
        "scaled_nll",
        "scaled_ece",
        "auroc_entropy:letters",
        "auroc_mutual_information:letters",
    ]
    for row in table["rows"]:
        for block, value in zip(blocks, row["values"], strict=True):
            if row["key"] in block["scalars"]:
                assert value["value"] == block["scalars"][row["key"]]
            elif row["key"].startswith("scaled"):
                assert value["value"] == block["temperature"]["after"][row["key"][7:]]
            if not math.isnan(value["value"]):
                assert value["lower"] <= value["value"] <= value["upper"]


def test_the_best_and_the_tied(two):
    table, _ = two
    nll = rows_of(table)["nll"]["values"]
    assert [value["best"] for value in nll] == [True, False, True]  # equal: both are best
    assert not nll[1]["tied"]  # clearly worse
    for row in table["rows"]:
        assert row["values"][0]["best"] == row["values"][2]["best"] != row["values"][1]["best"]
        assert not any(value["best"] and value["tied"] for value in row["values"])
        known = [v["value"] for v in row["values"] if not math.isnan(v["value"])]
        best = next(value["value"] for value in row["values"] if value["best"])
        # equal models may differ in the last bit
        assert best == pytest.approx((max if row["better"] == "higher" else min)(known), rel=1e-12)


def test_a_model_without_the_loader_has_no_value(two):
    table, _ = two
    values = rows_of(table)["auroc_entropy:letters"]["values"]
    assert math.isnan(values[1]["value"])
    assert not values[1]["tied"]


def test_a_part_of_the_rows_moves_to_the_value_of_all(monkeypatch):
    """The bootstrap has 100 rows, whose own accuracy is another one than that of all 900."""
    monkeypatch.setattr("lightning_bnn.report.comparison.MOST_ROWS", 100)
    statistics = class_statistics(*class_data(count=900, seed=1))
    table, blocks = table_of({"net": statistics})
    value = rows_of(table)["accuracy"]["values"][0]
    part = statistics.sample["correct"][np.argsort(statistics.sample["priority"])[:100]].mean()
    assert value["value"] == blocks[0]["scalars"]["accuracy"] != part
    middle, width = (value["lower"] + value["upper"]) / 2, value["upper"] - value["lower"]
    assert abs(middle - value["value"]) < 0.05 * width


def test_regressions():
    predictive, targets = regression_data(count=300)
    narrow = GaussianPredictive(predictive.means, predictive.scales / 2)
    models = {
        "right": regression_statistics(predictive, targets),
        "narrow": regression_statistics(narrow, targets),
    }
    outside = {name: {"far": outside_of(regression_data(narrow=0.3)[0])} for name in models}
    found = rows_of(table_of(models, outside)[0])
    assert list(found) == [
        "rmse",
        "nll",
        "crps",
        "coverage_90",
        "sharpness",
        "auroc_sd:far",
        "auroc_epistemic_sd:far",
    ]
    coverage = found["coverage_90"]
    assert (coverage["better"], coverage["aim"]) == ("near", 0.9)
    assert [value["best"] for value in coverage["values"]] == [True, False]
    assert not coverage["values"][1]["tied"]
    assert found["rmse"]["values"][1]["tied"] != found["rmse"]["values"][1]["best"]
    assert found["sharpness"]["better"] is None
    assert not any(value["best"] for value in found["sharpness"]["values"])


def test_an_infinite_score_is_never_the_best():
    logits, targets = class_data(count=100)
    impossible = logits.clone()
    impossible[:, 0] = -math.inf
    impossible[:, 0, (targets[0] + 1) % 4] = 0.0
    models = {"a": class_statistics(impossible, targets), "b": class_statistics(logits, targets)}
    table, _ = table_of(models)
    nll = rows_of(table)["nll"]["values"]
    assert nll[0]["value"] == math.inf
    assert nll[1]["best"]
    both = table_of({"a": models["a"], "c": class_statistics(impossible, targets)})[0]
    assert np.isinf([value["value"] for value in rows_of(both)["nll"]["values"]]).all()


def one_row(values, samples, key="nll", better="lower"):
    found = [np.concatenate([[v], s]) for v, s in zip(values, samples, strict=True)]
    return _row(key, key, better, None, found, [None] * len(found))["values"]


def test_many_models_need_more_to_be_clear():
    """A difference at 2.2 standard deviations is clear between two models, not among eleven."""
    generator = np.random.default_rng(1)
    best, other = np.zeros(4000), 2.2 + generator.normal(size=4000)
    assert not one_row([0.0, 2.2], [best, other])[1]["tied"]
    values = one_row([0.0, *[2.2] * 10], [best, *[other] * 10])
    assert all(value["tied"] for value in values[1:])


def test_calibration_errors_that_are_noise_are_tied():
    """Both have a true error of 0; the finer one has more noise, twice in its replicates."""
    best, other = np.full(1000, 0.005), np.random.default_rng(0).uniform(0.04, 0.06, 1000)
    assert one_row([0.005, 0.035], [best, other], key="ece")[1]["tied"]
    assert not one_row([0.005, 0.035], [best, other])[1]["tied"]
    assert not one_row([0.005, 0.2], [best, other + 0.15], key="ece")[1]["tied"]


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
        chosen = rows.chosen(model.sample)
        np.testing.assert_array_equal(model.sample.example[chosen], rows.example)
    same = {"a": models["a"], "again": models["a"]}
    assert common_rows(same, most=1000).complete  # values over all rows are over the same rows


def test_other_examples_or_targets():
    logits, targets = class_data(count=40)
    one = class_statistics(logits, targets)
    fewer = class_statistics(logits[:, :30], targets[:30])
    with pytest.raises(DataError, match="'a' was given 40 examples and 'b' 30"):
        common_rows({"a": one, "b": fewer}, most=100)
    with pytest.raises(DataError, match="same targets"):
        common_rows({"a": one, "b": class_statistics(logits, targets.flip(0))}, most=100)


def test_nothing_in_common():
    logits, targets = class_data(count=40)
    first, second = logits.clone(), logits.clone()
    first[:, :20], second[:, 20:] = math.nan, math.nan
    models = {"a": class_statistics(first, targets), "b": class_statistics(second, targets)}
    with pytest.raises(DataError, match=r"every model \(a, b\)"):
        common_rows(models, most=100)
