"""The report as one HTML file.

The file is complete in itself: style, program and numbers are inside of it, and it asks the
network for nothing. The numbers stand in a script element of type ``application/json``; the
program in ``assets/`` reads them and draws. Two rules keep odd names harmless:

- Every ``<``, ``>`` and ``&`` of the JSON is written by its code, so that no text can end
  the element that holds it, and the program writes text only as text, never as markup.
- The content security policy allows exactly our style and our program, named by their SHA-256,
  and pictures that are data. Anything else is refused by the browser.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from lightning_bnn.errors import DataError
from lightning_bnn.report.figure import COLOURS, MODEL_COLOURS, ROLES

__all__ = ["FORMAT", "page"]

FORMAT = 2
"""The version of a document; raised where a reader of older ones would misunderstand it."""

# in the order in which they use each other
_PROGRAM = (
    "document.js", "tooltip.js", "plot.js", "bars.js", "cells.js", "figure.js", "header.js",
    "comparison.js", "page.js",
)  # fmt: skip


def page(numbers: Mapping[str, Any]) -> str:
    """Write the numbers of a report as a page.

    Args:
        numbers: The document of a report: plain Python values, ready for JSON.

    Returns:
        The text of the HTML file, to be written as UTF-8.

    Raises:
        DataError: If the numbers are of another format.

    Example:
        >>> text = page({"format": 2, "title": "Digits", "models": []})
        >>> text.startswith("<!doctype html>"), "<title>Digits</title>" in text
        (True, True)
        >>> "http://" in text.replace("http://www.w3.org/2000/svg", "")
        False
    """
    if numbers.get("format") != FORMAT:
        raise DataError(
            f"The page reads numbers of format {FORMAT}, but these have format "
            f"{numbers.get('format')!r}. Make them again with this version of lightning_bnn."
        )
    data = json.dumps(numbers, allow_nan=False, separators=(",", ":"))
    template, style, program = _assets()
    title = str(numbers.get("title") or "Calibration report")
    parts = {
        # half of a surrogate pair has no UTF-8 and would stop the file from being written
        "title": html.escape(title.encode("utf-8", "replace").decode("utf-8")),
        "policy": _policy(style, program),
        "style": style,
        "program": program,
        "numbers": re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", data),
    }
    # one pass, so that a placeholder inside of the numbers stays the text that it is
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


@cache
def _assets() -> tuple[str, str, str]:
    """Read the template, the style and the program."""
    folder = resources.files("lightning_bnn.report") / "assets"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    program = "\n".join(read(name) for name in _PROGRAM)
    return (
        read("template.html"),
        _colours() + read("style.css"),
        f'(() => {{\n"use strict";\n{program}}})();',
    )


def _colours() -> str:
    """The palette as variables of the style sheet, by name and by what a mark is."""
    named = [f"--{name}: light-dark({light}, {dark});" for name, (light, dark) in COLOURS.items()]
    roles = [f".c-{role} {{ --c: var(--{name}); }}" for role, name in ROLES.items()]
    models = [f".m{at} {{ --c: var(--{name}); }}" for at, name in enumerate(MODEL_COLOURS)]
    return "\n".join([":root {", *named, "}", *roles, *models, ""])


def _policy(style: str, program: str) -> str:
    """Allow this style, this program and pictures from data; nothing else."""
    return (
        f"default-src 'none'; img-src data:; style-src {_digest(style)}; "
        f"script-src {_digest(program)}; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    """Name a text as a content security policy does."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
