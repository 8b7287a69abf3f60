"""Each replicate against the same number computed on rows drawn by index."""

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from lightning_bnn.calibration.bins import bin_sums, width_edges
from lightning_bnn.calibration.error import expected_calibration_error
from lightning_bnn.report import replicated as module
from lightning_bnn.report.class_block import class_block
from lightning_bnn.report.common_rows import common_rows
from lightning_bnn.report.replicated import classwise_replicates, replicated
from tests.report.predictions import class_data, class_statistics, number_data, number_statistics


def drawn(count, replicates=3):
    """Weights, and for each replicate the rows they stand for."""
    generator = np.random.default_rng(0)
    rows = generator.integers(0, count, (replicates, count))
    weights = np.stack([np.bincount(row, minlength=count) for row in rows]).astype(np.float32)
    return weights, rows


def test_classes():
    logits, targets = class_data(count=150)
    statistics = class_statistics(logits, targets)
    block = class_block("net", statistics, {}, class_statistics(*class_data(seed=3)), 0.1)
    weights, drawn_rows = drawn(150)
    found = replicated(statistics, block, common_rows({"net": statistics}, 1000), weights)
    p, y = logits.softmax(2).mean(0).numpy(), targets.numpy()
    cooled = p ** (1 / block["temperature"]["value"])
    cooled /= cooled.sum(1, keepdims=True)
    edges = width_edges(10)
    for r, rows in enumerate(drawn_rows):
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


def test_numbers():
    predictive, targets = number_data(count=100)
    statistics = number_statistics(predictive, targets)
    weights, drawn_rows = drawn(100)
    found = replicated(statistics, {}, common_rows({"net": statistics}, 1000), weights)
    error = (predictive.mean - targets)[:, 0].numpy()
    columns = {
        "nll": -predictive.log_prob(targets).numpy(),
        "crps": predictive.crps(targets)[:, 0].numpy(),
        "coverage_90": predictive.covers(targets, 0.9)[:, 0].numpy(),
        "sharpness": predictive.variance.sqrt()[:, 0].numpy(),
    }
    for r, rows in enumerate(drawn_rows):
        assert found["rmse"][r] == pytest.approx(np.sqrt((error[rows] ** 2).mean()))
        for name, column in columns.items():
            assert found[name][r] == pytest.approx(column[rows].mean()), name


def test_an_infinite_row_counts_only_where_it_was_drawn():
    logits, targets = class_data(count=60)
    logits[:, 0] = torch.tensor([1.0, 0.0, 0.0, 0.0]).log()
    targets[0] = 1
    statistics = class_statistics(logits, targets)
    block = class_block("net", statistics, {}, None, 0.1)
    weights = np.ones((2, 60), np.float32)
    weights[1, 0] = 0
    found = replicated(statistics, block, common_rows({"net": statistics}, 100), weights)
    assert found["nll"][0] == np.inf
    assert np.isfinite(found["nll"][1])
    assert found["scaled_nll"][0] == np.inf
    assert np.isfinite(found["scaled_nll"][1])


def test_the_work_of_many_classes_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "CLASSWISE_WORK", 0)
    monkeypatch.setattr(module, "CLASSWISE_REPLICATES", 2)
    p = np.random.default_rng(0).dirichlet(np.ones(3), 20)
    target, edges = np.arange(20) % 3, width_edges(5)
    weights = np.ones((5, 20))
    found = classwise_replicates(p, target, edges, weights)
    assert np.isfinite(found).tolist() == [True, True, False, False, False]
