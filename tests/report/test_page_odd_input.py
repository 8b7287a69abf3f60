"""The page when parts are missing, names are hostile, or there is much or nothing to show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lightning_bnn.report import report
from tests.report.browser import Browser

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


def without_numbers(value: Any) -> Any:
    """The same document with null for every number."""
    if isinstance(value, dict):
        return {key: without_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_numbers(each) for each in value]
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
        block["uncertain"][0]["image"] = "javascript:window.harmed = 1"
        block["uncertain"][1]["image"] = "https://example.invalid/picture.png"
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


def test_every_part_may_be_missing(browser: Browser, opener: Opener, either: Numbers) -> None:
    whole = either["models"][0]
    variants = []
    for key in whole:
        rest = {name: each for name, each in whole.items() if name != key}
        # null, not there, and there but empty
        empty = {key: type(whole[key])()} if isinstance(whole[key], dict | list) else {}
        variants += [rest | {key: None}, rest, rest | empty]
    opener(either | {"models": [whole, *variants]})
    figures = browser.run(
        "return [...document.querySelectorAll('#tabs button')].map(tab => {"
        "tab.click(); return document.querySelectorAll('#figures figure').length })"
    )
    assert browser.messages() == []
    assert len(figures) == 1 + len(variants)
    assert min(figures) >= figures[0] - 3  # without the scores, three sums have no total
    assert len(set(figures)) > 1


def test_parts_around_the_models_may_be_missing(
    browser: Browser, opener: Opener, classes: Numbers
) -> None:
    for key in ("title", "library", "summary", "data", "comparison"):
        part = {name: value for name, value in classes.items() if name != key}
        opener(part)
        assert browser.messages() == [], key
        assert len(browser.texts("#figures figure")) > 5


def test_null_for_every_number(browser: Browser, opener: Opener, either: Numbers) -> None:
    opener(without_numbers(either))
    assert browser.messages() == []
    assert "NaN" not in browser.run("return document.body.innerText + document.body.innerHTML")
    assert "undefined" not in browser.run("return document.body.innerText")


def test_no_model_at_all(browser: Browser, opener: Opener) -> None:
    opener({"format": 1, "title": "Empty", "task": "classes", "models": []})
    assert browser.messages() == []
    assert browser.texts("#title") == ["Empty"]
    assert browser.texts("#figures figure") == []


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
    opener(many, width=400)
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
        row["values"] = row["values"][:1] * 20
    opener(many, width=400)
    browser.click("#tabs button", 19)
    assert browser.texts("#figures-title") == ["Figures of model 19"]
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    assert browser.messages() == []
