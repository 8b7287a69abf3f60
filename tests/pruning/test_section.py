"""Pruning curves in reports: the right numbers, on the right data, and only where asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import DrawsPosterior, GaussianPosterior, MixturePosterior, prune_curve
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.pruning.section import Pruning, pruning_sentence
from lightning_bnn.report import report_posteriors
from lightning_bnn.report.document import make_report
from lightning_bnn.report.figures import calibration_figures
from lightning_bnn.report.statistics import Statistics
from tests.pruning.blocks import OF_CLASSES, hand_made
from tests.pruning.posteriors import gaussian_of


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def gaussian() -> GaussianPosterior:
    return gaussian_of(net())


def draws(count: int = 5) -> DrawsPosterior:
    states = [dict(net(seed).named_parameters()) for seed in range(count)]
    return DrawsPosterior(net(), Categorical(), states)


def data(count: int = 60) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


def test_the_curve_is_that_of_the_data_of_the_report() -> None:
    fractions = (0.0, 0.4, 0.9)
    state = torch.get_rng_state()
    made = report_posteriors(
        {"draws": draws(), "plain": net(3)},
        DataLoader(data(), batch_size=16, shuffle=True),
        sections=[Pruning(fractions)],
    )
    assert torch.equal(torch.get_rng_state(), state)
    block, plain = made.numbers["models"]
    wanted = prune_curve(draws(), DataLoader(data(), batch_size=60), fractions)
    for result, expected in zip(block["pruning"]["results"], wanted.results, strict=True):
        assert result["scores"] == pytest.approx(expected.scores, abs=1e-5)
        assert result["removed"] == expected.removed
    whole = block["pruning"]["results"][0]["scores"]
    assert whole["nll"] == pytest.approx(block["scalars"]["nll"], abs=1e-6)
    assert set(plain["pruning"]) == {"unavailable"}
    said = {line["model"]: line["text"] for line in made.numbers["summary"]
            if "remov" in line["text"] or "pruning" in line["text"]}  # fmt: skip
    assert set(said) == {"draws", "plain"}
    for each in (block, plain):  # the lead of the section ends with the same sentence
        lead = next(part["lead"] for part in each["sections"] if part["id"] == "pruning")
        assert lead.endswith(said[each["name"]][1:])
    assert json.loads(json.dumps(made.numbers, allow_nan=False)) == made.numbers
    assert "no pruning by signal to noise" in str(made)


@pytest.mark.parametrize(
    ("fractions", "message"),
    [([0.5, 1.0], "1.0"), ([], "empty"), ([0.99], "54 can go")],
)
def test_bad_fractions_are_refused_before_the_work(fractions: Any, message: str) -> None:
    class Once(DrawsPosterior):
        def predict(self, inputs: Any, draws: Any = None, seed: Any = None) -> Any:
            assert draws == 1, "only tried"
            return super().predict(inputs, draws)

    states = [dict(net(seed).named_parameters()) for seed in range(3)]
    posterior = Once(net(), Categorical(), states)
    with pytest.raises(ConfigurationError, match=message):
        report_posteriors(
            {"net": posterior}, DataLoader(data(), batch_size=16), sections=[Pruning(fractions)]
        )


def test_components_that_are_pruned_by_themselves_pass_the_check() -> None:
    section, mixture = Pruning([0.5]), MixturePosterior([gaussian(), gaussian()])
    section.check({"net": mixture, "plain": draws(1)})  # as does what has no variances
    section.measure("net", mixture, [tuple(data().tensors)], draws=2)
    assert section.curve is not None
    assert section.curve["total"] == 112


def document(*curves: dict[str, Any] | None) -> dict[str, Any]:
    """A document of models with these curves."""
    models = {}
    for at, curve in enumerate(curves):
        section = Pruning([0.0])
        if curve is not None and "unavailable" in curve:
            section.unavailable = curve["unavailable"]
        else:
            section.curve = curve
        models[f"net {at}"] = Statistics(bins=5, sections=[section])
        predicted = gaussian().predict(data().tensors[0], 2, 0)
        models[f"net {at}"].update(predicted, data().tensors[1])
    return make_report(models).numbers


def test_figures_for_loggers() -> None:
    curve = hand_made(OF_CLASSES)
    assert "pruning" not in calibration_figures(document(None))
    assert "pruning" not in calibration_figures(document({"unavailable": "one draw"}))
    figure = calibration_figures(document({"unavailable": "one draw"}, curve))["pruning"]
    labels = ["weights", "error rate", "NLL", "ECE", "Brier score"]
    assert [axes.get_ylabel() for axes in figure.axes] == labels
    ratios, error = figure.axes[:2]
    heights = [patch.get_height() for patch in ratios.patches]
    assert heights == [count for count in curve["histogram"]["counts"] if count]
    wanted = [1 - result["scores"]["accuracy"] for result in curve["results"]]
    np.testing.assert_allclose(error.lines[0].get_ydata(), wanted, atol=1e-4)
    shares = [text.get_text() for text in error.get_xticklabels()]
    assert shares == ["0%", "50%", "75%", "90%", "95%", "98%", "99%"]


def test_curves_that_were_made_before() -> None:
    loader = DataLoader(data(), 20)
    both = {"draws": draws(), "gaussian": gaussian()}
    curve = prune_curve(both["gaussian"], loader, (0.0, 0.5), unit="channel", draws=3)
    made = report_posteriors(both, loader, draws=3, sections=[Pruning({"gaussian": curve})])
    first, second = made.numbers["models"]
    assert first.get("pruning") is None
    assert second["pruning"]["unit"] == "channel"
    found = [each["remaining"] for each in second["pruning"]["results"]]
    assert found == [result.remaining for result in curve.results] == [8, 4]
    with pytest.raises(ConfigurationError, match=r"curve of 'other', which is no model.*'draws'"):
        report_posteriors(both, loader, sections=[Pruning({"other": curve})])


# -------------------------------------------------------------------- words

INTERVALS: dict[str, tuple[float | None, float | None]] = {
    "accuracy": (0.96, 0.98),
    "nll": (0.09, 0.11),
    "rmse": (0.9, 1.1),
}


def block(
    scores: Sequence[dict[str, float | None]], fractions: Sequence[float], **options: Any
) -> dict[str, Any]:
    results = [{"fraction": f, "scores": s} for f, s in zip(fractions, scores, strict=True)]
    return {"unit": "weight", "total": 1234567, "results": results, **options}


def of_classes(*pairs: tuple[float, float | None]) -> list[dict[str, float | None]]:
    return [{"accuracy": accuracy, "nll": nll, "ece": 0.5} for accuracy, nll in pairs]


@pytest.mark.parametrize(
    ("scores", "fractions", "sentence"),
    [
        (  # the largest share that stays, and the first that does not
            of_classes((0.97, 0.1), (0.9712, 0.1), (0.965, 0.1093), (0.955, 0.1)),
            (0, 0.5, 0.9, 0.995),
            "with 90% of 1,234,567 weights removed, error 3.50% instead of 3.00% and NLL 0.109 "
            "instead of 0.100: none above the 95% interval of the whole model; with 99.5% of "
            "1,234,567 weights removed, error 4.50% instead of 3.00% and NLL 0.100 instead of "
            "0.100: error above the 95% interval of the whole model.",
        ),
        (  # a better share after a worse one is not claimed
            of_classes((0.97, 0.1), (0.97, 0.2), (0.97, 0.1)),
            (0, 0.5, 0.9),
            "with 50% of 1,234,567 weights removed, error 3.00% instead of 3.00% and NLL "
            "0.200 instead of 0.100: NLL above the 95% interval of the whole model.",
        ),
        (  # a score that is not finite is never good
            of_classes((0.97, None)),
            (0.5,),
            "with 50% of 1,234,567 weights removed, error 3.00% and NLL not finite: NLL "
            "above the 95% interval of the whole model.",
        ),
    ],
)
def test_sentences(scores: Any, fractions: tuple[float, ...], sentence: str) -> None:
    assert pruning_sentence(block(scores, fractions), "classification", INTERVALS) == sentence


def test_regression_and_units() -> None:
    scores: list[dict[str, float | None]] = [{"rmse": 1.5, "nll": 0.1}, {"rmse": 12345.6, "nll": 0}]
    made = pruning_sentence(block(scores, (0, 0.25), unit="channel"), "regression", INTERVALS)
    assert made == (
        "with 25% of 1,234,567 units removed, RMSE 12,346 instead of 1.50 and NLL 0 "
        "instead of 0.100: RMSE above the 95% interval of the whole model."
    )


@pytest.mark.parametrize("fractions", [(0,), ()])
def test_nothing_removed_says_nothing(fractions: tuple[float, ...]) -> None:
    scores = of_classes((0.97, 0.1))[: len(fractions)]
    assert pruning_sentence(block(scores, fractions), "classification", INTERVALS) is None


def test_without_an_interval_nothing_is_claimed_of_it() -> None:
    scores = of_classes((0.97, 0.1), (0.5, 0.9))
    unknown: dict[str, tuple[float | None, float | None]] = {"nll": (None, None)}
    made = pruning_sentence(block(scores, (0, 0.5)), "classification", unknown)
    assert made == (
        "with 50% of 1,234,567 weights removed, error 50.00% instead of 3.00% and NLL 0.900 "
        "instead of 0.100."
    )
