"""Loggers get the figures of the page: the same marks, drawn by matplotlib from one description."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from lightning_bnn.report.figure import (
    COLOURS,
    Axis,
    Bars,
    Mark,
    Panels,
    Plot,
    Views,
    described,
    domain,
)
from lightning_bnn.report.figures import calibration_figures

Numbers = dict[str, Any]
LONG = "Extraordinarily-long-name-without-breaks_" * 3


def drawn(numbers: Numbers) -> dict[str, Figure]:
    before, open_figures = copy.deepcopy(numbers), pyplot.get_fignums()
    figures = calibration_figures(json.loads(json.dumps(numbers)))
    assert numbers == before
    assert pyplot.get_fignums() == open_figures  # none stays behind
    for figure in figures.values():
        figure.savefig(io.BytesIO(), dpi=30)  # any warning of matplotlib's is an error here
    return figures


def document(*figures: Any, names: tuple[str, ...] = ("net",)) -> Numbers:
    part = {"id": "mine", "title": "Mine", "figures": [described(each) for each in figures]}
    return {"models": [{"name": name, "sections": [part]} for name in names]}


def line(axes: Any, colour: str, at: int = 0) -> np.ndarray:
    """The points of a line of a colour."""
    found = [line for line in axes.lines if to_hex(line.get_color()) == colour]
    return np.column_stack([found[at].get_xdata(), found[at].get_ydata()])


def test_a_classification(classes: Numbers) -> None:
    figures = drawn(classes)
    assert list(figures) == ["calibration", "errors", "shift"]
    blue, orange = (COLOURS[name][0] for name in ("blue", "orange"))
    reliability, second, confidence, _ = figures["calibration"].axes
    assert reliability.get_title() == "honest net\nReliability diagram"
    for axes, colour, block in zip(
        (reliability, second), (blue, orange), classes["models"], strict=True
    ):
        curve = {k: np.array(v, float) for k, v in block["reliability"]["width"].items()}
        known = curve["count"] > 0
        expected = np.column_stack([curve["stated"], curve["observed"]])[known]
        np.testing.assert_allclose(line(axes, colour), expected, atol=1e-4)
        heights = [patch.get_height() for patch in axes.patches]
        np.testing.assert_allclose(heights, (curve["upper"] - curve["lower"])[known], atol=2e-4)
    curve = {k: np.array(v, float) for k, v in classes["models"][0]["reliability"]["width"].items()}
    heights = [patch.get_height() for patch in confidence.patches]
    assert sum(heights) == pytest.approx(curve["count"].sum(), rel=1e-3)
    risk = figures["errors"].axes[0]
    curve = classes["models"][0]["risk_coverage"]
    expected = np.column_stack([curve["coverage"], curve["risk"]])
    np.testing.assert_allclose(line(risk, blue), expected, atol=1e-4)
    letters, _, rotated, _ = figures["shift"].axes
    assert letters.get_title() == "honest net\nletters"
    assert rotated.get_title() == "rotated"
    part = classes["models"][0]["shift"]["letters"]["by"]["entropy"]
    np.testing.assert_allclose(letters.patches[0].get_data().values, part["inside"], atol=1e-4)
    np.testing.assert_allclose(letters.patches[2].get_data().values, part["outside"], atol=1e-4)


def test_every_kind_of_mark_and_figure_is_drawn() -> None:
    kinds = ("line", "area", "bars", "boxes", "steps", "dots", "rings", "stems", "ranges", "rules")
    numbers = [0.1, None, 0.3]
    marks = [
        Mark(kind, [0.1, 0.2, 0.3, 0.4] if kind == "steps" else numbers, numbers, numbers, numbers,
             weight=None if kind == "area" else [1, 2, 3], label=kind)  # type: ignore[arg-type]
        for kind in kinds
    ]  # fmt: skip
    marks[-1].x = [0.1, 0.3]
    plot = Plot("a", "All", x=Axis("x"), y=Axis("y", (0, 1), "percent"), marks=marks)
    figures = (
        Views("v", "V", switch="s", views={"first": plot, "second": plot}),
        Panels("p", "P", panels=[Plot("q", "Q", marks=[Mark("line", [0, 1], [1, 0])])]),
        Bars("b", "B"),
        Plot("silent", "Not for loggers", logged=False),
    )
    figure = drawn(document(*figures))["mine"]
    assert [axes.get_title() for axes in figure.axes] == ["All", "Q"]
    legend = {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
    assert legend == set(kinds)


def test_many_models_and_odd_names() -> None:
    plot = Plot("a", LONG, marks=[Mark("line", [0, 1], [1, 0], label="_$\\nothing{$")])
    names = ("$\\frac$", LONG, "a_b^2 <script> & μ", "_d")
    figure = drawn(document(plot, names=names))["mine"]
    titles = [axes.get_title().split("\n")[0] for axes in figure.axes]
    assert titles == [
        "\\$\\frac\\$", "Extraordinaril…thout-breaks_", names[2], " _d",
    ]  # fmt: skip
    figure.draw_without_rendering()
    for axes in figure.axes:
        box = axes.title.get_window_extent()
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1 + 1
    text = figure.axes[0].get_legend().texts[0].get_text()
    assert text == " _\\$\\nothing{\\$"


def test_a_model_without_a_figure_leaves_its_place_free() -> None:
    numbers = document(Plot("a", "A", marks=[Mark("line", [0, 1], [1, 0])]), names=("x", "y"))
    other = {"id": "mine", "title": "Mine", "figures": [described(Plot("b", "B"))]}
    numbers["models"][1]["sections"] = [other | {"figures": [other["figures"][0] | {"marks": []}]}]
    first, empty, nothing, second = drawn(numbers)["mine"].axes
    assert (first.get_title(), second.get_title()) == ("x\nA", "B")
    assert not empty.axison
    assert not nothing.axison


def test_a_description_is_light() -> None:
    """Places to a ten-thousandth of the axis; a view says only what differs from the first."""
    values = np.array([1000.123456789, np.nan, 1001.0])
    plot = Plot(
        "a", "A", "Read.", y=Axis("y", domain(values)), marks=[Mark("line", [0, 1], values)]
    )
    made = described(Views("a", "A", switch="s", views={"one": plot, "two": plot}))
    assert made["views"][0][1]["marks"][0]["y"] == [1000.12346, None, 1001.0]
    assert made["views"][1] == ["two", {}]
