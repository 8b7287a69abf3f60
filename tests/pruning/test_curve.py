"""Curves of pruning, against the same sums in NumPy, SciPy and scikit-learn."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp, softmax
from scipy.stats import norm, poisson
from sklearn.metrics import accuracy_score, log_loss
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import GaussianPosterior, MixturePosterior
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import Categorical, Gaussian, Likelihood, Poisson
from lightning_bnn.pruning import prune, support
from lightning_bnn.pruning.curve import (
    FRACTIONS,
    PruneCurve,
    PruningResult,
    prune_curve,
)
from lightning_bnn.pruning.histogram import snr_histogram
from tests.pruning.posteriors import gaussian_of

SHARES = (0.0, 0.3, 0.8)
DRAWS, SEED = 6, 5


def gaussian(likelihood: Likelihood, outputs: int = 3, seed: int = 0) -> GaussianPosterior:
    """A posterior of a net 5-7-outputs."""
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, outputs))
    return gaussian_of(net, seed=seed, likelihood=likelihood)


def examples(targets: str, count: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(9)
    inputs = torch.randn(count, 5, generator=generator)
    if targets == "classes":
        return TensorDataset(inputs, torch.randint(3, (count,), generator=generator))
    return TensorDataset(inputs, torch.randn(count, 1, generator=generator))


def prune_by_hand(posterior: GaussianPosterior, share: float) -> tuple[dict[str, Any], float, int]:
    """Keep-masks as arrays, the threshold and the count, by one sort in NumPy."""
    names = ["0.weight", "2.weight"]
    ratios = {n: (posterior.mean[n].abs() / posterior.sd[n]).numpy() for n in names}
    flat = np.concatenate([ratios[name].ravel() for name in names])
    count = round(share * flat.size)
    threshold = np.sort(flat)[count - 1] if count else -np.inf
    return {name: ratios[name] > threshold for name in names}, float(threshold), count


def outputs_by_hand(posterior: GaussianPosterior, masks: dict[str, Any], x: Tensor) -> np.ndarray:
    """Outputs of each draw, (draws, examples, outputs), in float64."""
    weights = posterior.sample(DRAWS, torch.Generator().manual_seed(SEED))
    own = {name: tensor.double().numpy() for name, tensor in weights.items()}
    own = {name: np.where(masks[name], w, 0.0) if name in masks else w for name, w in own.items()}
    hidden = np.einsum("ni,dhi->dnh", x.double().numpy(), own["0.weight"]) + own["0.bias"][:, None]
    hidden = np.maximum(hidden, 0)
    return np.einsum("dnh,doh->dno", hidden, own["2.weight"]) + own["2.bias"][:, None]


def test_scores_of_classes() -> None:
    posterior, data = gaussian(Categorical()), examples("classes")
    x, y = data.tensors
    curve = prune_curve(posterior, DataLoader(data, 16), SHARES, draws=DRAWS, seed=SEED)
    for result, share in zip(curve.results, SHARES, strict=True):
        masks, threshold, count = prune_by_hand(posterior, share)
        probabilities = softmax(outputs_by_hand(posterior, masks, x), axis=-1).mean(0)
        one_hot = np.eye(3)[y.numpy()]
        assert list(result.scores) == ["accuracy", "nll", "ece", "brier"]
        assert result.scores["accuracy"] == pytest.approx(
            accuracy_score(y.numpy(), probabilities.argmax(1))
        )
        assert result.scores["nll"] == pytest.approx(log_loss(y.numpy(), probabilities), rel=1e-5)
        assert result.scores["brier"] == pytest.approx(
            ((probabilities - one_hot) ** 2).sum(1).mean(), rel=1e-5
        )
        assert (result.fraction, result.removed, result.total) == (share, count, 56)
        assert result.remaining == 56 - count
        assert result.threshold == (pytest.approx(threshold) if count else None)
        for name, mask in masks.items():
            assert result.layers[name] == pytest.approx(1 - mask.mean())
    assert (curve.unit, curve.scope) == ("weight", "global")


@pytest.mark.parametrize("likelihood", [Gaussian(0.7), Poisson()])
def test_scores_of_regression_and_counts(likelihood: Likelihood) -> None:
    posterior, data = gaussian(likelihood, outputs=1), examples("real")
    x, y = data.tensors
    counts = isinstance(likelihood, Poisson)
    if counts:
        x, y = 0.1 * x, y.abs().mul(3).round()
    loader = DataLoader(TensorDataset(x, y), 16)
    curve = prune_curve(posterior, loader, SHARES, draws=DRAWS, seed=SEED)
    for result, share in zip(curve.results, SHARES, strict=True):
        outputs = outputs_by_hand(posterior, prune_by_hand(posterior, share)[0], x)
        means = np.exp(outputs) if counts else outputs
        values = y.double().numpy()
        logs = poisson.logpmf(values, means) if counts else norm.logpdf(values, means, 0.7)
        assert list(result.scores) == ["rmse", "nll", "crps", "coverage"]
        assert result.scores["nll"] == pytest.approx(
            -(logsumexp(logs, axis=0) - np.log(DRAWS)).mean(), rel=1e-5
        )
        assert result.scores["rmse"] == pytest.approx(
            np.sqrt(((means.mean(0) - values) ** 2).mean()), rel=1e-5
        )
        assert 0 <= result.scores["coverage"] <= 1


def test_plain_numbers_follow_the_agreed_shape() -> None:
    data = DataLoader(examples("classes"), 40)
    curve = prune_curve(gaussian(Categorical()), data, [0.8, 0, 0.3, 0.8], draws=2)
    block = json.loads(json.dumps(curve.to_dict(), allow_nan=False))
    assert set(block) == {"unit", "scope", "total", "score_names", "results", "histogram"}
    assert [result["fraction"] for result in block["results"]] == [0.0, 0.3, 0.8]
    for result, own in zip(block["results"], curve.results, strict=True):
        assert set(result) == {"fraction", "removed", "remaining", "threshold", "scores"}
        assert result["removed"] + result["remaining"] == block["total"] == 56
        assert list(result["scores"]) == block["score_names"]
        assert result["threshold"] == own.threshold
    for layer in block["histogram"]["layers"]:
        assert layer["removed"] == [result.layers[layer["name"]] for result in curve.results]
        assert layer["removed"] == sorted(layer["removed"])
    assert sum(layer["total"] for layer in block["histogram"]["layers"]) == 56


@pytest.mark.parametrize(
    ("options", "removed", "total"),
    [
        ({"scope": "layer"}, 22, 56),  # 14 of 35 and 8 of 21
        ({"protect": "2.*"}, 14, 35),
        ({"unit": "channel"}, 3, 7),
    ],
)
def test_options_decide_what_is_counted(options: dict[str, Any], removed: int, total: int) -> None:
    data = DataLoader(examples("classes"), 40)
    curve = prune_curve(gaussian(Categorical()), data, [0.4], draws=2, **options)
    (result,) = curve.results
    assert (result.removed, result.total) == (removed, total)
    assert sum(layer.total for layer in curve.histogram.layers) == total


def test_the_posterior_and_all_random_numbers_stay_as_they_are() -> None:
    posterior, data = gaussian(Categorical()), examples("classes")
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(data, 8, shuffle=True, generator=own)
    posterior.predict(data.tensors[0], 4)
    cache = posterior._cache
    states = torch.get_rng_state(), own.get_state()
    first = prune_curve(posterior, loader, SHARES, draws=3)
    assert torch.equal(states[0], torch.get_rng_state())
    assert torch.equal(states[1], own.get_state())
    assert posterior._cache is cache
    assert prune_curve(posterior, loader, SHARES, draws=3) == first  # the same order again
    metrics = posterior.likelihood.metrics()
    metrics.update(posterior.predict(data.tensors[0], 3), data.tensors[1])
    for name, value in metrics.compute().items():  # nothing removed is the posterior itself
        assert first.results[0].scores[name] == pytest.approx(float(value), rel=1e-5)
    assert prune_curve(posterior, loader, [0.3], draws=3, seed=1).results[0] != first.results[1]


def test_components_with_variances_are_counted_each() -> None:
    parts = [gaussian(Categorical(), seed=seed) for seed in (1, 2)]
    data = DataLoader(examples("classes"), 40)
    nested = MixturePosterior([MixturePosterior(parts), MixturePosterior(parts)])
    assert prune_curve(nested, data, [0.5], draws=4).results[0].total == 224
    curve = prune_curve(MixturePosterior(parts), data, [0, 0.5], draws=4)
    assert (curve.results[1].removed, curve.results[1].total) == (56, 112)
    single = [prune_curve(part, data, [0.5], draws=2).results[0] for part in parts]
    assert curve.results[1].threshold == max(one.threshold or 0 for one in single)
    assert curve.results[1].layers["0.weight"] == pytest.approx(
        np.mean([one.layers["0.weight"] for one in single])
    )
    assert sum(layer.total for layer in curve.histogram.layers) == 112


class Scaled(nn.Module):
    """The first layer cannot be followed; of those between it and the last, the first can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.one, self.two = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head((x * self.two(self.one(x).relu())).relu())


def test_single_weights_where_units_cannot_go() -> None:
    data = DataLoader(examples("classes"), 40)
    posterior = gaussian_of(Scaled())
    options: dict[str, Any] = {"unit": "channel", "rest": "weight"}
    curve = prune_curve(posterior, data, [0, 0.5], draws=2, **options)
    result = curve.results[1]
    assert (curve.single, result.total) == (30 + 24, 4 + 30 + 24)
    pruned = prune(posterior, 0.5, **options)
    gone = {name: 1 - float(mask.float().mean()) for name, mask in support(pruned).items()}
    assert set(result.layers) == {"one.weight", "first.weight", "two.weight"}
    for name, share in result.layers.items():
        assert share == pytest.approx(gone[name])
    assert result.removed == 2 + (30 + 24) // 2
    assert sum(layer.total for layer in curve.histogram.layers) == 58
    assert "4 units and 54 single weights by" in str(curve)
    assert json.loads(json.dumps(curve.to_dict()))["single"] == 54
    curve.figure()


def test_components_in_which_other_weights_vary() -> None:
    net = gaussian(Categorical()).net
    parts = [gaussian_of(net, fixed) for fixed in (("2.weight", "2.bias"), ("0.weight",))]
    data = DataLoader(examples("classes"), 40)
    curve = prune_curve(MixturePosterior(parts), data, [0, 0.4], draws=4)
    result = curve.results[1]
    assert (result.removed, result.total) == (14 + 8, 35 + 21)
    assert result.layers == {"0.weight": 14 / 35, "2.weight": 8 / 21}
    assert sum(layer.total for layer in curve.histogram.layers) == 56


class Unread:
    """A loader that must not be read."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read before the options were checked")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fractions": []}, "fractions= is empty"),
        ({"fractions": [0.5, 1.0]}, "got 1.0"),
        ({"fractions": [float("nan")]}, "got nan"),
        ({"fractions": "0.5"}, "list of shares"),
        ({"fractions": FRACTIONS}, "The largest fraction is 0.96"),  # 0.99 of 56 leaves one
        ({"draws": 0}, "draws= is a whole number, at least 1; got 0"),
        ({"protect": "none.*"}, "none.*"),
        ({"scope": "weight"}, "'weight'"),
    ],
)
def test_bad_options_come_before_any_work(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text.replace("*", r"\*")):
        prune_curve(gaussian(Categorical()), Unread(), **{"fractions": [0.5], **options})


def test_data_that_do_not_fit() -> None:
    posterior = gaussian(Categorical())
    with pytest.raises(DataError, match="loader is empty"):
        prune_curve(posterior, [], [0.5])
    with pytest.raises(DataError, match="does not go through the network"):
        prune_curve(posterior, [(torch.zeros(2, 4), torch.zeros(2).long())], [0.5])
    with pytest.raises(ConfigurationError, match="can be read several times"):
        prune_curve(posterior, iter([]), [0.5])
    with pytest.raises(DataError):
        prune_curve(posterior, [(torch.zeros(2, 5), torch.full((2,), 7))], [0.5])


def test_a_layer_that_only_just_stays_is_warned_of_once() -> None:
    posterior = gaussian(Categorical())
    posterior._mean[-24:] *= 1e-3  # the last layer has little signal
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prune_curve(posterior, DataLoader(examples("classes"), 40), [0.0, 0.5], draws=2)
    assert [("2.weight" in str(one.message)) for one in caught] == [True]


# --------------------------------------------------------------------------- what a curve can do

INFINITY, NAN = float("inf"), float("nan")


def made(losses: list[float]) -> PruneCurve:
    """A curve with these NLLs at 0 %, 10 %, 20 % and so on of ten weights."""
    results = tuple(
        PruningResult(0.1 * i, i, 10, 0.5 * i if i else None, {"nll": loss}, {"w": 0.1 * i})
        for i, loss in enumerate(losses)
    )
    ratios = torch.tensor([0.1, 0.2, 0.4, 0.8, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    return PruneCurve(results, snr_histogram({"w": ratios}), "weight", "global")


def test_best_is_the_largest_fraction_that_loses_little_enough() -> None:
    curve = made([0.5, 0.49, 0.52, 0.61, 0.53])
    for tolerance, expected in ((0.0, 1), (0.025, 2), (0.031, 4), (9.0, 4)):
        assert curve.best(tolerance) is curve.results[expected]
    assert made([0.5]).best(0.0).fraction == 0
    assert made([0.5, 0.5]).best(0.0).fraction == 0.1  # no loss is not too much
    assert made([0.5, 0.6, INFINITY, NAN]).best(0.2).fraction == 0.1
    assert made([NAN, NAN]).best(1.0).fraction == 0


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    results = tuple(
        PruningResult(fraction, 0, 1, INFINITY, {"nll": value, "ece": other})
        for fraction, value, other in [(0, 0.5, -INFINITY), (0.5, INFINITY, NAN)]
    )
    curve = PruneCurve(results, snr_histogram({"w": torch.ones(1)}), "weight", "global")
    block = json.loads(json.dumps(curve.to_dict(), allow_nan=False))
    assert [one["scores"] for one in block["results"]] == [
        {"nll": 0.5, "ece": None}, {"nll": None, "ece": None}
    ]  # fmt: skip
    assert [one["threshold"] for one in block["results"]] == [None, None]
    assert str(curve).splitlines()[-1].split() == ["50", "%", "1", "–", "–", "–"]


def test_the_ending_says_what_is_written(tmp_path: Path) -> None:
    curve = made([0.5, INFINITY])
    begins = {".png": b"\x89PNG", ".json": b"{"}
    for ending, first in begins.items():
        path = tmp_path / "new" / f"curve{ending}"
        assert curve.save(str(path)) == path
        assert path.read_bytes().startswith(first)
    assert json.loads(path.read_text()) == curve.to_dict()


@pytest.mark.parametrize("name", ["curve.txt", "curve", "s3://a/curve.png"])
def test_other_files_are_refused(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=rf"\.png, .*\.json \(the numbers\); got '{name}'"):
        made([0.5]).save(name)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------- its table


def printed(*rows: tuple[float, int, float | None, dict[str, float]], **options: Any) -> list[str]:
    """The lines of a table: fraction, how many are left, threshold and scores."""
    total = rows[0][1]
    results = tuple(
        PruningResult(fraction, total - left, total, threshold, scores)
        for fraction, left, threshold, scores in rows
    )
    histogram = snr_histogram({"w": torch.ones(1)})
    return str(PruneCurve(results, histogram, **{"unit": "weight", "scope": "global"} | options)
               ).splitlines()  # fmt: skip


def test_a_table_of_two_scores() -> None:
    assert printed(
        (0.0, 12345, None, {"accuracy": 0.9, "nll": 12.5}),
        (0.5, 6173, 0.0123456, {"accuracy": 0.95, "nll": 12.25}),
        (0.995, 62, 123.456, {"accuracy": 0.1, "nll": 112.5}),
    ) == [
        "12,345 weights by signal-to-noise ratio, one threshold for all layers",
        "removed    left  ratio up to  accuracy              nll",
        "    0 %  12,345            –    0.9000            12.50",
        "   50 %   6,173       0.0123    0.9500  +0.0500   12.25    -0.25",
        " 99.5 %      62          123    0.1000  -0.8000  112.50  +100.00",
    ]
    units = printed((0.0, 5000, None, {"nll": 0.5}), unit="channel", scope="layer")
    assert units[0] == "5,000 units by signal-to-noise ratio, the same share of each layer"


def test_scores_that_are_not_finite_leave_their_places_empty() -> None:
    lines = printed(
        (0.0, 4, None, {"nll": 0.5, "ece": NAN}),
        (0.25, 3, 0.1, {"nll": INFINITY, "ece": 0.25}),
        (0.5, 2, INFINITY, {"nll": 0.75, "ece": 0.5}),
    )
    assert [line.split() for line in lines[2:]] == [
        ["0", "%", "4", "–", "0.5000", "–"],
        ["25", "%", "3", "0.1", "–", "0.2500"],  # what is missing has no difference
        ["50", "%", "2", "–", "0.7500", "+0.2500", "0.5000"],  # nor does what has no first
    ]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ((0.123456, -0.5), ["0.1235", "-0.5000"]),
        ((1.23456, 12.3456), ["1.235", "12.346"]),  # as many places in each row
        ((0.5, 1234567.0), ["0.5", "1.235e+06"]),
    ],
)
def test_about_five_digits_are_shown(values: tuple[float, float], shown: list[str]) -> None:
    lines = printed(
        *((share, 1, None, {"s": v}) for share, v in zip((0, 0.5), values, strict=True))
    )
    assert [line.split()[4] for line in lines[2:]] == shown
