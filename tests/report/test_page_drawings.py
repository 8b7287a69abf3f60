"""Every figure of the page shows the numbers of the report: at the right place, the right way up.

The marks are read back from the drawing through the labels of its axes, which knows nothing of
the program that put them there. A pixel and a half is the tolerance, as a share of the axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.report.browser import Browser
from tests.report.drawings import READ, Drawing

Numbers = dict[str, Any]
Opener = Callable[..., None]
NEAR = 0.006


def second_model(browser: Browser, opener: Opener, numbers: Numbers) -> tuple[Numbers, Any]:
    """The numbers and the drawings of the second model, which has draws."""
    opener(numbers)
    browser.run("document.querySelectorAll('#tabs button')[1].click()")
    read = browser.run(READ)
    return numbers["models"][1], {name: Drawing(each) for name, each in read.items()}


@pytest.fixture(scope="module")
def of_classes(browser: Browser, opener: Opener, classes: Numbers) -> tuple[Numbers, Any]:
    return second_model(browser, opener, classes)


@pytest.fixture(scope="module")
def of_numbers(browser: Browser, opener: Opener, numbers: Numbers) -> tuple[Numbers, Any]:
    return second_model(browser, opener, numbers)


def near(found: np.ndarray, expected: Any, share: float = NEAR) -> None:
    """Equal up to a share of the range of what is expected (and of zero)."""
    expected = np.asarray(expected, dtype=float)
    span = np.ptp(np.append(expected, 0)) or 1.0
    np.testing.assert_allclose(found, expected, rtol=0, atol=share * span)


def check_rings(drawn: Drawing, x: Any, y: Any, lower: Any, upper: Any) -> None:
    """What lies outside of its band is ringed, and nothing else."""
    x, y, lower, upper = (np.array(part, float) for part in (x, y, lower, upper))
    outside = (y < lower) | (y > upper)
    if outside.any():
        near(drawn.marks("outside", "circle"), np.column_stack([x, y])[outside], 0.015)
    else:
        assert drawn.layers["outside"] == []


def test_reliability(of_classes: Any) -> None:
    block, figures = of_classes
    curve = {key: np.array(part, float) for key, part in block["reliability"]["width"].items()}
    drawn, known = figures["reliability"], curve["count"] > 0
    stated, observed, lower, upper = (
        curve[k][known] for k in ("stated", "observed", "lower", "upper")
    )
    near(drawn.marks("dots", "circle"), np.column_stack([stated, observed]))
    near(drawn.path("dots"), np.column_stack([stated, observed]))
    bands = [curve["edges"][:-1][known], lower, curve["edges"][1:][known], upper]
    near(drawn.marks("band", "rect"), np.column_stack(bands))
    near(drawn.marks("gap", "line"), np.column_stack([stated, stated, stated, observed]))
    check_rings(drawn, stated, observed, lower, upper)
    assert drawn.layers["outside"]


def test_confidence(of_classes: Any) -> None:
    block, figures = of_classes
    part = {key: np.array(value, float) for key, value in block["reliability"]["width"].items()}
    right = np.round(np.nan_to_num(part["observed"]) * part["count"])
    wrong = part["count"] - right
    drawn = figures["confidence"]
    near(drawn.marks("wrong", "rect")[:, 1], 0 * wrong[wrong > 0])
    near(drawn.marks("wrong", "rect")[:, 3], wrong[wrong > 0], 0.03)
    near(drawn.marks("right", "rect")[:, 1], wrong[right > 0], 0.03)
    near(drawn.marks("right", "rect")[:, 3], (right + wrong)[right > 0])
    near(drawn.marks("wrong", "rect")[:, 0], part["edges"][:-1][wrong > 0])
    scalars = block["scalars"]
    near(drawn.marks("marks", "line")[:, 0], [scalars["mean_confidence"], scalars["accuracy"]])


SUMS = {
    "nll-decomposition": (
        "nll", "nll_decomposition",
        {"uncertainty": 1, "resolution": -1, "reliability": 1, "which_class": 1},
    ),
    "brier-decomposition": (
        "brier", "brier_decomposition", {"uncertainty": 1, "resolution": -1, "reliability": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SUMS)
def test_sums_add_up_step_by_step(of_classes: Any, name: str) -> None:
    block, figures = of_classes
    score, key, signs = SUMS[name]
    drawn, total = figures[name], block["scalars"][score]
    start, end = drawn.lengths("total")[0]
    pixel = total / (end - start)
    near(np.array([start * pixel]), [0.0], 0.01)
    at = 0.0
    for part, sign in signs.items():
        after = at + sign * block[key][part]
        found = drawn.lengths(part)[0] * pixel
        np.testing.assert_allclose(found, sorted([at, after]), atol=1.5 * pixel)
        at = after
    assert at == pytest.approx(total)


def test_temperature(of_classes: Any) -> None:
    block, figures = of_classes
    before, after = (figures["temperature"].lengths(key)[:, 1] for key in ("before", "after"))
    part = block["temperature"]
    ratios = [part["after"][key] / part["before"][key] for key in ("nll", "ece", "brier")]
    np.testing.assert_allclose(after / before, ratios, atol=0.01)


def test_confusion(of_classes: Any, browser: Browser, opener: Opener, classes: Numbers) -> None:
    matrix = np.array(of_classes[0]["confusion"]["matrix"])
    assert (matrix != matrix.T).any()
    opener(classes)
    browser.run("document.querySelectorAll('#tabs button')[1].click()")
    cells = browser.run(
        "return [...document.querySelectorAll('#confusion svg > g')].map(g => {"
        "const box = g.querySelector('.cell'), text = g.querySelector('text');"
        "const fill = g.querySelector('.fill');"
        "return [Number(box.getAttribute('y')), Number(box.getAttribute('x')),"
        " text ? Number(text.textContent) : 0,"
        " fill ? Number(fill.getAttribute('fill-opacity')) : 0, g.matches('.c-right')] })"
    )
    rows, columns = (sorted({cell[at] for cell in cells}) for at in (0, 1))
    found = np.zeros_like(matrix)
    for y, x, value, strength, right in cells:
        row, column = rows.index(y), columns.index(x)
        found[row, column] = value
        assert right == (row == column)
        assert strength == pytest.approx(0.1 + 0.5 * value / matrix.max() if value else 0, abs=0.01)
    np.testing.assert_array_equal(found, matrix)
    drawn = of_classes[1]["confusion"]
    names = [str(index) for index in of_classes[0]["confusion"]["classes"]]
    beside = sorted((y, text) for x, y, text in drawn.texts if x < columns[0] and text in names)
    above = sorted((x, text) for x, y, text in drawn.texts if y < rows[0] and text in names)
    assert [text for _, text in beside] == [text for _, text in above] == names


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_histograms_of_the_shift(request: pytest.FixtureRequest, task: str) -> None:
    block, figures = request.getfixturevalue(f"of_{task}")
    for at, data in enumerate(block["shift"].values()):
        part = data["by"]["entropy" if task == "classes" else "sd"]
        edges = np.array(part["edges"])
        for key in ("inside", "outside"):
            shares = np.array(part[key])
            boxes = figures[f"shift-{at}"].marks(key, "rect")
            near(boxes[:, 3], shares[shares > 0], 0.01)
            near(boxes[:, 0], edges[:-1][shares > 0])
            near(figures[f"shift-{at}"].path(key)[::2, 1], shares, 0.01)


def test_pit(of_numbers: Any) -> None:
    block, figures = of_numbers
    part = {key: np.array(value, float) for key, value in block["pit"].items()}
    drawn, edges = figures["pit"], part["edges"]
    bars = np.concatenate([drawn.marks(s, "rect") for s in ("count", "outside") if drawn.layers[s]])
    bars = bars[np.argsort(bars[:, 0])]
    near(bars[:, 3], part["count"])
    near(bars[:, [0, 2]], np.column_stack([edges[:-1], edges[1:]]))
    bands = [edges[:-1], part["lower"], edges[1:], part["upper"]]
    near(drawn.marks("band", "rect"), np.column_stack(bands))


def test_coverage(of_numbers: Any, numbers: Numbers) -> None:
    block, figures = of_numbers
    drawn, part = figures["coverage"], block["coverage"]
    for index, each in enumerate(numbers["models"]):
        curve = each["coverage"]
        expected = np.column_stack([curve["nominal"], curve["observed"]])
        near(drawn.path(f"model-{index}"), expected)
    near(drawn.marks("model-1", "circle"), np.column_stack([part["nominal"], part["observed"]]))
    check_rings(drawn, part["nominal"], part["observed"], part["lower"], part["upper"])
    there, back = np.split(drawn.path("band"), 2)
    near(there, np.column_stack([part["nominal"], part["upper"]]))
    near(back[::-1], np.column_stack([part["nominal"], part["lower"]]))


def test_error_against_spread(of_numbers: Any) -> None:
    block, figures = of_numbers
    drawn, part, cloud = figures["error-sd"], block["error_sd"], block["scatter"]
    near(drawn.marks("bins", "circle"), np.column_stack([part["sd"], part["rmse"]]), 0.01)
    check_rings(drawn, part["sd"], part["rmse"], part["lower"], part["upper"])
    bands = drawn.marks("band", "rect")
    near(bands[:, 3], part["upper"], 0.015)
    near(bands[:, 1], part["lower"], 0.015)
    sizes = np.column_stack([cloud["sd"], np.abs(cloud["error"])])
    points = drawn.marks("points", "circle")
    near(points, sizes[: len(points)], 0.01)


def test_fit(of_numbers: Any) -> None:
    block, figures = of_numbers
    part = {key: np.array(value) for key, value in block["fit"].items()}
    drawn, order = figures["fit"], np.argsort(part["x"])
    x = part["x"][order]
    near(drawn.path("mean"), np.column_stack([x, part["mean"][order]]))
    near(drawn.marks("observed", "circle"), np.column_stack([x, part["y"][order]]))
    for series, prefix in (("interval", ""), ("epistemic", "epistemic_")):
        there, back = np.split(drawn.path(series), 2)
        near(there, np.column_stack([x, part[f"{prefix}upper"][order]]))
        near(back[::-1], np.column_stack([x, part[f"{prefix}lower"][order]]))


@pytest.mark.parametrize("task", ["classes", "numbers"])
def test_whiskers_of_the_comparison(
    browser: Browser, opener: Opener, request: pytest.FixtureRequest, task: str
) -> None:
    """The larger number lies to the right, and a row has one scale for all models."""
    report = request.getfixturevalue(task)
    opener(report)
    rows = browser.run(
        "return [...document.querySelectorAll('.comparison tbody tr')].map(row =>"
        " [...row.querySelectorAll('.whisker')].map(svg => {"
        " const line = svg.querySelector('.line'), dot = svg.querySelector('circle');"
        " return [dot.getAttribute('cx'), line && line.getAttribute('x1'),"
        " line && line.getAttribute('x2')] }))"
    )
    assert len(rows) == len(report["comparison"]["rows"]) > 3
    for found, row in zip(rows, report["comparison"]["rows"], strict=True):
        values = [v for v in row["values"] if v["value"] is not None]
        told = np.array([[v["value"], v["lower"], v["upper"]] for v in values], float).ravel()
        pixels = np.array(found, float).ravel()
        known = np.isfinite(told) & np.isfinite(pixels)
        assert known.sum() >= 2
        if np.ptp(told[known]) == 0:
            continue
        slope, start = np.polyfit(told[known], pixels[known], 1)
        assert slope > 0, row["key"]
        np.testing.assert_allclose(slope * told[known] + start, pixels[known], atol=0.01)
