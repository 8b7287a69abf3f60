"""Separation and histograms against scikit-learn and NumPy."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.predictive import CategoricalPredictive
from lightning_bnn.report.statistics import Statistics
from tests.report.predictions import (
    block_of,
    class_data,
    class_statistics,
    document_of,
    outside_of,
)


def test_each_score_of_a_classification():
    logits, targets = class_data(count=120)
    other = 0.3 * class_data(count=80, seed=5)[0]
    found = block_of(
        class_statistics(logits, targets), {"letters": outside_of(CategoricalPredictive(other))}
    )["shift"]["letters"]
    assert (found["examples"], found["invalid"]) == (80, 0)
    labels = np.repeat([0, 1], [120, 80])
    for name, by in found["by"].items():
        scores = []
        for part in (logits, other):
            p = part.softmax(2)
            entropy = torch.special.entr(p.mean(0)).sum(1)
            scores.append(
                {
                    "entropy": entropy,
                    "mutual_information": entropy - torch.special.entr(p).sum(2).mean(0),
                    "maximum_probability": p.mean(0).amax(1),
                }[name].numpy()
            )
        sign = -1 if name == "maximum_probability" else 1
        joined = sign * np.concatenate(scores)
        assert by["auroc"] == pytest.approx(roc_auc_score(labels, joined), abs=1e-6)
        assert by["aupr"] == pytest.approx(average_precision_score(labels, joined), abs=1e-6)
        for side, values in zip(("inside", "outside"), scores, strict=True):
            assert by[side].sum() == pytest.approx(1)
            clipped = np.clip(values, by["edges"][0], by["edges"][-1])
            shares = np.histogram(clipped, by["edges"])[0] / len(values)
            np.testing.assert_allclose(by[side], shares)
    assert found["by"]["entropy"]["edges"][-1] == pytest.approx(math.log(4))
    assert found["by"]["maximum_probability"]["edges"][0] == 0.25


def test_no_finite_prediction():
    statistics = class_statistics(*class_data(count=30))
    broken = CategoricalPredictive(torch.full((1, 5, 4), math.nan))
    found = block_of(statistics, {"broken": outside_of(broken)})["shift"]["broken"]
    assert (found["examples"], found["invalid"]) == (5, 5)
    assert math.isnan(found["by"]["entropy"]["auroc"])
    assert found["by"]["entropy"]["outside"].sum() == 0


@pytest.mark.parametrize(("inside", "outside"), [(1, 1), (3, 1), (1, 3)])
def test_of_one_draw_nothing_is_epistemic(inside, outside):
    logits, targets = class_data(count=50, draws=3)
    other = outside_of(CategoricalPredictive(logits[:outside]))
    found = block_of(class_statistics(logits[:inside], targets), {"same": other})["shift"]
    assert set(found["same"]["by"]) == {"entropy", "maximum_probability"}


def test_a_loader_of_another_kind():
    statistics = class_statistics(*class_data(count=30))
    other = outside_of(CategoricalPredictive(torch.zeros(1, 5, 7)))
    for name, wrong in (("sevens", other), ("empty", Statistics())):
        with pytest.raises(
            ConfigurationError, match=rf"net is .*classes: 4\), net, ood\['{name}'\]"
        ):
            document_of({"net": statistics}, {"net": {name: wrong}})
