"""The page in a real browser: it draws, answers to the mouse and the keys, and asks for nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.report.browser import Browser

Numbers = dict[str, Any]
Opener = Callable[..., None]

CLASS_FIGURES = {
    "reliability", "confidence", "temperature", "risk-coverage", "nll-decomposition",
    "brier-decomposition", "per-class", "confusion", "shift-0", "shift-1", "examples-figure",
}  # fmt: skip
NUMBER_FIGURES = {"pit", "coverage", "error-sd", "uncertainty-sd", "fit", "shift-0"}


@pytest.fixture(params=["classes", "numbers"])
def either(request: pytest.FixtureRequest) -> Numbers:
    return request.getfixturevalue(request.param)


MARKS = """
return Object.fromEntries([...document.querySelectorAll('figure')].map(figure => {
  const svg = figure.querySelector('.canvas svg');
  if (!svg) return [figure.id, [...figure.querySelectorAll('img')].map(i => i.naturalWidth > 0)];
  const outer = svg.getBoundingClientRect();
  const marks = [...svg.querySelectorAll('.fill, .line, .band')].filter(m => !m.closest('.gone'));
  return [figure.id, marks.map(mark => {
    const box = mark.getBoundingClientRect();
    const inside = box.left >= outer.left - 1 && box.right <= outer.right + 1 &&
      box.top < outer.bottom && box.bottom > outer.top;
    return inside && box.width + box.height > 0.5;
  })];
}))
"""


def test_opens_in_silence_and_asks_for_nothing(
    browser: Browser, opener: Opener, either: Numbers
) -> None:
    opener(either)
    assert browser.messages() == []
    asked = browser.requests()
    assert any(address.startswith("file:") for address in asked)
    assert [a[:60] for a in asked if not a.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("width", [1280, 400])
def test_every_figure_shows_marks_inside_of_its_frame(
    browser: Browser, opener: Opener, either: Numbers, width: int
) -> None:
    opener(either, width=width)
    figures = browser.run(MARKS)
    expected = CLASS_FIGURES if either["task"] == "classification" else NUMBER_FIGURES
    assert set(figures) == expected
    for name, marks in figures.items():
        assert len(marks) >= 2, name
        assert all(marks), name
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.messages() == []


def test_pointing_at_a_bin_tells_its_numbers(
    browser: Browser, opener: Opener, classes: Numbers
) -> None:
    opener(classes)
    curve = classes["models"][0]["reliability"]["width"]
    bins = [i for i, count in enumerate(curve["count"]) if count]
    browser.hover("#reliability .hit", len(bins) - 1)
    told = browser.tooltip() or ""
    assert f"{curve['stated'][bins[-1]]:.3f}" in told
    assert f"{curve['observed'][bins[-1]]:.3f}" in told
    assert f"{int(curve['count'][bins[-1]]):,}" in told
    browser.hover("#method-title")
    assert browser.tooltip() is None


def test_the_keys_walk_through_a_figure(browser: Browser, opener: Opener, numbers: Numbers) -> None:
    opener(numbers)
    browser.run("document.querySelector('#pit summary').focus()")
    coverage = numbers["models"][0]["coverage"]
    press = browser.driver.switch_to.active_element.send_keys
    press("\ue004")  # tab: into the next figure, at its first mark
    mark = browser.driver.switch_to.active_element
    assert mark.get_attribute("role") == "img"
    assert f"{100 * coverage['observed'][0]:.1f}%" in (mark.get_attribute("aria-label") or "")
    mark.send_keys("\ue014\ue014")  # right, right
    assert f"{100 * coverage['observed'][2]:.1f}%" in (browser.tooltip() or "")
    assert browser.run("return document.querySelectorAll('#coverage [tabindex=\"0\"]').length") == 1
    browser.driver.switch_to.active_element.send_keys("\ue00c")  # escape
    assert browser.tooltip() is None


def test_a_touch_tells_too(browser: Browser, opener: Opener, numbers: Numbers) -> None:
    opener(numbers, width=400)
    x, y = browser.middle("#pit .hit", 0)
    point = [{"x": x, "y": y}]
    browser.command("Input.dispatchTouchEvent", type="touchStart", touchPoints=point)
    browser.command("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    assert f"{int(numbers['models'][0]['pit']['count'][0])}" in (browser.tooltip() or "")


def test_tabs_change_the_model(browser: Browser, opener: Opener, either: Numbers) -> None:
    opener(either)
    first, second = (block["name"] for block in either["models"])
    assert browser.texts("#figures-title") == [f"Figures of {first}"]
    before = browser.run("return document.querySelector('#figures svg').outerHTML")
    browser.click("#tabs button", 1)
    assert browser.texts("#figures-title") == [f"Figures of {second}"]
    assert browser.run("return document.querySelector('#figures svg').outerHTML") != before
    browser.driver.switch_to.active_element.send_keys("\ue014")  # right: around to the first
    assert browser.texts("#tabs [aria-selected=true]") == [first]
    browser.click(".model button", 1)
    assert browser.texts("#tabs [aria-selected=true]") == [second]
    assert browser.messages() == []


def test_the_legend_switches_a_series_and_remembers(
    browser: Browser, opener: Opener, classes: Numbers
) -> None:
    opener(classes)
    shown = (
        "return getComputedStyle(document.querySelector("
        "'#confidence [data-series=wrong]')).display !== 'none'"
    )
    assert browser.run(shown)
    browser.click("#confidence .legend [data-key=wrong]")
    assert not browser.run(shown)
    browser.click("#tabs button", 1)
    assert not browser.run(shown)
    browser.click("#confidence .legend [data-key=wrong]")
    assert browser.run(shown)


def test_the_score_of_the_shift(browser: Browser, opener: Opener, classes: Numbers) -> None:
    opener(classes)
    assert browser.texts("#shift-0 .chosen th") == ["Entropy"]
    assert "entropy (nats)" in browser.texts("#shift-0 .axes .name")
    assert "An AUPR of 0.17 is chance." in browser.texts("#shift-0 .read")[0]  # 400 of 2,400
    browser.click("#shift .switch button", 1)
    assert browser.texts("#shift-0 .chosen th") == ["Maximum probability"]
    name, data = next(iter(classes["models"][0]["shift"].items()))
    part = data["by"]["maximum_probability"]
    assert browser.texts("#shift-0 h4") == [name]
    told = [f"{part[key]:.3f}" for key in ("auroc", "aupr", "fpr95")]
    assert browser.texts("#shift-0 .chosen td") == told
    assert "maximum probability" in browser.texts("#shift-0 .axes .name")


def test_the_comparison_marks_the_best(browser: Browser, opener: Opener, classes: Numbers) -> None:
    opener(classes)
    row = next(row for row in classes["comparison"]["rows"] if row["key"] == "nll")
    weights = browser.run(
        "return [...document.querySelectorAll('[data-row=nll] .value')]"
        ".map(e => Number(getComputedStyle(e).fontWeight) > 600)"
    )
    assert weights == [value["best"] for value in row["values"]] == [True, False]
    shown = browser.run(
        "return [...document.querySelectorAll('[data-row=nll] .interval')].map(e => e.textContent)"
    )
    for text, value in zip(shown, row["values"], strict=True):
        lower, upper = (float(part) for part in text.split(" – "))
        assert lower == pytest.approx(value["lower"], abs=6e-4)
        assert upper == pytest.approx(value["upper"], abs=6e-4)
    browser.hover("[data-row=nll] td", 0)
    assert "best of this row" in (browser.tooltip() or "")
    browser.hover("#method-title")
    browser.run("document.querySelector('.badge').focus()")
    browser.driver.switch_to.active_element.send_keys("\ue004")  # tab, and back
    browser.driver.switch_to.active_element.send_keys("\ue008\ue004\ue008")
    assert "tail corrected for skewness" in (browser.tooltip() or "")


CONTRAST = """
const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const ratio = (a, b) => {
  const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};
const ground = node => {
  for (let at = node; at; at = at.parentElement) {
    const colour = parse(getComputedStyle(at).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
};
const low = [];
for (const node of document.querySelectorAll('body *')) {
  const said = [...node.childNodes].some(c => c.nodeType === 3 && c.textContent.trim());
  if (!said || !node.getClientRects().length || node.closest('script, noscript')) continue;
  const style = getComputedStyle(node);
  const colour = parse(node instanceof SVGElement ? style.fill : style.color);
  if (ratio(colour, ground(node)) < 4.5) low.push([node.className, node.textContent]);
}
for (const node of document.querySelectorAll('.swatch:not(.c-band)')) {
  const style = getComputedStyle(node);
  const filled = style.backgroundColor !== 'rgba(0, 0, 0, 0)';
  if (node.closest('[aria-selected=true]') || node.matches('.dashed')) continue;
  const colour = parse(filled ? style.backgroundColor : style.borderTopColor);
  if (ratio(colour, ground(node.parentElement)) < 3) low.push([node.className, 'swatch']);
}
return [ground(document.body), low];
"""


def test_both_schemes_are_readable(browser: Browser, opener: Opener, either: Numbers) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        opener(either, scheme=scheme)
        ground, low = browser.run(CONTRAST)
        assert low == [], scheme
        grounds.append(sum(ground) / 3)
    assert grounds[0] > 200
    assert grounds[1] < 60


def test_the_button_changes_the_theme(browser: Browser, opener: Opener, numbers: Numbers) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    opener(numbers, scheme="dark")
    dark = browser.run(ground)
    browser.click("#theme")
    light = browser.run(ground)
    assert light != dark
    assert browser.texts("#theme") == ["Dark"]
    browser.driver.refresh()
    assert browser.run(ground) == light  # kept
    browser.emulate(scheme="light")
    assert browser.run(ground) == light
    browser.click("#theme")
    assert browser.run(ground) == dark


def test_prints_light_without_controls(browser: Browser, opener: Opener, classes: Numbers) -> None:
    opener(classes, scheme="dark")
    browser.emulate(scheme="dark", media="print")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    assert browser.run(
        "return [...document.querySelectorAll('button:not(.entry), details')]"
        ".every(e => !e.getClientRects().length)"
    )
    assert browser.run("return getComputedStyle(document.querySelector('.card')).breakInside") == (
        "avoid"
    )
    assert browser.run(CONTRAST)[1] == []
    wide = "return document.querySelector('#reliability svg').viewBox.baseVal.width"
    before = browser.run(wide)
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.run(wide) < before  # drawn for paper, so that its text stays legible
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    browser.emulate(scheme="dark")
    paper = browser.pdf()
    assert paper.startswith(b"%PDF")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", paper)) <= 20


def test_the_download_holds_the_same_numbers(
    browser: Browser, opener: Opener, numbers: Numbers, tmp_path: Path
) -> None:
    opener(numbers)
    browser.command("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.click("#download")
    file, end = tmp_path / "report.json", time.monotonic() + 5
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert json.loads(file.read_text(encoding="utf-8")) == numbers
