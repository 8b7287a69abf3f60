"""A section of a user's own: one class, and it is on the page, in the JSON and in the loggers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.predictive import GaussianPredictive
from lightning_bnn.report import report, report_posteriors
from lightning_bnn.report.document import make_report
from lightning_bnn.report.figure import Axis, Mark, Plot, Table, domain
from lightning_bnn.report.figures import calibration_figures
from lightning_bnn.report.sections import Section
from lightning_bnn.report.statistics import Statistics
from lightning_bnn.report.text import short
from tests.report.browser import Browser
from tests.report.drawings import READ, Drawing


class Residuals(Section):
    """The mean error by the predicted mean."""

    key, title = "residuals", "Residuals"
    lead = "Is the error the same everywhere?"
    task = "regression"
    method = (("Residual", "The predicted mean less the target."),)

    def __init__(self, edges: tuple[float, ...] = (-2.0, -1.0, 0.0, 1.0, 2.0)) -> None:
        self.edges = np.array(edges)
        self.sums = np.zeros((2, len(edges) - 1))

    def add(self, rows: Any) -> None:
        mean, target = rows.columns["mean"], rows.columns["target"]
        self.sums += [
            np.histogram(mean, self.edges)[0],
            np.histogram(mean, self.edges, weights=mean - target)[0],
        ]

    def merge(self, other: Residuals) -> None:
        self.sums += other.sums

    def numbers(self, model: Any, block: Any) -> dict[str, Any]:
        counts, totals = self.sums
        with np.errstate(invalid="ignore"):
            return {"residuals": {"edges": self.edges, "mean": totals / counts}}

    def words(self, document: Any) -> Any:
        for block in document["models"]:
            yield block["name"], "note", "residuals were looked at."

    def figures(self, block: Any, document: Any) -> Any:
        edges, mean = block["residuals"]["edges"], block["residuals"]["mean"]
        pairs = zip(edges[1:], mean, strict=True)
        yield Plot(
            "residuals", "Residuals", "They should be near zero.",
            x=Axis("predicted mean", (edges[0], edges[-1])), y=Axis("error", domain(mean)),
            marks=[Mark("steps", edges, mean, label="mean error")],
            table=Table(["mean", "error"], [[short(e), short(m)] for e, m in pairs]),
            spans=(edges[:-1], edges[1:]),
        )  # fmt: skip


def given(count: int = 200) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    means = generator.uniform(-2, 2, count)
    return means, means + 0.5 + 0.1 * generator.normal(size=count)


def test_numbers_words_page_and_loggers(browser: Browser, tmp_path: Path) -> None:
    means, targets = given()
    made = report(means, targets, scales=0.1, sections=[Residuals()])
    block = made.numbers["models"][0]
    wanted = [
        float((means - targets)[(means >= low) & (means < low + 1)].mean()) for low in range(-2, 2)
    ]
    assert block["residuals"]["mean"] == pytest.approx(wanted)
    assert any(line.endswith("residuals were looked at.") for line in made.summary)
    order = [part["id"] for part in block["sections"]]
    assert order == ["calibration", "errors", "residuals"]

    page = tmp_path / "report.html"
    made.save(page)
    assert json.loads(page.with_suffix(".json").read_text()) == made.numbers
    browser.open(page)
    assert browser.texts("#residuals h3") == ["Residuals"]
    drawn = Drawing(browser.run(READ)["residuals"]).path("")
    np.testing.assert_allclose(drawn[::2, 1], wanted, atol=0.01)
    browser.hover("figure#residuals .hit", 1)
    assert "error" in (browser.tooltip() or "")
    assert "Residual" in browser.texts("#terms dt")
    assert browser.messages() == []

    (axes,) = calibration_figures(made.numbers)["residuals"].axes
    np.testing.assert_allclose(axes.patches[0].get_data().values, wanted, atol=1e-4)
    assert (axes.get_xlabel(), axes.get_title()) == ("predicted mean", "Residuals")


def test_every_model_has_a_copy_and_only_its_own_task() -> None:
    means, targets = given()
    section = Residuals()
    made = report({"a": means, "b": means + 1}, targets, scales=1.0, sections=[section])
    first, second = (block["residuals"]["mean"] for block in made.numbers["models"])
    assert first != second
    assert not section.sums.any()
    classes = report([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]], [0, 1, 1], bins=2, sections=[section])
    assert "residuals" not in classes.numbers["models"][0]


def test_processes_merge_to_what_one_would_have() -> None:
    means, targets = (torch.from_numpy(values)[:, None] for values in given())

    def gathered(*places: slice) -> Statistics:
        statistics = Statistics(bins=5, sections=[Residuals()])
        for place in places:
            part = GaussianPredictive(means[None, place], torch.ones_like(means[None, place]))
            statistics.update(part, targets[place], torch.arange(200)[place])
        return statistics

    first, second = gathered(slice(0, 70)), gathered(slice(70, 120), slice(120, 200))
    merged = Statistics(bins=5, sections=[Residuals()])
    for part in (first, second):
        merged.merge(pickle.loads(pickle.dumps(part)))
    found, whole = (
        make_report({"net": each}).numbers["models"][0]["residuals"]["mean"]
        for each in (merged, gathered(slice(0, 200)))
    )
    assert found == pytest.approx(whole, rel=1e-12)


def test_a_section_that_asks_the_posterior() -> None:
    asked: list[Any] = []

    class Weights(Section):
        key, title, needs_posterior = "weights", "Weights", True

        def check(self, models: Any) -> None:
            asked.append(list(models))

        def measure(self, name: str, posterior: Any, batches: Any, draws: int | None) -> None:
            self.size = sum(p.numel() for p in posterior.net.parameters())
            asked.append((name, len(list(batches)), draws))

        def numbers(self, model: Any, block: Any) -> dict[str, Any]:
            return {"weights": self.size}

    data = DataLoader(TensorDataset(torch.randn(40, 3), torch.randn(40, 1)), 20)
    made = report_posteriors(
        {"net": nn.Linear(3, 1)}, data, likelihood=Gaussian(), draws=2, sections=[Weights()]
    )
    assert made.numbers["models"][0]["weights"] == 4
    assert asked == [["net"], ("net", 2, 2)]


def test_names_that_are_taken_are_refused() -> None:
    class Scalars(Section):
        key, title = "mine", "Mine"

        def numbers(self, model: Any, block: Any) -> dict[str, Any]:
            return {"scalars": 1}

    means, targets = given()
    with pytest.raises(ConfigurationError, match=r"section 'mine' gives .*\['scalars'\]"):
        report(means, targets, scales=1.0, sections=[Scalars()])
