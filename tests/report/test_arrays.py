"""Reports from plain arrays: the same numbers as by hand, and errors that say what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import log_loss, roc_auc_score

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.predictive import CategoricalPredictive, GaussianPredictive
from lightning_bnn.report import arrays, report


def classes(count: int = 400, draws: int | None = None, seed: int = 0) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    shape = (count,) if draws is None else (draws, count)
    probabilities = generator.dirichlet([1.0, 1.0, 1.0], size=shape)
    mean = probabilities if draws is None else probabilities.mean(0)
    targets = np.array([generator.choice(3, p=row / row.sum()) for row in mean])
    return probabilities, targets


def block(made: Any, index: int = 0) -> dict[str, Any]:
    return made.numbers["models"][index]


# -------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("kind", ["numpy", "float32", "torch", "list", "reversed", "readonly"])
def test_any_array(kind: str) -> None:
    probabilities, targets = classes(60)
    given: Any = {
        "numpy": probabilities,
        "float32": probabilities.astype(np.float32),
        "torch": torch.from_numpy(probabilities).requires_grad_(),
        "list": probabilities.tolist(),
        "reversed": probabilities[::-1, ::-1][::-1, ::-1],
        "readonly": probabilities.view(),
    }[kind]
    if kind == "readonly":
        given.flags.writeable = False
    wanted = log_loss(targets, probabilities)
    found = block(report(given, targets.tolist()))["scalars"]["nll"]
    assert found == pytest.approx(wanted, abs=1e-6)


def test_draws_are_mixed() -> None:
    probabilities, targets = classes(draws=5)
    found = block(report(probabilities, targets))
    assert found["draws"] == 5
    mean = probabilities.mean(0)
    entropy = stats.entropy(mean, axis=1).mean()
    expected = stats.entropy(probabilities, axis=2).mean()
    assert found["scalars"]["nll"] == pytest.approx(log_loss(targets, mean), abs=1e-10)
    assert found["scalars"]["entropy"] == pytest.approx(entropy, abs=1e-10)
    assert found["scalars"]["epistemic"] == pytest.approx(entropy - expected, abs=1e-10)


def test_yes_or_no() -> None:
    generator = np.random.default_rng(1)
    yes = np.concatenate([generator.uniform(size=300), [0.0, 1.0]])
    came = np.concatenate([generator.uniform(size=300) < yes[:300], [False, True]])
    for targets in (came, came.astype(int)):
        made = report(yes, targets)
        assert made.numbers["data"]["classes"] == 2
        assert block(made)["scalars"]["nll"] == pytest.approx(log_loss(came, yes), abs=1e-10)


def test_numbers_with_draws_and_outputs() -> None:
    generator = np.random.default_rng(3)
    means = generator.normal(size=(4, 50, 2))
    targets = generator.normal(size=(50, 2))
    made = report(means, targets, scales=0.7)
    components = stats.norm(means, 0.7).logpdf(targets).sum(2)  # outputs within a draw first
    wanted = -np.log(np.exp(components).mean(0)).mean()
    assert block(made)["scalars"]["nll"] == pytest.approx(wanted, abs=1e-10)
    assert made.numbers["data"]["examples"] == 50
    assert made.numbers["data"]["rows"] == 100


def test_several_models_shift_and_validation() -> None:
    probabilities, targets = classes(300)
    bold = probabilities**2 / (probabilities**2).sum(1, keepdims=True)
    validation, validation_targets = classes(200, seed=5)
    strange = np.full((100, 3), 1 / 3)
    made = report(
        {"true": probabilities, "bold": bold},
        targets,
        ood={"flat": {"true": strange, "bold": strange}},
        validation=(
            {"true": validation, "bold": validation**2 / (validation**2).sum(1, keepdims=True)},
            validation_targets,
        ),
        class_names=["a", "b", "c"],
    )
    first, second = made.numbers["models"]
    assert made.numbers["comparison"]["columns"] == ["true", "bold"]
    assert made.numbers["data"]["class_names"] == ["a", "b", "c"]
    entropy = stats.entropy(probabilities, axis=1)
    label = np.repeat([0, 1], [300, 100])
    wanted = roc_auc_score(label, np.concatenate([entropy, stats.entropy(strange, axis=1)]))
    assert first["shift"]["flat"]["by"]["entropy"]["auroc"] == pytest.approx(wanted, abs=1e-6)
    assert second["temperature"]["fitted_on"] == "validation"
    # squaring the probabilities is undone by a temperature twice as high
    ratio = second["temperature"]["value"] / first["temperature"]["value"]
    assert ratio == pytest.approx(2, abs=1e-6)


@pytest.mark.parametrize("draws", [1, 3])
def test_shift_of_numbers(draws: int) -> None:
    generator = np.random.default_rng(4)
    means, sd = generator.normal(size=(draws, 60)), generator.uniform(0.5, 2, size=60)
    strange, wide = generator.normal(size=(draws, 40)), generator.uniform(1, 3, size=40)
    if draws == 1:
        means, strange = means[0], strange[0]
    made = report(means, np.zeros(60), scales=sd, ood={"far": (strange, wide)})
    spread = (means.var(0), strange.var(0)) if draws > 1 else (0.0, 0.0)
    score = np.concatenate([sd**2 + spread[0], wide**2 + spread[1]])
    wanted = roc_auc_score(np.repeat([0, 1], [60, 40]), score)
    found = block(made)["shift"]["far"]["by"]["sd"]["auroc"]
    assert found == pytest.approx(wanted, abs=1e-6)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities, targets = classes(100, draws=2)
    options: dict[str, Any] = {"ood": {"other": probabilities[:, :37]}}
    whole = report(probabilities, targets, **options).numbers
    monkeypatch.setattr(arrays, "_CHUNK", 6 * 7)  # seven examples at a time
    parts = report(probabilities, targets, **options).numbers
    assert parts["models"][0]["scalars"] == pytest.approx(whole["models"][0]["scalars"], abs=1e-12)
    assert parts["models"][0]["shift"] == whole["models"][0]["shift"]


# -------------------------------------------------------------------- bad input


def test_nan_is_counted_and_named() -> None:
    probabilities, targets = classes(60)
    probabilities[7] = np.nan
    probabilities[31, 0] = np.nan
    made = report(probabilities, targets)
    assert block(made)["invalid"]["count"] == 2
    assert block(made)["invalid"]["examples"] == [7, 31]
    assert any(line["level"] == "bad" and "31" in line["text"] for line in made.numbers["summary"])
    sd = np.ones(60)
    sd[5] = np.nan
    assert block(report(np.zeros(60), np.zeros(60), scales=sd))["invalid"]["examples"] == [5]


def test_sums() -> None:
    probabilities, targets = classes(60)
    probabilities[11] *= 0.5
    with pytest.raises(DataError, match=r"row 11 sums to 0\.5 \(1 of 60 rows"):
        report(probabilities, targets)
    with pytest.raises(DataError, match=r"row 11 of draw 1 sums to 0\.5"):
        report(np.stack([classes(60)[0], probabilities]), targets)


@pytest.mark.parametrize("value", [-0.2, 3.0, np.inf, -np.inf])
def test_logits(value: float) -> None:
    probabilities, targets = classes(60)
    probabilities[4, 1] = value
    with pytest.raises(DataError, match=r"at \[4, 1\].*softmax"):
        report(probabilities, targets)
    with pytest.raises(DataError, match=r"at \[1\].*exp"):
        report(np.array([0.5, value, 0.1]), [0, 1, 0])


HALVES, ZEROS, ONES = np.full((30, 2), 0.5), np.zeros(30, int), np.ones(30)
CASES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "one column": (np.ones((30, 1)), ZEROS, {}, r"\(N,\) for yes or no.*\(30, 1\)"),
    "empty": (np.ones((0, 3)), np.zeros(0, int), {}, r"\(0, 3\)"),
    "text": (np.array(["a", "b"]), [0, 1], {}, "array of numbers"),
    "length": (HALVES, np.zeros(29, int), {}, "targets has 29 examples.* have 30"),
    "one-hot": (HALVES, np.eye(2)[ZEROS], {}, "one-hot"),
    "range": (HALVES, np.r_[np.zeros(29, int), 2], {}, "target 29 of this batch is 2"),
    "numbers": (HALVES, np.full(30, 0.3), {}, r"target 0 of this batch is 0\.3"),
    "few": (np.full((9, 2), 0.5), np.zeros(9, int), {}, "at least 15 rows; 'model' has 9"),
    "ood": (HALVES, ZEROS, {"ood": {"other": np.full((30, 4), 0.25)}}, r"'other'.*classes: 4"),
    "validation": (HALVES, ZEROS, {"validation": HALVES}, r"pair \(predictions, targets\)"),
    "validation classes": (
        HALVES, ZEROS, {"validation": (np.full((30, 4), 0.25), ZEROS)}, "classes: 4"
    ),
    "inputs": (HALVES, ZEROS, {"inputs": np.ones((9, 1, 8, 8))}, "inputs has 9"),
    "no scale": ({"a": ONES, "b": ONES}, ONES, {"scales": {"a": 1}}, r"\['b'\].*no scales"),
    "scale": (ONES, ONES, {"scales": np.r_[np.ones(29), -2]}, "smallest is -2"),
    "scale shape": (ONES, ONES, {"scales": np.ones(29)}, r"\(29,\)"),
    "column": (np.ones((30, 1)), ONES, {"scales": 1.0}, r"\(30, 1\)"),
    "target": (ONES, np.r_[np.ones(29), np.nan], {"scales": 1.0}, "number 29 .* is nan"),
    "ood pair": (ONES, ONES, {"scales": 1.0, "ood": {"o": np.ones(3)}}, "pair"),
    "no model": ({}, [0], {}, "at least one model"),
    "temperature": (ONES, ONES, {"scales": 1.0, "validation": (ONES, ONES)}, "temperature"),
    "tasks": (
        {"a": GaussianPredictive(torch.ones(1, 30), torch.tensor(1.0)),
         "b": CategoricalPredictive(torch.zeros(1, 30, 3))}, ZEROS, {}, "one task",
    ),
    "missing": (
        {"a": HALVES, "b": HALVES}, ZEROS, {"ood": {"other": {"a": HALVES}}}, "'b' is missing"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_says_what_is_wrong(case: str) -> None:
    predictions, targets, options, text = CASES[case]
    with pytest.raises((DataError, ConfigurationError), match=text):
        report(predictions, targets, **options)


def forest(count: int = 600) -> tuple[Any, Any, Any]:
    """Votes of ten trees on three classes: every probability is a tenth."""
    generator = np.random.default_rng(0)
    votes = generator.multinomial(10, [0.55, 0.25, 0.2], count)
    votes = np.array([generator.permutation(row) for row in votes])
    targets = np.array([generator.choice(3, p=row / 10) for row in votes])
    return votes, votes / 10, targets


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("draws", [1, 3])
def test_tenths_meet_their_edges_and_tie(dtype, draws):
    votes, p, targets = forest()
    block = report(np.stack([p.astype(dtype)] * draws), targets, bins=20).numbers["models"][0]
    top, right = votes.max(1), votes.argmax(1) == targets
    gaps = [abs((top == k).sum() * k / 10 - right[top == k].sum()) for k in np.unique(top)]
    assert block["scalars"]["ece"] == pytest.approx(sum(gaps) / len(top), abs=1e-9)
    counts = np.zeros(20)
    for k in np.unique(top):
        counts[min(2 * k, 19)] = (top == k).sum()
    assert block["reliability"]["width"]["count"] == counts.tolist()
    area, before, wrong = 0.0, 0, 0.0  # ties in the order of chance, written as a loop
    for k in np.unique(top)[::-1]:
        size, errors = (top == k).sum(), (~right[top == k]).sum()
        area += sum((wrong + errors * i / size) / (before + i) for i in range(1, size + 1))
        before, wrong = before + size, wrong + errors
    assert block["scalars"]["aurc"] == pytest.approx(area / len(top), abs=1e-12)
