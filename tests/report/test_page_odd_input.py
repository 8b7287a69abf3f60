"""The page when parts are missing, names are hostile, or there is much or nothing to show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_bnn.report import report
from lightning_bnn.report.sections import default_sections
from tests.report.browser import Browser
from tests.report.drawings import READ, Drawing

Numbers = dict[str, Any]
Opener = Callable[..., None]

HOSTILE = (
    "</script><script>window.harmed = 1</script>",
    "<!--<script>",
    '"><img src=x onerror="window.harmed = 1">',
    "${window.harmed = 1} {{program}} constructor __proto__ " + "long_name_without_a_space" * 6,
)


@pytest.fixture(scope="module")
def classes() -> Numbers:
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet([0.5, 0.5, 0.5], size=(2, 150))
    targets = [generator.choice(3, p=row) for row in probabilities.mean(0)]
    other = generator.dirichlet([1, 1, 1], size=40)
    return report(
        {"one": probabilities[0], "two": probabilities},
        targets,
        ood={"far": {"one": other, "two": np.stack([other, other])}},
        inputs=generator.random((150, 3, 6, 6)),
        class_names=["a", "b", "c"],
    ).numbers


@pytest.fixture(scope="module")
def numbers() -> Numbers:
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=120)
    targets = inputs + generator.normal(size=120)
    return report(inputs, targets, scales=1.0, inputs=inputs, ood={"far": (inputs, 2.0)}).numbers


@pytest.fixture(params=["classes", "numbers"])
def either(request: pytest.FixtureRequest) -> Numbers:
    return request.getfixturevalue(request.param)


def redrawn(numbers: Numbers, **changes: Any) -> Numbers:
    """A document whose sections are described again, after its numbers were changed."""
    made = copy.deepcopy(numbers) | changes
    for block in made["models"]:
        parts = {part["id"]: part for part in block["sections"]}
        for section in default_sections(made["task"]):
            # what a section keeps for itself, the pictures, stays as it was
            if section.key in parts and section.key != "examples":
                parts[section.key] = section.described(block, made)
        block["sections"] = [part for part in parts.values() if part is not None]
    return made


def without_floats(value: Any) -> Any:
    """The same with null for every number that may not be finite."""
    if isinstance(value, dict):
        return {key: without_floats(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_floats(each) for each in value]
    return None if isinstance(value, float) else value


def test_hostile_names_are_only_text(browser: Browser, opener: Opener, classes: Numbers) -> None:
    odd = copy.deepcopy(classes)
    odd["title"] = HOSTILE[0]
    odd["data"]["source"] = HOSTILE[2]
    odd["data"]["class_names"] = list(HOSTILE[:3])
    odd["comparison"]["columns"] = [HOSTILE[2], HOSTILE[3]]
    odd["summary"] = [{"model": HOSTILE[0], "level": HOSTILE[2], "text": HOSTILE[1]}]
    odd["summary"] += [{"model": None, "level": "constructor", "text": "toString"}]
    for block, name in zip(odd["models"], (HOSTILE[2], HOSTILE[3]), strict=True):
        block["name"] = name
        block["shift"] = {HOSTILE[0]: block["shift"]["far"], "__proto__": block["shift"]["far"]}
        block["verdict"]["label"] = HOSTILE[2]
        shown = block["sections"][-1]["figures"][0]["pictures"]
        shown[0]["image"] = "javascript:window.harmed = 1"
        shown[1] |= {"image": "https://example.invalid/picture.png", "says": HOSTILE[0]}
    odd = redrawn(odd)
    odd["method"].append([HOSTILE[0], HOSTILE[2]])
    opener(odd, width=400)
    browser.click("#tabs button", 1)
    browser.hover("#confusion [data-tip]", 1)
    assert HOSTILE[0][:9] in (browser.tooltip() or "")
    browser.hover(".badge", 0)
    assert browser.run("return window.harmed === undefined")
    assert browser.texts("#title") == [HOSTILE[0]]
    assert browser.run("return document.scripts.length") == 2
    sources = browser.run("return [...document.images].map(i => i.src.slice(0, 11))")
    assert set(sources) == {"data:image/"}
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    browser.run("document.querySelectorAll('#tabs button')[0].click()")
    assert browser.messages() == []
    assert [a for a in browser.requests() if not a.startswith(("file:", "data:"))] == []


def test_a_malformed_figure_costs_only_itself(
    browser: Browser, opener: Opener, either: Numbers
) -> None:
    odd = copy.deepcopy(either)
    figures = odd["models"][0]["sections"][0]["figures"]
    figures[-1] = {"kind": "plot", "id": "broken", "title": "Broken"}
    opener(odd)
    assert len(browser.messages()) >= 1
    shown = browser.run("return [...document.querySelectorAll('#figures figure')].map(e => e.id)")
    assert len(shown) > 4
    assert len(browser.texts("#figures svg")) > 3


def test_null_for_every_number(browser: Browser, opener: Opener, either: Numbers) -> None:
    blank = copy.deepcopy(either)
    for block in blank["models"]:
        for key in ("reliability", "pit", "coverage", "error_sd", "fit", "scatter", "scalars"):
            block |= {key: without_floats(block[key])} if key in block else {}
        block["scalars"]["risk"] = 0.05  # an option, which is always there
    blank = redrawn(blank)
    for key in ("models", "comparison"):
        blank[key] = without_floats(blank[key])
    opener(blank)
    assert browser.messages() == []
    assert "NaN" not in browser.run("return document.body.innerText + document.body.innerHTML")
    assert "undefined" not in browser.run("return document.body.innerText")


def test_one_model_has_no_tabs_and_no_best(
    browser: Browser, opener: Opener, numbers: Numbers
) -> None:
    opener(numbers)
    assert not browser.run("return document.getElementById('tabs').getClientRects().length")
    assert browser.texts(".best") == []
    assert browser.texts("#comparison-title") == ["The numbers"]


def test_a_thousand_classes_are_capped(browser: Browser, opener: Opener, classes: Numbers) -> None:
    many = copy.deepcopy(classes)
    generator = np.random.default_rng(0)
    many["data"] |= {"classes": 1000, "class_names": [f"class number {i}" for i in range(1000)]}
    for block in many["models"]:
        block["per_class"] = [
            block["per_class"][0] | {"class": index, "aleatoric": value}
            for index, value in enumerate(generator.random(1000).tolist())
        ]
        block["confusion"] |= {
            "classes": list(range(980, 1000)),
            "matrix": generator.integers(0, 9, (20, 20)).tolist(),
        }
    opener(redrawn(many), width=400)
    assert 10 <= browser.run("return document.querySelectorAll('#per-class .hit').length") <= 30
    browser.click("#per-class details summary")
    browser.driver.execute_async_script("setTimeout(arguments[0], 100)")
    assert len(browser.texts("#per-class .data tbody tr")) == 1000
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    assert browser.messages() == []


def test_many_models(browser: Browser, opener: Opener, classes: Numbers) -> None:
    many = copy.deepcopy(classes)
    many["models"] = [classes["models"][0] | {"name": f"model {i}"} for i in range(20)]
    many["comparison"]["columns"] = [f"model {i}" for i in range(20)]
    for row in many["comparison"]["rows"]:
        row["values"] = [row["values"][0] | {"best": True}] * 20
    opener(many, width=400)
    browser.click("#tabs button", 19)
    assert browser.texts("#figures-title") == ["Figures of model 19"]
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    strokes = browser.run(
        "return [...document.querySelectorAll('#risk-coverage [data-series^=model-]')].map(layer =>"
        "[layer.getAttribute('class'), layer.firstChild.getAttribute('stroke-dasharray')].join())"
    )
    assert len(set(strokes)) == 20  # no two models look alike
    swatches = browser.run(
        "return [...document.querySelectorAll('#risk-coverage .legend [data-key^=model-] .swatch')]"
        ".map(e => getComputedStyle(e).background)"
    )
    assert len(set(swatches)) == 20
    browser.hover("#risk-coverage .hit", 5)
    assert "model 19: risk" in (browser.tooltip() or "").splitlines()[1]
    browser.hover("[data-row=nll] td", 0)
    assert "best of this row, as others are" in (browser.tooltip() or "")
    assert browser.messages() == []


def test_one_draw_shows_no_disagreement(browser: Browser, opener: Opener, either: Numbers) -> None:
    epistemic = "return document.querySelectorAll('#figures .c-epistemic').length"
    block = copy.deepcopy(either["models"][0])
    opener(redrawn(either, models=[block | {"draws": 1}]))
    scores = set(browser.texts("#shift th"))
    assert not scores & {"Mutual information", "Epistemic sd"}
    assert scores & {"Entropy", "Standard deviation"}
    assert "One draw cannot show disagreement." in browser.run("return document.body.innerText")
    assert "epistemic" not in browser.run(
        "return [...document.querySelectorAll('#figures .legend')].map(e => e.textContent).join()"
    )
    alone = browser.run(epistemic)
    opener(redrawn(either, models=[block | {"draws": 2}]))
    assert browser.run(epistemic) > alone


SIZES = (
    (1e6, [1.0e6, 1.5e6, 2.0e6]),
    (1e-9, [2e-9, 3e-9, 4e-9]),
    (0.0, [-2e6, 0.0, 2.5e6]),
    (0.0, [0.0, 0.0, 0.0]),
)


@pytest.mark.parametrize(("x", "y"), SIZES)
def test_labels_tell_ticks_apart(
    browser: Browser, opener: Opener, numbers: Numbers, x: float, y: list[float]
) -> None:
    """Whatever the size of the numbers: distinct labels that say where the marks are."""
    fit = {
        "x": [x, 2 * x, 4 * x], "y": y, "mean": y, "lower": y, "upper": y,
        "epistemic_lower": y, "epistemic_upper": y, "level": 0.9,
    }  # fmt: skip
    opener(redrawn(numbers, models=[numbers["models"][0] | {"fit": fit}]))
    read = browser.run(READ)["fit"]
    for axis in "xy":
        labels = [text for _, text in read[axis]]
        assert len(labels) == len(set(labels)) >= 2
        assert not any("-" in label for label in labels)  # a real minus, also in exponents
    found = Drawing(read).marks("observed", "circle")
    span = max(map(abs, y)) or 1
    np.testing.assert_allclose(found[:, 1], y, atol=0.02 * span)
    # the labels of the y axis stay clear of its name
    clear = browser.run(
        "const [name, ...rest] = [...document.querySelectorAll('#fit .axes text')].reverse()"
        ".map(e => e.getBoundingClientRect());"
        "return rest.filter(b => b.left < name.left + 30).every(b => b.left > name.right)"
    )
    assert clear


def test_an_infinite_loss_and_a_step_of_nothing(
    browser: Browser, opener: Opener, classes: Numbers
) -> None:
    block, other = copy.deepcopy(classes["models"])
    block["invalid"] |= {"impossible": 2}
    block["verdict"]["label"] = "miscalibrated"
    block["scalars"]["nll"] = None
    other["verdict"]["label"] = "nothing found"
    other["nll_decomposition"] |= {"reliability": -3e-17}
    two = copy.deepcopy(classes) | {"models": [block, other], "made": "2026-01-02T03:04:05+00:00"}
    two["data"]["classes"] = 2
    nll = next(row for row in two["comparison"]["rows"] if row["key"] == "nll")
    nll["values"][0] = {"value": None, "lower": None, "upper": None, "best": False, "tied": False}
    opener(redrawn(two))
    assert browser.texts(".badge.bad") == ["✕ miscalibrated"]
    assert browser.texts(".badge.note") == ["i nothing found"]
    assert "∞" in browser.texts(".model")[0]
    assert "∞" in browser.texts("[data-row=nll] .value")[0]
    assert "1 to 2 draws" in browser.texts("#data-line")[0]
    assert "made 2026-01-02 03:04 UTC" in browser.texts("#data-line")[0]
    browser.click("#tabs button", 1)
    words = browser.texts("#nll-decomposition svg text")
    assert "which class" not in words
    assert words[words.index("reliability") + 1] == "0"
    assert browser.messages() == []


def test_long_names_stay_in_their_places(
    browser: Browser, opener: Opener, classes: Numbers
) -> None:
    odd = copy.deepcopy(classes)
    long = "Extraordinarily-long-name-without-breaks_" * 3
    for row in odd["comparison"]["rows"]:
        row["label"] = f"{long} ood: AUROC"
    odd["data"]["class_names"] = [f"{long}{i}" for i in range(3)]
    odd["comparison"]["columns"] = [f"{long}A", f"{long}B"]
    for block, name in zip(odd["models"], odd["comparison"]["columns"], strict=True):
        block["name"] = name
    opener(redrawn(odd), width=400)
    assert browser.run(
        "return [...document.querySelectorAll('.comparison tbody th')].every(cell =>"
        " cell.scrollWidth <= cell.clientWidth + 1)"
    )
    assert any(text.endswith("_2") for text in browser.texts("#confusion svg text"))
    shown = ("#tabs .label", "#risk-coverage .legend .label", ".model h3", ".comparison thead th")
    for selector in shown:  # the names differ at their end, which stays
        assert [text[-1] for text in browser.texts(selector)][:2] == ["A", "B"], selector
    tops = browser.run(
        "return [...document.querySelectorAll('.example')].map(e => ["
        "e.getBoundingClientRect().top, e.firstChild.getBoundingClientRect().top])"
    )
    assert all(top == picture for top, picture in tops)
