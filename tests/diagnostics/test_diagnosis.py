from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.diagnostics import Diagnosis, diagnose
from lightning_bnn.diagnostics.examples import evenly_spaced
from lightning_bnn.diagnostics.statistics import compute_statistics
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.posteriors import MixturePosterior
from tests.diagnostics.chains import autoregressive, chained, independent_draws, interleave

INPUTS = torch.randn(30, 2, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(30) % 3


def of(values: np.ndarray) -> Diagnosis:
    """The diagnosis of scalars by themselves."""
    labels = [f"prediction[{index}]" for index in range(values.shape[2])]
    chains, draws = values.shape[:2]
    return Diagnosis(chains, draws, {"prediction": compute_statistics(values, labels)}, {})


def noise(chains: int, draws: int, scalars: int = 3) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(chains, draws, scalars))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


def test_chains_that_agree() -> None:
    diagnosis = of(noise(4, 500))
    assert diagnosis.converged
    assert diagnosis.max_rhat == diagnosis.rhat.max()
    assert diagnosis.min_ess == min(diagnosis.ess_bulk.min(), diagnosis.ess_tail.min())
    assert diagnosis.chain_ess.shape == (4, 3)
    assert "enough draws" in diagnosis.advice
    assert "converged: yes" in str(diagnosis)
    short = of(noise(4, 90, 1))
    assert short.converged
    assert short.min_ess < 400
    assert "and 400 are recommended: run longer" in short.advice
    alone = of(noise(1, 2000))  # may be good, but has nothing to compare
    assert alone.converged
    assert alone.advice.endswith("Run four or more (chains=4).")
    assert str(alone).startswith("1 chain of 2000 draws\n")


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        (noise(4, 100) + 2 * np.eye(4)[:, :1, None], "different modes.*Keep all chains"),
        (noise(4, 100) + np.linspace(0, 9, 100)[:, None], "still drift.*longer burn-in"),
        (autoregressive(0.99, (4, 100, 3)), "still drift or move slowly"),
        (autoregressive(0.8, (4, 100, 3)) + 2 * np.eye(4)[:, :1, None], "still drift or move"),
        (noise(2, 30) + 0.3 * np.arange(2)[:, None, None], "30 draws per chain are too few.*2,000"),
        (noise(2, 30) + 9 * np.arange(2)[:, None, None], "about its own place"),
        (np.where(np.arange(100)[:, None] == 50, np.nan, noise(4, 100)), "NaN or infinity"),
        (np.ones((4, 100, 3)), "Nothing moves"),
        (noise(1, 400) + np.linspace(0, 9, 400)[:, None], "One chain cannot disagree"),
    ],
)
def test_what_is_wrong_and_what_to_do(values: np.ndarray, advice: str) -> None:
    diagnosis = of(values)
    assert not diagnosis.converged
    assert re.search(advice, diagnosis.advice)
    assert "converged: no" in str(diagnosis)


def test_advice_hides_no_disagreement_and_fits_every_sampler() -> None:
    for values in (noise(4, 100) + 2 * np.eye(4)[:, :1, None], autoregressive(0.99, (4, 100, 3))):
        assert not re.search("closer|momentum|friction", of(values).advice)


@pytest.mark.parametrize(
    ("chains", "draws", "least", "apart"), [(2, 4, 20, 0.0), (2, 19, 20, 9.0), (1, 39, 40, 0.0)]
)
def test_so_few_draws_tell_nothing(chains: int, draws: int, least: int, apart: float) -> None:
    """Of 40 sets of 20 independent scalars R-hat passed 1.5 in all of 2 x 4, in 10 of 1 x 20."""
    values = noise(chains, draws, 20) + apart * np.arange(chains)[:, None, None]
    advice = of(values).advice
    assert f"{draws} draws per chain are too few to judge by it" in advice
    assert f"collect at least {least} per chain" in advice
    assert "too few to judge" not in of(noise(chains, 2000 // chains, 20)).advice


def test_constant_scalars_are_named() -> None:
    values = noise(4, 200, 8)
    values[:, :, 2:7] = 0.0
    diagnosis = of(values)
    assert diagnosis.converged
    assert diagnosis.constant == tuple(f"prediction[{i}]" for i in range(2, 7))
    text = "constant: 5 (prediction[2], prediction[3], prediction[4] and 2 more)"
    assert text in str(diagnosis)


def test_of_a_posterior() -> None:
    net = network()
    posterior = chained(net, Categorical(), independent_draws(net, 2400), 4)
    loader = DataLoader(TensorDataset(INPUTS, CLASSES), batch_size=7, shuffle=True)
    diagnosis = diagnose(posterior, loader, weights=["*", "!2.bias"], examples=10, elements=20)
    assert (diagnosis.chains, diagnosis.draws) == (4, 600)
    assert list(diagnosis.function) == ["mean_log_likelihood", "prediction"]
    assert list(diagnosis.weights) == ["0.weight", "0.bias", "2.weight"]
    labels = diagnosis.function["prediction"].labels
    assert len(labels) == 20
    # by the place in the data set
    places = {int(label[len("prediction[") :].split(",")[0]) for label in labels}
    assert places <= set(evenly_spaced(30, 10))
    assert diagnosis.converged
    lines = str(diagnosis).splitlines()
    assert lines[0] == "4 chains of 600 draws"
    assert max(map(len, lines)) <= 100
    assert [line.split()[:2] for line in lines[3:9]] == [
        ["function", "space"], ["mean_log_likelihood", "1"], ["prediction", "20"],
        ["weights"], ["0.weight", "8"], ["0.bias", "4"],
    ]  # fmt: skip
    row, prediction = lines[5].split(), diagnosis.function["prediction"]
    least = min(prediction.ess_tail)
    assert (row[2], row[4]) == (f"{prediction.max_rhat:.3f}", f"{least:.0f}")
    assert " ".join(row[6:]) == labels[int(np.argmax(prediction.rhat))]


def permuted(draw: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same function with its hidden units in another order."""
    order = torch.tensor([2, 3, 0, 1])
    return {
        "0.weight": draw["0.weight"][order],
        "0.bias": draw["0.bias"][order],
        "2.weight": draw["2.weight"][:, order],
        "2.bias": draw["2.bias"],
    }


def test_permuted_hidden_units_are_no_disagreement() -> None:
    """Two chains about one mode, one of them with its hidden units in another order."""
    net = network()
    centre = independent_draws(net, 1, seed=5)[0]
    chains = [
        [{k: centre[k] + 0.1 * d[k] for k in d} for d in independent_draws(net, 150, seed)]
        for seed in (0, 1)
    ]
    chains[1] = [permuted(draw) for draw in chains[1]]
    posterior = chained(net, Categorical(), interleave(*chains), 2)
    diagnosis = diagnose(posterior, (INPUTS, CLASSES), weights="*")
    assert diagnosis.converged
    assert diagnosis.weights["0.weight"].max_rhat > 1.5


def test_a_common_shift_of_all_logits_is_no_disagreement() -> None:
    net = network()
    one, other = (independent_draws(net, 1000, seed) for seed in (0, 1))
    for draw in other:
        draw["2.bias"] = draw["2.bias"] + 3.0
    posterior = chained(net, Categorical(), interleave(one, other), 2)
    diagnosis = diagnose(posterior, (INPUTS, CLASSES), weights="2.bias")
    assert diagnosis.converged
    assert diagnosis.weights["2.bias"].max_rhat > 1.05
    for draw in other:  # of one logit only
        draw["2.bias"] = draw["2.bias"] + torch.tensor([3.0, 0.0, 0.0])
    parts = [chained(net, Categorical(), draws, 1) for draws in (one, other)]
    diagnosis = diagnose(MixturePosterior(parts), (INPUTS, CLASSES))
    assert (diagnosis.chains, diagnosis.draws) == (2, 1000)
    assert not diagnosis.converged
    assert diagnosis.function["mean_log_likelihood"].max_rhat > 1.05


class Named(nn.Module):
    """Parameters that have the names of predictions, of axes, and a slash."""

    names = ("prediction", "mean_log_likelihood", "example", "target", "a/b")

    def __init__(self) -> None:
        super().__init__()
        for size, name in enumerate(self.names, start=1):
            self.register_parameter(name, nn.Parameter(torch.ones(size)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.mean_log_likelihood[:, None] + self.prediction


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_inputs_get_the_precision_of_the_draws(dtype: torch.dtype) -> None:
    net = network().to(dtype)
    draws = [{k: v.to(dtype) for k, v in d.items()} for d in independent_draws(net, 40)]
    posterior = chained(net, Categorical(), draws, 2)
    found = diagnose(posterior, DataLoader(TensorDataset(INPUTS, CLASSES), batch_size=8))
    expected = diagnose(posterior, (INPUTS.to(dtype), CLASSES))
    np.testing.assert_array_equal(found.rhat, expected.rhat)


def test_weights_alone() -> None:
    net = network()
    diagnosis = diagnose(chained(net, Categorical(), independent_draws(net, 2400), 4), None, "*")
    assert diagnosis.function == {}
    assert diagnosis.converged
    assert "function space" not in str(diagnosis)


@pytest.mark.parametrize(
    ("count", "chains", "options", "message"),
    [
        (12, 4, {}, "at least 4 draws per chain with 4 chains; got 3"),
        (7, 1, {}, "at least 8 draws per chain with 1 chain; got 7"),
        (16, 4, {"elements": 0}, "elements= is a whole number, at least 1; got 0"),
        (16, 4, {"examples": 0}, "examples= is a whole number, at least 1; got 0"),
        (16, 4, {"inputs": None}, "nothing to watch: pass inputs="),
    ],
)
def test_bad_input(count: int, chains: int, options: Any, message: str) -> None:
    net = network()
    posterior = chained(net, Categorical(), independent_draws(net, count), chains)
    with pytest.raises(ConfigurationError, match=message):
        diagnose(posterior, **{"inputs": INPUTS, **options})
