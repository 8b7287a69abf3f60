"""Sums of a classification against a loop over rows."""

import numpy as np
import torch

from lightning_bnn.predictive import CategoricalPredictive
from lightning_bnn.report.class_sums import MEANS, ClassSums
from lightning_bnn.report.rows import make_rows
from tests.report.predictions import class_data


def test_sums_equal_a_loop():
    logits, targets = class_data(count=90, classes=3)
    rows = make_rows(CategoricalPredictive(logits), targets, np.arange(90))
    sums, half = ClassSums(3, bins=5), ClassSums(3, bins=5)
    first = make_rows(CategoricalPredictive(logits[:, :40]), targets[:40], np.arange(40))
    second = make_rows(CategoricalPredictive(logits[:, 40:]), targets[40:], np.arange(40, 90))
    sums.add(first)
    half.add(second)
    sums.merge(half)
    columns = rows.columns
    for name in MEANS:
        np.testing.assert_allclose(sums.mean(name), np.mean(columns[name]), rtol=1e-12)
    p = np.exp(rows.log_probabilities)
    per_class, entropy = np.zeros((5, 3)), np.zeros((2, 5))
    classwise = np.zeros((2, 3, 5))
    for i in range(90):
        values = [columns[n][i] for n in ("correct", "confidence", "aleatoric", "epistemic")]
        per_class[:, int(targets[i])] += [1, *values]
        place = min(4, int(columns["entropy"][i] / np.log(3) * 5))
        entropy[:, place] += [1, columns["correct"][i]]
        for k in range(3):
            classwise[:, k, min(4, int(p[i, k] * 5))] += [1, int(targets[i]) == k]
    np.testing.assert_allclose(sums.per_class, per_class)
    np.testing.assert_allclose([sums.entropy.count[0], sums.entropy.observed[0]], entropy)
    np.testing.assert_allclose([sums.classwise.count, sums.classwise.observed], classwise)
    assert sums.confidence.count.sum() == 90


def test_impossible_targets_are_counted():
    logits = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.5, 0.5]]]).log()
    sums = ClassSums(2, bins=5)
    sums.add(make_rows(CategoricalPredictive(logits), torch.tensor([0, 1, 1]), np.arange(3)))
    assert sums.impossible == 1
    assert sums.mean("nll") == np.inf
