"""The figures show the numbers of a report, whatever is missing in it."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.report.figure_style import colours
from lightning_bnn.report.figures import calibration_figures


def class_block(name: str, shift: tuple[str, ...] = ("letters", "noise")) -> dict[str, Any]:
    curve = {
        "edges": [0.0, 0.25, 0.5, 0.75, 1.0],
        "count": [0, 10, 30, 60],
        "stated": [None, 0.4, 0.62, 0.9],
        "came": [None, 0.5, 0.6, 0.85],
        "lower": [None, 0.1, 0.4, 0.8],
        "upper": [None, 0.8, 0.85, 0.98],
    }
    part = {
        "auroc": 0.875, "aupr": 0.8, "fpr95": 0.3,
        "edges": [0.0, 1.0, 2.0], "inside": [0.75, 0.25], "outside": [0.1, 0.9],
    }  # fmt: skip
    return {
        "name": name,
        "verdict": {"label": "over-confident", "z": -3.0, "p_value": 0.002},
        "scalars": {"ece": 0.0412, "aurc": 0.01},
        "reliability": {"width": curve, "mass": curve},
        "confidence": {"edges": curve["edges"], "right": [0, 5, 18, 51], "wrong": [0, 5, 12, 9]},
        "risk_coverage": {"coverage": [0.0, 0.5, 1.0], "risk": [0.0, 0.1, 0.26]},
        "entropy_accuracy": {"edges": [0, 1, 2, 3], "count": [5, 0, 5], "accuracy": [1, None, 0.4]},
        "shift": {each: {"examples": 10, "by": {"entropy": part}} for each in shift},
    }


def number_block(name: str) -> dict[str, Any]:
    part = {
        "auroc": None, "aupr": None, "fpr95": None,
        "edges": [0.0, 1.0, 2.0], "inside": [0.75, 0.25], "outside": [0.1, 0.9],
    }  # fmt: skip
    return {
        "name": name,
        "verdict": {"label": "biased", "z": 4.0, "p_value": 0.0},
        "scalars": {"crps": None},
        "pit": {"edges": [0, 0.5, 1], "count": [30, 70], "lower": [36, 36], "upper": [64, 64]},
        "coverage": {
            "nominal": [0.5, 0.9], "observed": [0.4, 0.8], "lower": [0.4, 0.85], "upper": [0.6, 1],
        },
        "error_sd": {
            "sd": [0.1, 0.3], "rmse": [0.2, 0.25], "count": [50, 50],
            "lower": [0.08, 0.2], "upper": [0.12, 0.4],
        },
        "scatter": {"sd": [0.1, 0.2, 0.3], "error": [0.0, -0.2, 0.1]},
        "fit": {
            "x": [1.0, 0.0], "y": [1.1, 0.1], "mean": [1.0, 0.0], "lower": [0.5, -0.5],
            "upper": [1.5, 0.5], "epistemic_lower": [0.9, -0.1], "epistemic_upper": [1.1, 0.1],
            "level": 0.9,
        },
        "shift": {"far": {"examples": 5, "by": {"sd": part}}},
    }  # fmt: skip


def drawn(task: str, *blocks: dict[str, Any]) -> dict[str, Figure]:
    numbers = {"task": task, "models": list(blocks)}
    before = copy.deepcopy(numbers)
    figures = calibration_figures(json.loads(json.dumps(numbers)))
    assert numbers == before
    for figure in figures.values():
        figure.savefig(io.BytesIO(), dpi=30)  # any warning of matplotlib's is an error here
    return figures


def line(axes: Any, colour: str) -> np.ndarray:
    """The points of the one line of a colour."""
    (found,) = [line for line in axes.lines if to_hex(line.get_color()) == colour]
    return np.column_stack([found.get_xdata(), found.get_ydata()])


def test_figures_of_classes_hold_the_numbers() -> None:
    figures = drawn("classes", class_block("net"), class_block("vi"))
    assert list(figures) == ["calibration", "selection", "shift"]
    blue, orange = colours(2)

    reliability, confidence, second, _ = figures["calibration"].axes
    assert reliability.get_title() == "net\nover-confident, ECE 0.041"
    expected = [(0.4, 0.5), (0.62, 0.6), (0.9, 0.85)]
    np.testing.assert_allclose(line(reliability, blue), expected)
    np.testing.assert_allclose(line(second, orange), expected)
    (band,) = [c for c in reliability.collections if isinstance(c, FillBetweenPolyCollection)]
    corners = band.get_paths()[0].vertices
    assert (corners.min(0) == [0.4, 0.1]).all()
    assert (corners.max(0) == [0.9, 0.98]).all()
    heights = [patch.get_height() for patch in confidence.patches]
    assert heights == [0, 5, 18, 51, 0, 5, 12, 9]
    assert [patch.get_y() for patch in confidence.patches][4:] == [0, 5, 18, 51]

    risk, accuracy = figures["selection"].axes
    np.testing.assert_allclose(line(risk, orange), [(0, 0), (0.5, 0.1), (1, 0.26)])
    assert risk.get_legend().texts[1].get_text() == "vi: AURC 0.0100"
    np.testing.assert_allclose(line(accuracy, blue), [(0.5, 1), (2.5, 0.4)])  # no empty bin


def test_the_shift_has_a_histogram_for_each_model_and_set() -> None:
    blocks = class_block("net"), class_block("vi", shift=("letters",))
    net_letters, net_noise, vi_letters, nothing = drawn("classes", *blocks)["shift"].axes
    assert net_letters.get_title() == "net, letters: AUROC 0.875"
    assert net_noise.get_title() == "net, noise: AUROC 0.875"
    assert vi_letters.get_title() == "vi, letters: AUROC 0.875"
    assert not nothing.axison
    inside, _, outside, _ = net_letters.patches
    np.testing.assert_allclose(inside.get_data().values, [0.75, 0.25])
    np.testing.assert_allclose(outside.get_data().values, [0.1, 0.9])
    np.testing.assert_allclose(outside.get_data().edges, [0, 1, 2])


def test_figures_of_numbers_hold_the_numbers() -> None:
    figures = drawn("numbers", number_block("net"))
    assert list(figures) == ["calibration", "selection", "fit", "shift"]
    (blue,) = colours(1)

    pit, coverage = figures["calibration"].axes
    assert pit.get_title() == "net\nbiased, CRPS –"
    assert [patch.get_height() for patch in pit.patches] == [30, 70]
    assert [(patch.get_x(), patch.get_width()) for patch in pit.patches] == [(0, 0.5), (0.5, 0.5)]
    corners = pit.collections[0].get_paths()[0].vertices
    assert (corners.min(0) == [0, 36]).all()
    assert (corners.max(0) == [1, 64]).all()
    np.testing.assert_allclose(line(coverage, blue), [(0.5, 0.4), (0.9, 0.8)])

    (error,) = figures["selection"].axes
    np.testing.assert_allclose(line(error, blue), [(0.1, 0.2), (0.3, 0.25)])
    np.testing.assert_allclose(error.collections[0].get_offsets()[:, 1], [0, 0.2, 0.1])
    (fit,) = figures["fit"].axes
    np.testing.assert_allclose(line(fit, blue), [(0, 0), (1, 1)])  # sorted by x
    assert fit.get_legend().texts[0].get_text() == "90% interval"
    assert figures["shift"].axes[0].get_title() == "net, far: AUROC –"


@pytest.mark.parametrize(("task", "make"), [("classes", class_block), ("numbers", number_block)])
def test_what_is_missing_is_left_out(task: str, make: Any) -> None:
    whole = make("net")
    names = set(calibration_figures({"task": task, "models": [whole]}))
    for key in sorted(set(whole) - {"name"}):
        absent = {name: part for name, part in whole.items() if name != key}
        for block in (absent, whole | {key: None}):
            numbers = {"task": task, "models": [block]}
            assert set(calibration_figures(numbers)) <= names
            assert set(calibration_figures({**numbers, "models": [block, whole]})) == names
    assert drawn(task, {"name": "nothing"}) == {}
    drawn(task, whole | {"verdict": None, "scalars": None, "confidence": None, "coverage": None})


def test_a_model_keeps_its_colour_where_another_has_no_numbers() -> None:
    first = class_block("net") | {"risk_coverage": None}
    (risk, _) = drawn("classes", first, class_block("vi"))["selection"].axes
    assert [to_hex(line.get_color()) for line in risk.lines] == [colours(2)[1]]


def test_many_models_go_on_below() -> None:
    figure = drawn("classes", *(class_block(f"model {i}") for i in range(6)))["calibration"]
    places = [axes.get_position() for axes in figure.axes[::2]]
    assert places[4].y1 < places[0].y0
    assert places[4].x0 == pytest.approx(places[0].x0, abs=0.03)
    assert max(place.x1 for place in places) <= 1


def test_names_are_shown_as_they_are() -> None:
    block = class_block("a_b^2 <script> & μ")
    figure = drawn("classes", block)["calibration"]
    assert figure.axes[0].get_title().startswith("a_b^2 <script> & μ\n")


def test_a_name_is_no_formula_and_no_secret() -> None:
    """Two dollars begin and end a formula for matplotlib, and an underscore hides a label."""
    block = class_block("_$\\nothing{$", shift=("$\\frac$",))
    (risk, _) = drawn("classes", block)["selection"].axes
    assert risk.get_legend().texts[0].get_text() == " _\\$\\nothing{\\$: AURC 0.0100"


LONG = "Extraordinarily-long-name-without-breaks_" * 3


def test_long_names_stay_inside() -> None:
    blocks = [class_block(f"{LONG}{i}", shift=(f"{LONG} elsewhere",)) for i in range(2)]
    figures = drawn("classes", *blocks) | {"fit": drawn("numbers", number_block(LONG))["fit"]}
    for name, figure in figures.items():
        figure.draw_without_rendering()
        for axes in figure.axes:
            box = axes.title.get_window_extent()
            assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1 + 1, name
    (fit,) = figures["fit"].axes
    assert (fit.get_xlabel(), fit.get_ylabel()) == ("input", "target")


def test_many_lines_are_named_beside_them() -> None:
    keys = ("name", "risk_coverage", "entropy_accuracy")
    blocks = [{key: class_block(f"{LONG}{i}")[key] for key in keys} for i in range(20)]
    figure = drawn("classes", *blocks)["selection"]
    figure.draw_without_rendering()
    assert figure.axes[0].get_legend() is None
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[19] == "Extraordinaril…out-breaks_19: AURC –"
    box = legend.get_window_extent()
    assert max(axes.get_window_extent().x1 for axes in figure.axes) < box.x0
    assert box.x1 <= figure.bbox.x1 + 1
    assert figure.bbox.y0 - 1 <= box.y0 < box.y1 <= figure.bbox.y1 + 1
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == 20


def test_no_figure_stays_behind() -> None:
    before = pyplot.get_fignums()
    drawn("classes", class_block("net"))
    drawn("numbers", number_block("net"))
    assert pyplot.get_fignums() == before


@pytest.mark.parametrize("numbers", [{}, {"task": "words", "models": [{}]}, {"task": "classes"}])
def test_other_documents_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"expected the numbers of a report.*task="):
        calibration_figures(numbers)
