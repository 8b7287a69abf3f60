"""The section on pruning: its figures show the numbers, and mouse and keys find them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_bnn.pruning.section import Pruning
from tests.pruning.blocks import OF_CLASSES, hand_made
from tests.report.browser import Browser
from tests.report.drawings import READ, Drawing, value_of

Numbers = dict[str, Any]
Opener = Callable[..., None]


@pytest.fixture(scope="module")
def pruned(classes: Numbers) -> Numbers:
    """The first model has a curve, the second has no variances."""
    return attached(
        classes, hand_made(OF_CLASSES), {"unavailable": "<b>one draw</b> has no variance."}
    )


def attached(numbers: Numbers, *curves: dict[str, Any]) -> Numbers:
    """The same document, whose models have curves."""
    made = copy.deepcopy(numbers)
    section = Pruning([0.0])
    for block, curve in zip(made["models"], curves, strict=True):
        block["pruning"] = curve
        part = section.described(block, made)
        assert part is not None
        block["sections"].insert(-2, part)
    made["method"] += [list(term) for term in section.method]
    return made


@pytest.fixture(scope="module")
def drawn(browser: Browser, opener: Opener, pruned: Numbers) -> dict[str, Any]:
    opener(pruned)
    return browser.run(READ)


def on_logarithm(read: dict[str, Any], of_label: Callable[[float], float]) -> Drawing:
    """A drawing whose x axis says something else than it is linear in."""
    texts = [[place, str(of_label(value_of(text)))] for place, text in read["x"]]
    return Drawing({**read, "x": texts})


def test_histogram(drawn: dict[str, Any], pruned: Numbers) -> None:
    block = pruned["models"][0]["pruning"]
    figure = on_logarithm(drawn["snr"], np.log10)
    edges, counts = (np.array(block["histogram"][key]) for key in ("log10_edges", "counts"))
    bars = figure.marks("counts", "rect")
    np.testing.assert_allclose(bars[:, 0], edges[:-1][counts > 0], atol=0.01)
    np.testing.assert_allclose(bars[:, 2], edges[1:][counts > 0], atol=0.01)
    np.testing.assert_allclose(bars[:, 3], counts[counts > 0], atol=0.006 * counts.max())
    lines = figure.marks("thresholds", "line")
    wanted = [np.log10(one["threshold"]) for one in block["results"] if one["threshold"]]
    np.testing.assert_allclose(np.sort(lines[:, 0]), wanted, atol=0.01)
    np.testing.assert_allclose(lines[:, 0], lines[:, 2])
    shown = [text for *_, text in drawn["snr"]["texts"]]
    assert {"50%", "75%", "90%", "95%", "98%", "99%"} <= set(shown)


def test_curves(browser: Browser, drawn: dict[str, Any], pruned: Numbers) -> None:
    block = pruned["models"][0]["pruning"]
    shares = [-np.log10(1 - one["fraction"]) for one in block["results"]]
    rows = {row["key"]: row["values"][0] for row in pruned["comparison"]["rows"]}
    for at, name in enumerate(("accuracy", "nll", "ece", "brier")):
        figure = on_logarithm(
            drawn[f"pruning-curve/{at}" if at else "pruning-curve"], lambda f: -np.log10(1 - f)
        )
        values = np.array([one["scores"][name] for one in block["results"]])
        ends = np.array([rows[name]["lower"], rows[name]["upper"]])
        if name == "accuracy":
            values, ends = 1 - values, 1 - ends[::-1]
        near = 0.008 * (max(*values, *ends) - min(*values, *ends))
        for found in (figure.marks("model-0", "circle"), figure.path("model-0")):
            np.testing.assert_allclose(found[:, 0], shares, atol=0.012)
            np.testing.assert_allclose(found[:, 1], values, atol=near)
        ((_, low, _, high),) = figure.marks("interval", "rect")
        np.testing.assert_allclose([low, high], ends, atol=near)
        assert "model-1" not in figure.layers
    assert browser.messages() == []


def test_a_layer_by_itself(browser: Browser, opener: Opener, pruned: Numbers) -> None:
    opener(pruned)
    names = browser.texts("#snr option")
    assert names == ["all layers", "0.weight", "2.weight", "4.weight"]
    browser.run(
        "const s = document.querySelector('#snr select'); s.value = '2.weight';"
        "s.dispatchEvent(new Event('change'))"
    )
    figure = on_logarithm(browser.run(READ)["snr"], np.log10)
    counts = np.array(pruned["models"][0]["pruning"]["histogram"]["layers"][1]["counts"])
    bars = figure.marks("counts", "rect")
    np.testing.assert_allclose(bars[:, 3], counts[counts > 0], atol=0.006 * counts.max())


def test_words_and_table(browser: Browser, opener: Opener, pruned: Numbers) -> None:
    opener(pruned)
    (lead,) = browser.texts("#pruning > .lead")
    assert "With 95% of 4,600 weights removed, error 38.80% instead of 37.80%" in lead
    rows = browser.run(
        "return [...document.querySelectorAll('#pruning-results > .scroll tr')]"
        ".map(r => [...r.children].map(c => c.textContent))"
    )
    assert rows[0][:4] == ["removed", "weights left", "largest ratio removed", "error rate"]
    assert rows[1][:4] == ["0%", "4,600", "–", "37.80%"]
    assert rows[7][:2] == ["99%", "46"]
    layers = browser.run(
        "document.querySelector('#pruning-results details').open = true;"
        "document.querySelector('#pruning-results details').dispatchEvent(new Event('toggle'));"
        "return [...document.querySelectorAll('#pruning-results details tr')]"
        ".map(r => [...r.children].map(c => c.textContent))"
    )
    shares = pruned["models"][0]["pruning"]["histogram"]["layers"][2]["removed"]
    assert layers[3][0] == "4.weight"
    assert [value_of(one) for one in layers[3][3:]] == pytest.approx(shares, abs=6e-4)
    assert "Pruning" in browser.texts("#terms dt")


def test_without_variances(browser: Browser, opener: Opener, pruned: Numbers) -> None:
    opener(pruned)
    browser.run("document.querySelectorAll('#tabs button')[1].click()")
    wanted = "No pruning by signal to noise: <b>one draw</b> has no variance."
    assert browser.texts("#pruning > .lead") == [wanted]
    assert browser.texts("#pruning figure, #pruning b") == []
    assert browser.messages() == []


def test_narrow_and_on_paper(browser: Browser, opener: Opener, pruned: Numbers) -> None:
    opener(pruned, width=400, scheme="dark")
    wide, box = browser.run(
        "return [document.documentElement.scrollWidth,"
        "document.querySelector('#pruning-curve .multiples').style.getPropertyValue('--columns')]"
    )
    assert (wide <= 400, box) == (True, "1")
    overlaps = browser.run(
        """return [...document.querySelectorAll('#pruning .canvas svg')].flatMap(svg => {
          const boxes = [...svg.querySelectorAll('.tick')]
            .map(t => t.nextElementSibling.getBoundingClientRect())
            .sort((a, b) => a.left - b.left);
          return boxes.slice(1).filter((b, i) => b.left < boxes[i].right + 2);
        }).length"""
    )
    assert overlaps == 0
    assert len(browser.pdf()) > 10_000
    assert browser.messages() == []


def test_one_result_layers_and_units(browser: Browser, opener: Opener, classes: Numbers) -> None:
    whole = hand_made(OF_CLASSES)
    single = whole | {"results": whole["results"][:1]}
    layered = whole | {"scope": "layer", "unit": "channel"}
    opener(attached(classes, single, layered))
    titles = "#pruning figure h4"
    assert [text.split(" ")[0] for text in browser.texts(titles)] == ["Signal-to-noise", "The"]
    browser.click("#tabs button", 1)
    found = [text.split(" ")[0] for text in browser.texts(titles)]
    assert found == ["Signal-to-noise", "What", "The"]
    assert "thresholds" not in browser.run(READ)["snr"]["layers"]
    assert browser.texts("#pruning-results th")[1] == "units left"
    assert browser.messages() == []
