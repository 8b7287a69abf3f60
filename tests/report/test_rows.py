"""Every column against a loop over single rows with SciPy, and the edge cases by hand."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_bnn.errors import DataError
from lightning_bnn.predictive import (
    BernoulliPredictive,
    CategoricalPredictive,
    GaussianPredictive,
    PoissonPredictive,
)
from lightning_bnn.report.rows import make_rows
from tests.report.predictions import class_data, regression_data


def softmax(values):
    exponentials = [math.exp(value - max(values)) for value in values]
    return [value / sum(exponentials) for value in exponentials]


def test_class_columns_equal_a_loop():
    logits, targets = class_data(count=40, classes=5)
    rows = make_rows(CategoricalPredictive(logits), targets, np.arange(40))
    for i in range(40):
        draws = np.array([softmax(draw[i].tolist()) for draw in logits])
        p, y = draws.mean(0), int(targets[i])
        top = max(range(5), key=lambda k: p[k])
        entropy = stats.entropy(p)
        logs = [math.log(value) for value in p]
        expected = {
            "target": y,
            "predicted": top,
            "confidence": p[top],
            "correct": float(top == y),
            "nll": -math.log(p[y]),
            "brier": sum((p[k] - (k == y)) ** 2 for k in range(5)),
            "entropy": entropy,
            "aleatoric": np.mean([stats.entropy(draw) for draw in draws]),
            "epistemic": entropy - np.mean([stats.entropy(draw) for draw in draws]),
            "score": math.log(p[y]) + entropy,
            "score_variance": sum(a * (b + entropy) ** 2 for a, b in zip(p, logs, strict=True)),
            "score_third": sum(a * (b + entropy) ** 3 for a, b in zip(p, logs, strict=True)),
            "which_class": 0.0 if top == y else -math.log(p[y] / (1 - p[top])),
        }
        assert set(rows.columns) == {*expected, "log_probabilities"}
        for name, value in expected.items():
            assert rows.columns[name][i] == pytest.approx(value, abs=1e-12), name
        np.testing.assert_allclose(rows.log_probabilities[i], np.log(p), atol=1e-12)


def test_positions_are_rows_of_their_example():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 3, 4, 2, 5, generator=generator)  # S, B, K, height, width
    targets = torch.randint(0, 4, (3, 2, 5), generator=generator)
    rows = make_rows(CategoricalPredictive(logits), targets, np.array([10, 11, 12]))
    assert rows.example.tolist() == [10] * 10 + [11] * 10 + [12] * 10
    assert rows.position.tolist() == list(range(10)) * 3
    p = logits.double().softmax(2).mean(0)
    example, place = 2, (1, 3)
    row = example * 10 + place[0] * 5 + place[1]
    expected = -p[example, targets[example, 1, 3], 1, 3].log()
    assert rows.columns["nll"][row] == pytest.approx(expected.item(), abs=1e-12)


def test_a_label_is_a_row_of_two_classes():
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(3, 6, 2, generator=generator)
    targets = torch.randint(0, 2, (6, 2), generator=generator).float()
    rows = make_rows(BernoulliPredictive(logits), targets, np.arange(6))
    yes = logits.double().sigmoid().mean(0).reshape(-1).numpy()
    came = targets.reshape(-1).numpy()
    assert len(rows) == 12
    np.testing.assert_allclose(np.exp(rows.log_probabilities), np.stack([1 - yes, yes], 1))
    np.testing.assert_allclose(rows.columns["brier"], (yes - came) ** 2)
    np.testing.assert_allclose(rows.columns["confidence"], np.maximum(yes, 1 - yes), atol=1e-6)
    np.testing.assert_allclose(rows.columns["correct"], (yes > 0.5) == (came == 1))
    expected = -np.log(np.where(came == 1, yes, 1 - yes))
    np.testing.assert_allclose(rows.columns["nll"], expected)


def test_probability_zero():
    # as report() gives probabilities: their logarithms
    logits = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.5, 0.5]]]).log()
    rows = make_rows(CategoricalPredictive(logits), torch.tensor([0, 1, 1]), np.arange(3))
    assert rows.columns["nll"].tolist() == pytest.approx([0.0, math.inf, math.log(2)])
    assert rows.columns["entropy"].tolist() == pytest.approx([0.0, 0.0, math.log(2)])
    assert rows.columns["score"].tolist() == pytest.approx([0.0, -math.inf, 0.0])
    assert rows.columns["score_variance"].tolist() == pytest.approx([0.0, 0.0, 0.0])
    assert rows.columns["which_class"].tolist() == pytest.approx([0.0, 0.0, 0.0])
    assert len(rows.invalid) == 0
    assert not any(np.isnan(column).any() for column in rows.columns.values())


def test_the_confidence_that_remains_is_not_rounded_away():
    logits = torch.tensor([[[0.0, -50.0, -51.0]]])  # 1 - max p is 0 in the probabilities
    rows = make_rows(CategoricalPredictive(logits), torch.tensor([2]), np.arange(1))
    expected = math.log(math.exp(-50) + math.exp(-51)) + 51
    assert rows.columns["which_class"][0] == pytest.approx(expected, rel=1e-9)


def test_examples_that_are_not_finite_are_left_out_whole_and_named():
    logits, targets = class_data(count=5, classes=3)
    logits[1, 2, 0] = math.nan  # one draw of three
    logits[0, 4, 1] = math.inf
    rows = make_rows(CategoricalPredictive(logits), targets, np.arange(20, 25))
    assert rows.invalid.tolist() == [22, 24]
    assert rows.example.tolist() == [20, 21, 23]
    places = torch.zeros(1, 2, 3, 4)
    places[0, 0, 0, 2] = math.nan
    rows = make_rows(CategoricalPredictive(places), torch.zeros(2, 4).long(), np.arange(2))
    assert rows.invalid.tolist() == [0]
    assert rows.example.tolist() == [1] * 4

    predictive, values = regression_data(count=4, outputs=2)
    predictive.means[0, 1, 1] = math.nan
    predictive = GaussianPredictive(predictive.means, predictive.scales)
    rows = make_rows(predictive, values, np.arange(4))
    assert rows.invalid.tolist() == [1]
    assert rows.example.tolist() == [0, 0, 2, 2, 3, 3]


def test_number_columns_equal_a_loop():
    predictive, targets = regression_data(count=12, outputs=2)
    rows = make_rows(predictive, targets, np.arange(12))
    means, scales = predictive.means.numpy(), predictive.scales.numpy()
    for i in range(24):
        example, output = divmod(i, 2)
        y = targets[example, output].item()
        parts = stats.norm(means[:, example, output], scales[:, example, output])
        joint = stats.norm(means[:, example], scales[:, example]).pdf(targets[example].numpy())
        grid = np.linspace(-12, 12, 20_001)
        cdf = np.mean(
            [
                stats.norm.cdf(grid, *pair)
                for pair in zip(parts.args[0], parts.args[1], strict=True)
            ],
            axis=0,
        )
        expected = {
            "target": y,
            "mean": means[:, example, output].mean(),
            "aleatoric": (scales[:, example, output] ** 2).mean(),
            "epistemic": means[:, example, output].var(),
            "pit": parts.cdf(y).mean(),
            "nll": -math.log(joint.prod(1).mean()),
        }
        expected["sd"] = math.sqrt(expected["aleatoric"] + expected["epistemic"])
        for name, value in expected.items():
            assert rows.columns[name][i] == pytest.approx(value, abs=1e-10), name
        crps = np.trapezoid((cdf - (grid >= y)) ** 2, grid)
        assert rows.columns["crps"][i] == pytest.approx(crps, abs=1e-3)


def test_randomised_pit_of_counts():
    """Uniform if the rates are true: Kolmogorov–Smirnov, false alarm 1e-4 for the fixed seed."""
    generator = torch.Generator().manual_seed(3)
    rates = torch.full((1, 4000), 0.7)
    targets = torch.poisson(rates[0], generator=generator)
    rows = make_rows(PoissonPredictive(rates.log()), targets, np.arange(4000))
    pit, counts = rows.columns["pit"], targets.numpy()
    assert stats.kstest(pit, "uniform").pvalue > 1e-4
    upper, lower = stats.poisson.cdf(counts, 0.7), stats.poisson.cdf(counts - 1, 0.7)
    assert ((pit > lower - 1e-6) & (pit < upper + 1e-6)).all()
    # the same whatever the batches
    part = make_rows(PoissonPredictive(rates.log()[:, 7:9]), targets[7:9], np.arange(7, 9))
    np.testing.assert_array_equal(part.columns["pit"], pit[7:9])


def test_targets_that_do_not_fit():
    predictive = CategoricalPredictive(torch.zeros(1, 3, 4))
    with pytest.raises(DataError, match=r"from 0 to 3; target 1 of this batch is -100"):
        make_rows(predictive, torch.tensor([0, -100, 1]), np.arange(3))
    with pytest.raises(DataError, match="one-hot"):
        make_rows(predictive, torch.zeros(3, 4), np.arange(3))
    with pytest.raises(DataError, match=r"target 0 of this batch is 0\.5"):
        make_rows(BernoulliPredictive(torch.zeros(1, 1)), torch.tensor([0.5]), np.arange(1))
    gaussian = GaussianPredictive(torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(DataError, match="finite targets; number 1 of this batch is nan"):
        make_rows(gaussian, torch.tensor([0.0, math.nan]), np.arange(2))
