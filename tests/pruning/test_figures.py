"""What the figures of pruning show, read back from matplotlib."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from lightning_bnn.pruning.figures import draw_all, draw_curve, draw_histogram

FRACTIONS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99)


def block(**changes: Any) -> dict[str, Any]:
    """The numbers of a curve of classes: seven fractions, two layers."""
    results = [
        {
            "fraction": fraction,
            "threshold": 10 ** (-1 + 2 * fraction) if fraction else None,
            "scores": {
                "accuracy": 0.98 - 0.01 * i,
                "nll": 0.1 + 0.01 * i,
                "brier": 0.1,
                "ece": 0.02,
            },
        }
        for i, fraction in enumerate(FRACTIONS)
    ]
    layers = [
        {"name": "0.weight", "total": 80, "median": 0.5, "counts": [0, 10, 40, 20]},
        {"name": "2.weight", "total": 30, "median": 0.9, "counts": [5, 5, 10, 10]},
    ]
    histogram = {
        "log10_edges": [-2.0, -1.0, 0.0, 1.0, 2.0], "counts": [5, 15, 50, 30],
        "below": 7, "above": 3, "zero": 0, "layers": layers,
    }  # fmt: skip
    return {
        "unit": "weight", "scope": "global", "total": 110, "protected": 5,
        "score_names": ["accuracy", "nll", "brier", "ece"],
        "results": results, "histogram": histogram, **changes,
    }  # fmt: skip


def render(figure: Figure) -> None:
    """Layout and labels are made when a figure is drawn; warnings are errors."""
    figure.savefig(io.BytesIO(), format="png", dpi=30)


def test_histogram() -> None:
    figure = draw_histogram(block())
    render(figure)
    (axes,) = figure.axes
    heights = [patch.get_data().values for patch in axes.patches]
    # the layers are stacked, and their outline is the sum
    assert [list(values) for values in heights] == [
        [0, 10, 40, 20], [5, 15, 50, 30], [5, 15, 50, 30]
    ]  # fmt: skip
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["0.weight", "2.weight"]
    assert [label.get_text() for label in axes.get_xticklabels()] == [
        "0.01", "0.1", "1", "10", "100"
    ]  # fmt: skip
    assert axes.get_title() == "not in view: 7 smaller, 3 larger"
    assert axes.get_ylabel() == "weights in a bin"


def test_lines_at_thresholds() -> None:
    (axes,) = draw_histogram(block()).axes
    places = {
        text.get_text(): line.get_xdata()[0]
        for text, line in zip(axes.texts, axes.lines, strict=True)
    }
    # 99 % first; 98 and 95 % lie nearer to it than a label is wide
    assert list(places) == ["99 %", "90 %", "75 %", "50 %"]
    for text, place in places.items():
        share = float(text.removesuffix(" %")) / 100
        assert place == pytest.approx(-1 + 2 * share)
    outside = block()
    outside["results"][1]["threshold"] = 1e-9
    outside["results"][2]["threshold"] = 1e9
    outside["results"][3]["threshold"] = 0.0  # zeros alone were removed
    (axes,) = draw_histogram(outside).axes
    assert [text.get_text() for text in axes.texts] == ["99 %"]
    assert not draw_histogram(block(scope="layer")).axes[0].lines


def test_many_layers_and_narrow_ratios() -> None:
    many = block()
    many["histogram"]["layers"] = [
        {"name": f"{i}.weight", "total": 100 - i, "median": 1.0, "counts": [i, 1, 0, 0]}
        for i in range(9)
    ]
    figure = draw_histogram(many)
    render(figure)
    names = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert names == [*(f"{i}.weight" for i in range(5)), "4 other layers"]
    assert list(figure.axes[0].patches[-1].get_data().values) == [36, 9, 0, 0]
    narrow = block()
    narrow["histogram"]["log10_edges"] = [0.1, 0.2, 0.3, 0.4, 0.5]
    narrow["histogram"]["layers"] = narrow["histogram"]["layers"][:1]
    narrow["histogram"].update(below=0, above=0, zero=4)
    figure = draw_histogram(narrow)
    render(figure)
    assert figure.axes[0].get_legend() is None
    assert figure.axes[0].get_title() == "not in view: 4 at zero"
    assert figure.axes[0].get_xticklabels()[1].get_text()[:1] in ("1", "2")


def test_curve_of_classes() -> None:
    figure = draw_curve(block())
    render(figure)
    assert [axes.get_ylabel() for axes in figure.axes] == ["error (%)", "NLL", "ECE"]
    x, y = figure.axes[0].lines[1].get_data()
    assert np.allclose(x, [-math.log10(1 - fraction) for fraction in FRACTIONS])
    assert np.allclose(y, [2, 3, 4, 5, 6, 7, 8])
    assert figure.axes[0].lines[0].get_ydata()[0] == pytest.approx(2)
    for axes in figure.axes:
        labels = [label.get_text() for label in axes.get_xticklabels()]
        assert labels == ["0", "50", "75", "90", "95", "98", "99"]
        assert axes.get_xlabel() == "weights removed (%)"


def test_scores_of_regression_and_scales() -> None:
    made = block(score_names=["rmse", "nll", "crps", "coverage"], unit="channel")
    for i, result in enumerate(made["results"]):
        crps = 0.01 / (1 - result["fraction"])
        result["scores"] = {"rmse": 1.0, "nll": -1.0 + i, "crps": crps, "coverage": crps}
    figure = draw_curve(made)
    render(figure)
    assert [axes.get_ylabel() for axes in figure.axes] == ["RMSE", "NLL", "coverage"]
    assert figure.axes[0].get_xlabel() == "units removed (%)"
    low, high = figure.axes[0].get_ylim()  # a score that stays gets room around it
    assert (low, high) == (pytest.approx(0.975), pytest.approx(1.025))
    # some are negative; one that grows much is on a logarithmic axis
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "linear", "log"]


def test_scores_that_are_missing_and_scores_of_ones_own() -> None:
    made = block(score_names=["nll", "ece", "my_score"])
    for i, result in enumerate(made["results"]):
        result["scores"] = {"nll": None if i else 0.1, "ece": None, "my_score": 0.0}
    for results in (made["results"], made["results"][:1]):
        figure = draw_curve({**made, "results": results})
        render(figure)
        assert [axes.get_ylabel() for axes in figure.axes] == ["NLL", "ECE", "my_score"]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0"]


def test_labels_that_would_lie_on_each_other_are_left_out() -> None:
    crowded = block()
    crowded["results"] = [
        {"fraction": fraction, "threshold": None, "scores": {"accuracy": 0.9}}
        for fraction in (0.0, 0.01, 0.02, 0.5, 0.501, 0.9, 0.995, 0.9951)
    ]
    crowded["score_names"] = ["accuracy"]
    labels = [label.get_text() for label in draw_curve(crowded).axes[0].get_xticklabels()]
    assert labels == ["", "", "2", "", "50.1", "90", "", "99.51"]


def test_all_in_one() -> None:
    figure = draw_all(block())
    render(figure)
    labels = [axes.get_ylabel() for axes in figure.axes]
    assert labels == ["weights in a bin", "error (%)", "NLL", "ECE"]
