"""Pruning curves in reports: the right numbers, on the right data, and only where asked for."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import DrawsPosterior, GaussianPosterior, prune_curve
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.report import report_posteriors
from lightning_bnn.report.figures import calibration_figures
from lightning_bnn.report.numbers import report_numbers
from lightning_bnn.report.pruning import Batches, check_pruning, pruning_block
from lightning_bnn.report.statistics import Statistics
from tests.report.pruning_blocks import OF_CLASSES, hand_made


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def draws(count: int = 5) -> DrawsPosterior:
    states = [dict(net(seed).named_parameters()) for seed in range(count)]
    return DrawsPosterior(net(), Categorical(), states)


def gaussian() -> GaussianPosterior:
    generator = torch.Generator().manual_seed(1)
    mean = {name: value.detach() for name, value in net().named_parameters()}
    sd = {name: torch.rand(value.shape, generator=generator) for name, value in mean.items()}
    return GaussianPosterior(net(), Categorical(), mean, sd)


def data(count: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


def by_hand(count: int, fraction: float) -> dict[str, float]:
    """Accuracy and NLL of draws whose weights of lowest |mean|/sd are zero, in plain NumPy."""
    states = [{n: p.detach().double().numpy() for n, p in net(s).named_parameters()}
              for s in range(count)]  # fmt: skip
    names = ["0.weight", "2.weight"]
    ratios = {}
    for name in names:
        stack = np.stack([state[name] for state in states])
        ratios[name] = np.abs(stack.mean(0)) / stack.std(0, ddof=1)
    best = {name: ratios[name] == ratios[name].max() for name in names}
    order = sorted(r for name in names for r in ratios[name][~best[name]])
    removed = round(fraction * sum(r.size for r in ratios.values()))
    limit = order[removed - 1] if removed else -1.0
    inputs, targets = (part.numpy() for part in data().tensors)
    probabilities = []
    for state in states:
        first, second = (
            np.where((ratios[name] <= limit) & ~best[name], 0.0, state[name]) for name in names
        )
        hidden = np.maximum(inputs @ first.T + state["0.bias"], 0)
        powers = np.exp(hidden @ second.T + state["2.bias"])
        probabilities.append(powers / powers.sum(1, keepdims=True))
    mean = np.mean(probabilities, axis=0)
    accuracy = float((mean.argmax(1) == targets).mean())
    return {"accuracy": accuracy, "nll": log_loss(targets, mean, labels=[0, 1, 2])}


def test_same_as_by_hand_on_the_data_of_the_report() -> None:
    fractions = (0.0, 0.4, 0.9)
    state = torch.get_rng_state()
    made = report_posteriors(
        {"draws": draws(), "plain": net(3)},
        DataLoader(data(), batch_size=16, shuffle=True),
        pruning=fractions,
    )
    assert torch.equal(torch.get_rng_state(), state)
    block, plain = made.numbers["models"]
    for fraction, result in zip(fractions, block["pruning"]["results"], strict=True):
        wanted = by_hand(5, fraction)
        found = {name: result["scores"][name] for name in wanted}
        assert found == pytest.approx(wanted, abs=1e-5)
        assert result["removed"] == round(fraction * 56)
    whole = block["pruning"]["results"][0]["scores"]
    assert whole["nll"] == pytest.approx(block["scalars"]["nll"], abs=1e-6)
    assert set(plain["pruning"]) == {"unavailable", "text"}
    said = {line["model"]: line["text"] for line in made.numbers["summary"]
            if "remov" in line["text"] or "pruning" in line["text"]}  # fmt: skip
    assert said == {"draws": block["pruning"]["text"], "plain": plain["pruning"]["text"]}
    assert made.numbers["format"] == 1
    assert json.loads(json.dumps(made.numbers, allow_nan=False)) == made.numbers
    assert "no pruning by signal to noise" in str(made)


def test_not_asked() -> None:
    made = report_posteriors({"draws": draws()}, DataLoader(data(), batch_size=16))
    assert "pruning" not in made.numbers["models"][0]


@pytest.mark.parametrize(
    ("fractions", "message"),
    [([0.5, 1.0], "1.0"), ([-0.1], "-0.1"), ([], "empty"), ("0.5", "0.5"), ([0.99], "54 can go")],
)
def test_bad_fractions_are_refused_before_the_work(fractions: Any, message: str) -> None:
    class Once(DrawsPosterior):
        def predict(self, inputs: Any, draws: Any = None, seed: Any = None) -> Any:
            assert draws == 1, "only tried"
            return super().predict(inputs, draws)

    states = [dict(net(seed).named_parameters()) for seed in range(3)]
    posterior = Once(net(), Categorical(), states)
    with pytest.raises(ConfigurationError, match=message):
        report_posteriors({"net": posterior}, DataLoader(data(), batch_size=16), pruning=fractions)


def test_what_has_no_variances_passes_the_check() -> None:
    check_pruning(draws(1), [0.5])
    with pytest.raises(ConfigurationError, match="54 can go"):
        check_pruning(gaussian(), [0.0, 0.99])


def test_a_block_is_read_again_for_each_fraction() -> None:
    passes = []

    def read() -> Any:
        passes.append(len(passes))
        yield tuple(data().tensors)

    block = pruning_block(gaussian(), Batches(read), [0.9, 0.0, 0.5], draws=2)
    assert [one["fraction"] for one in block["results"]] == [0.0, 0.5, 0.9]
    assert len(passes) >= 3
    assert block["total"] == 56
    again = pruning_block(gaussian(), Batches(read), [0.0, 0.5, 0.9], draws=2)
    assert again == block


def test_what_is_not_finite_is_null() -> None:
    statistics = Statistics(bins=5)
    statistics.update(gaussian().predict(data().tensors[0], 2, 0), data().tensors[1])
    block = hand_made({**OF_CLASSES, "nll": [float("inf"), *[1.0] * 6]})
    numbers = report_numbers({"net": statistics}, pruning={"net": block})
    assert numbers["models"][0]["pruning"]["results"][0]["scores"]["nll"] is None


# -------------------------------------------------------------------- figures


def figures(pruning: list[dict[str, Any] | None]) -> dict[str, Any]:
    curve = {"edges": [0, 0.5, 1], "count": [0, 8], "stated": [None, 0.8],
             "came": [None, 0.75], "lower": [None, 0.4], "upper": [None, 1.0]}  # fmt: skip
    models = [
        {
            "name": f"net {at}",
            "verdict": {"label": "calibrated"},
            "scalars": {"ece": 0.05},
            "reliability": {"width": curve, "mass": curve},
            "confidence": {"edges": [0, 0.5, 1], "right": [0, 6], "wrong": [0, 2]},
            **({} if one is None else {"pruning": one}),
        }
        for at, one in enumerate(pruning)
    ]
    return calibration_figures({"task": "classes", "models": models})


def test_figures_for_loggers() -> None:
    block = hand_made(OF_CLASSES)
    assert set(figures([None])) == {"calibration"}
    assert set(figures([{"unavailable": "one draw"}])) == {"calibration"}
    made = figures([{"unavailable": "one draw"}, block])
    assert set(made) == {"calibration", "pruning_histogram", "pruning_curve"}
    assert made["pruning_curve"].get_suptitle() == "net 1"
    assert figures([block])["pruning_curve"].get_suptitle() == ""
    names = {f"pruning_{kind}_{at}" for kind in ("histogram", "curve") for at in (1, 3)}
    assert set(figures([block, None, block])) == {"calibration", *names}


def test_curves_that_were_made_before() -> None:
    loader = DataLoader(data(), 20)
    both = {"draws": draws(), "gaussian": gaussian()}
    curve = prune_curve(both["gaussian"], loader, (0.0, 0.5), unit="channel", draws=3)
    made = report_posteriors(both, loader, draws=3, pruning={"gaussian": curve})
    first, second = made.numbers["models"]
    assert first.get("pruning") is None
    assert second["pruning"]["unit"] == "channel"
    found = [one["remaining"] for one in second["pruning"]["results"]]
    assert found == [one.remaining for one in curve.results] == [8, 4]
    with pytest.raises(ConfigurationError, match=r"curve of 'other', which is no model.*'draws'"):
        report_posteriors(both, loader, pruning={"other": curve})
