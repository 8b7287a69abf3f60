"""The page as text: complete, self-contained, and safe whatever the names are."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib import resources
from typing import Any

from lightning_bnn.report import page as module
from lightning_bnn.report.page import page

ODD = "</script><!--<script>alert(1)</script>&amp; {{style}} \u2028 \U0001f600 \\u003c \"'"


def document(**changes: Any) -> dict[str, Any]:
    return {"format": 2, "title": "t", "summary": [], "models": []} | changes


class Elements(HTMLParser):
    """Elements and the text in them, as an independent reader of HTML sees them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open = False
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        self.open = True

    def handle_endtag(self, tag: str) -> None:
        self.open = False

    def handle_data(self, data: str) -> None:
        if self.open:
            self.found[-1][2].append(data)

    def texts(self, tag: str) -> list[str]:
        return ["".join(text) for name, _, text in self.found if name == tag]


def test_the_numbers_come_back_whatever_the_names_are() -> None:
    numbers = document(title=ODD, models=[{"name": ODD, "scalars": {"ece": 1e-17, "nll": None}}])
    elements = Elements(page(numbers))
    data, _program = elements.texts("script")
    assert json.loads(data) == numbers
    assert elements.texts("title") == [ODD]
    assert elements.texts("h1") == [ODD]


def test_names_add_no_elements() -> None:
    plain = [tag for tag, *_ in Elements(page(document())).found]
    odd = page(document(title=ODD, summary=[{"model": ODD, "level": "bad", "text": ODD}]))
    assert [tag for tag, *_ in Elements(odd).found] == plain


def test_half_a_character_can_still_be_written() -> None:
    text = page(document(title="half \ud83d", models=[{"name": "\ud83d"}]))
    assert "<title>half ?</title>" in text.encode().decode()


def test_the_policy_names_exactly_the_style_and_the_program() -> None:
    elements = Elements(page(document()))
    policy = next(a["content"] for _, a, _ in elements.found if "http-equiv" in a) or ""
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    def digest(text: str) -> str:
        return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    assert rules["default-src"] == "'none'"
    assert rules["img-src"] == "data:"
    assert rules["style-src"] == f"'sha256-{digest(elements.texts('style')[0])}'"
    assert rules["script-src"] == f"'sha256-{digest(elements.texts('script')[1])}'"
    assert "unsafe" not in policy


def test_nothing_in_it_points_elsewhere() -> None:
    text = page(document())
    # the name of the SVG namespace is a name, not an address
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[\w./]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\((?!#)|\bsrc=|fetch\(|XMLHttpRequest|innerHTML", text)


def test_every_asset_is_used() -> None:
    folder = resources.files("lightning_bnn.report") / "assets"
    names = {entry.name for entry in folder.iterdir()}
    assert names == {"template.html", "style.css", *module._PROGRAM}
