"""Exact sums over any number of rows, in any split; what is kept stays bounded."""

import math
import pickle
import tracemalloc

import numpy as np
import pytest
import torch

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    PoissonPredictive,
)
from lightning_bnn.report.statistics import Statistics
from tests.callbacks.test_calibration_report import flat
from tests.report.predictions import class_data, class_statistics, document_of, regression_data


def assert_same_numbers(one, other):
    one, other = (flat(document_of({"net": each}) | {"made": "today"}) for each in (one, other))
    assert other == pytest.approx(one, rel=1e-9, abs=1e-9)


def split_statistics(update, count, parts, seed):
    """Statistics of several processes, each given its batches in an order of its own, merged."""
    generator = np.random.default_rng(seed)
    total = Statistics(bins=10, keep=150)
    for share in np.array_split(generator.permutation(count), parts):
        process = Statistics(bins=10, keep=150)
        for rows in np.array_split(share, 3):
            if len(rows):
                update(process, torch.from_numpy(rows))
        total.merge(pickle.loads(pickle.dumps(process)))
    return total


@pytest.mark.parametrize("parts", [1, 5])
def test_any_split_gives_the_same_numbers_of_a_classification(parts):
    logits, targets = class_data(count=400, draws=2)
    logits[0, 17] = math.nan
    pictures = torch.rand(400, 1, 4, 4, generator=torch.Generator().manual_seed(1))

    def update(statistics, rows):
        predictive = CategoricalPredictive(logits[:, rows])
        statistics.update(predictive, targets[rows], rows, pictures[rows])

    whole = Statistics(bins=10, keep=150)
    update(whole, torch.arange(400))
    merged = split_statistics(update, 400, parts, seed=parts)
    assert merged.examples == 400
    assert merged.invalid.tolist() == [17]
    np.testing.assert_array_equal(merged.sample.example, whole.sample.example)
    assert_same_numbers(merged, whole)


def test_any_split_gives_the_same_numbers_of_a_regression():
    predictive, targets = regression_data(count=400, outputs=1)
    inputs = torch.linspace(-1, 1, 400)[:, None]

    def update(statistics, rows):
        part = GaussianPredictive(predictive.means[:, rows], predictive.scales[:, rows])
        statistics.update(part, targets[rows], rows, inputs[rows])

    whole = Statistics(bins=10, keep=150)
    update(whole, torch.arange(400))
    assert_same_numbers(split_statistics(update, 400, parts=3, seed=3), whole)


def test_many_rows_in_bounded_memory_with_exact_sums():
    generator = torch.Generator().manual_seed(0)
    statistics = Statistics(keep=5000)
    batch, batches = 10_000, 20
    sums = {"correct": 0.0, "nll": 0.0, "brier": 0.0}
    counts = np.zeros(15)
    held = []
    tracemalloc.start()
    for _ in range(batches):
        logits = 2 * torch.randn(1, batch, 3, generator=generator)
        targets = torch.randint(0, 3, (batch,), generator=generator)
        statistics.update(CategoricalPredictive(logits), targets)
        p = logits[0].double().softmax(1).numpy()
        y = targets.numpy()
        sums["correct"] += (p.argmax(1) == y).sum()
        sums["nll"] -= np.log(p[np.arange(batch), y]).sum()
        sums["brier"] += ((p - np.eye(3)[y]) ** 2).sum()
        counts += np.histogram(p.max(1), np.arange(16) / 15)[0]
        del logits, targets, p, y
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert statistics.rows == 200_000
    for name, total in sums.items():
        assert statistics.sums.mean(name) == pytest.approx(total / 2e5, rel=1e-9), name
    # float32 is taken to six digits: a few rows lie that close to an edge
    assert np.abs(statistics.sums.confidence.count[0] - counts).max() <= 10
    assert len(statistics.sample) == len(statistics.kept) == 5000
    assert max(held) < 5e6
    assert held[-1] < 1.5 * max(held[:10])
    numbers = document_of({"net": statistics})
    assert numbers["data"]["sampled"] == 5000
    assert "5,000 of 200,000 rows" in " ".join(line["text"] for line in numbers["summary"])


def test_the_probabilities_kept_are_bounded_with_many_classes(monkeypatch):
    monkeypatch.setattr("lightning_bnn.report.statistics.KEEP_NUMBERS", 1000)
    logits, targets = class_data(count=300, classes=20)
    statistics = class_statistics(logits, targets)
    assert len(statistics.kept) == 50
    assert len(statistics.sample) == 300
    assert set(statistics.kept.example) < set(statistics.sample.example)
    numbers = document_of({"net": statistics})
    assert numbers["data"]["sampled"] == 50
    assert numbers["models"][0]["scalars"]["nll"] == pytest.approx(statistics.sums.mean("nll"))


def test_what_does_not_go_together():
    logits, targets = class_data(count=20)
    statistics = class_statistics(logits, targets)
    with pytest.raises(ConfigurationError, match=r"classes: 4\), this one is .*classes: 2"):
        statistics.update(BernoulliPredictive(torch.zeros(1, 2)), torch.zeros(2))
    with pytest.raises(ConfigurationError, match=r"classes: 4\), this one is regression"):
        statistics.update(PoissonPredictive(torch.zeros(1, 2)), torch.zeros(2))
    with pytest.raises(ConfigurationError, match="bins >= 2, got 1"):
        Statistics(bins=1)
    with pytest.raises(ConfigurationError, match="at least 2 of them, got 1"):
        Statistics().update(CategoricalPredictive(torch.zeros(1, 3, 1)), torch.zeros(3).long())


def test_a_process_without_batches():
    logits, targets = class_data(count=20)
    statistics = class_statistics(logits, targets)
    statistics.merge(Statistics(bins=10))
    assert statistics.rows == 20
    empty = Statistics(bins=10)
    empty.merge(statistics)
    assert (empty.rows, empty.draws, empty.classes) == (20, 3, 4)
    assert Statistics().rows == 0
