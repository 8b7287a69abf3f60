"""One browser for the whole session, and pages written for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_bnn.report.page import page
from tests.report.browser import Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def opener(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Show the page of a report's numbers in the browser."""
    folder = tmp_path_factory.mktemp("pages")
    written: dict[int, tuple[dict[str, Any], Path]] = {}  # keeps each document, and so its id

    def show(numbers: dict[str, Any], **how: Any) -> None:
        if id(numbers) not in written:
            file = folder / f"page{len(written)}.html"
            file.write_text(page(numbers), encoding="utf-8")
            written[id(numbers)] = numbers, file
        browser.open(written[id(numbers)][1], **how)

    return show
