"""The numbers of a classification against scikit-learn, torchmetrics and loops."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, confusion_matrix, log_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from lightning_bnn.calibration.bins import bin_sums, width_edges
from lightning_bnn.calibration.error import expected_calibration_error
from lightning_bnn.predictive import BernoulliPredictive
from lightning_bnn.report.comparison import common_rows
from lightning_bnn.report.statistics import Statistics
from tests.report.predictions import block_of, class_data, class_statistics, drawn_rows


@pytest.fixture(scope="module")
def case():
    logits, targets = class_data(count=500, classes=4)
    p = logits.softmax(2).mean(0)
    return (
        p.numpy(),
        targets.numpy(),
        block_of(class_statistics(logits, targets)),
    )


def plain_ece(stated, came, edges):
    """Each row looks for its bin by itself."""
    bins = {}
    for p, c in zip(stated, came, strict=True):
        place = max(i for i in range(len(edges) - 1) if p >= edges[i])
        bins.setdefault(place, []).append(p - c)
    return sum(abs(sum(gaps)) for gaps in bins.values()) / len(stated)


def test_scores(case):
    p, y, block = case
    scalars = block["scalars"]
    assert scalars["accuracy"] == accuracy_score(y, p.argmax(1))
    assert scalars["nll"] == pytest.approx(log_loss(y, p, labels=range(4)), rel=1e-12)
    assert scalars["brier"] == pytest.approx(((p - np.eye(4)[y]) ** 2).sum(1).mean(), rel=1e-12)
    assert scalars["mean_confidence"] == pytest.approx(p.max(1).mean())
    ece = multiclass_calibration_error(torch.tensor(p), torch.tensor(y), 4, n_bins=10)
    assert scalars["ece"] == pytest.approx(ece.item(), abs=1e-6)


def test_adaptive_and_classwise_errors(case):
    p, y, block = case
    came = p.argmax(1) == y
    edges = np.quantile(p.max(1), np.arange(11) / 10)
    assert block["scalars"]["adaptive_ece"] == pytest.approx(plain_ece(p.max(1), came, edges))
    each = [plain_ece(p[:, k], y == k, np.arange(11) / 10) for k in range(4)]
    assert block["scalars"]["classwise_ece"] == pytest.approx(np.mean(each))


def test_decompositions_add_up(case):
    _, _, block = case
    scalars = block["scalars"]
    expected = scalars["entropy"] + scalars["excess_nll"]
    assert expected == pytest.approx(scalars["nll"], abs=1e-12)
    parts = block["nll_decomposition"]
    total = parts["uncertainty"] - parts["resolution"] + parts["reliability"] + parts["which_class"]
    assert total == pytest.approx(scalars["nll"], abs=1e-12)
    parts = block["brier_decomposition"]
    total = parts["uncertainty"] - parts["resolution"] + parts["reliability"]
    assert total == pytest.approx(scalars["brier"], abs=1e-12)
    assert scalars["aleatoric"] + scalars["epistemic"] == pytest.approx(scalars["entropy"])


def test_selective_prediction(case):
    p, y, block = case
    order = np.argsort(-p.max(1), kind="stable")
    wrong = (p.argmax(1) != y)[order]
    risks = [wrong[: i + 1].mean() for i in range(500)]
    assert block["scalars"]["aurc"] == pytest.approx(np.mean(risks), abs=1e-9)
    largest = max((i + 1 for i in range(500) if risks[i] <= 0.1), default=0) / 500
    assert block["scalars"]["coverage_at_risk"] == pytest.approx(largest)
    curve = block["risk_coverage"]
    assert len(curve["coverage"]) <= 200
    for coverage, risk in zip(curve["coverage"], curve["risk"], strict=True):
        assert risk == pytest.approx(risks[round(coverage * 500) - 1])
    assert (curve["coverage"][0], curve["coverage"][-1]) == (1 / 500, 1)


def test_confusion_of_the_most_uncertain(case):
    p, y, block = case
    entropy = -(p * np.log(p)).sum(1)
    chosen = np.argsort(-entropy)[:50]
    expected = confusion_matrix(y[chosen], p.argmax(1)[chosen], labels=range(4))
    found = block["confusion"]
    assert found["count"] == 50
    np.testing.assert_array_equal(found["matrix"], expected)
    wrong = expected - np.diag(np.diag(expected))
    assert sum(pair["count"] for pair in found["pairs"]) <= wrong.sum()
    for pair in found["pairs"]:
        assert pair["count"] == wrong[pair["target"], pair["predicted"]]
    assert found["pairs"][0]["count"] == wrong.max()


def test_confusion_of_many_classes_shows_the_frequent_ones():
    logits, targets = class_data(count=600, classes=50)
    found = block_of(class_statistics(logits, targets))["confusion"]
    assert len(found["classes"]) == 20
    assert sorted(found["classes"]) == list(found["classes"])
    p = logits.softmax(2).mean(0)
    chosen = torch.special.entr(p).sum(1).argsort(descending=True)[:60]
    full = confusion_matrix(targets[chosen], p.argmax(1)[chosen], labels=range(50))
    np.testing.assert_array_equal(found["matrix"], full[np.ix_(found["classes"], found["classes"])])
    seen = full.sum(0) + full.sum(1)
    assert seen[found["classes"]].min() >= np.delete(seen, found["classes"]).max()
    assert len(found["pairs"]) == 10


def test_by_class():
    logits, targets = class_data(count=200, classes=4)
    targets[targets == 2] = 1
    block = block_of(class_statistics(logits, targets))
    p = logits.softmax(2).mean(0)
    right = p.argmax(1) == targets
    for entry in block["per_class"]:
        chosen = targets == entry["class"]
        assert entry["count"] == chosen.sum()
        if entry["class"] == 2:
            assert math.isnan(entry["accuracy"])
            assert math.isnan(entry["epistemic"])
        else:
            assert entry["accuracy"] == pytest.approx(right[chosen].double().mean().item())
            assert entry["confidence"] == pytest.approx(p.amax(1)[chosen].mean().item())


def test_temperature_from_validation_data_and_without():
    logits, targets = class_data(count=2000, sharpen=2.0, draws=1)
    statistics = class_statistics(logits, targets)
    other = class_statistics(*class_data(count=2000, sharpen=2.0, draws=1, seed=1))
    for validation, name in ((other, "validation"), (None, "cross-fit")):
        found = block_of(statistics, validation=validation)["temperature"]
        assert found["fitted_on"] == name
        assert found["value"] == pytest.approx(2.0, rel=0.1)
        assert found["before"]["nll"] == pytest.approx(statistics.sums.mean("nll"))
        assert found["after"]["nll"] < found["before"]["nll"]


def test_yes_or_no_scores_agree_with_the_logged_ones():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2, 300, generator=generator)
    yes = logits.double().sigmoid().mean(0)
    targets = (torch.rand(300, generator=generator) < yes).float()
    statistics = Statistics(bins=10)
    statistics.update(BernoulliPredictive(logits), targets)
    block = block_of(statistics)
    brier = ((yes - targets) ** 2).mean().item()
    assert block["scalars"]["brier"] == pytest.approx(brier)
    parts = block["brier_decomposition"]
    assert parts["uncertainty"] - parts["resolution"] + parts["reliability"] == pytest.approx(brier)
    assert block["temperature"]["before"]["brier"] == pytest.approx(brier)
    assert block["scalars"]["nll"] == pytest.approx(log_loss(targets, yes))


def test_replicates_equal_scores_of_drawn_rows():
    logits, targets = class_data(count=150)
    statistics = class_statistics(logits, targets)
    block = block_of(statistics, validation=class_statistics(*class_data(seed=3)))
    weights, replicates = drawn_rows(150)
    found = statistics.sums.replicated(
        statistics, block, common_rows({"net": statistics}, 1000), weights
    )
    p, y = logits.softmax(2).mean(0).numpy(), targets.numpy()
    cooled = p ** (1 / block["temperature"]["value"])
    cooled /= cooled.sum(1, keepdims=True)
    edges = width_edges(10)
    for r, rows in enumerate(replicates):
        right = (p.argmax(1) == y)[rows].astype(float)
        mass = np.quantile(p.max(1), np.arange(11) / 10)
        expected = {
            "accuracy": right.mean(),
            "nll": log_loss(y[rows], p[rows], labels=range(4)),
            "brier": ((p - np.eye(4)[y]) ** 2).sum(1)[rows].mean(),
            "ece": expected_calibration_error(bin_sums(p.max(1)[rows], right, edges)),
            "adaptive_ece": expected_calibration_error(bin_sums(p.max(1)[rows], right, mass)),
            "classwise_ece": np.mean(
                [
                    expected_calibration_error(bin_sums(p[rows, k], y[rows] == k, edges))
                    for k in range(4)
                ]
            ),
            "scaled_nll": log_loss(y[rows], cooled[rows], labels=range(4)),
            "scaled_ece": expected_calibration_error(bin_sums(cooled.max(1)[rows], right, edges)),
        }
        for name, value in expected.items():
            assert found[name][r] == pytest.approx(value, abs=1e-6), name
    assert set(found) == {*expected, "aurc"}


def test_an_infinite_row_counts_only_where_it_was_drawn():
    logits, targets = class_data(count=60)
    logits[:, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0]).log()
    targets[0] = 1
    statistics = class_statistics(logits, targets)
    block = block_of(statistics)
    weights = np.ones((2, 60), np.float32)
    weights[1, 0] = 0
    found = statistics.sums.replicated(
        statistics, block, common_rows({"net": statistics}, 100), weights
    )
    assert found["nll"][0] == np.inf
    assert np.isfinite(found["nll"][1])
    assert found["scaled_nll"][0] == np.inf
    assert np.isfinite(found["scaled_nll"][1])
