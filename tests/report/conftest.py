"""One browser for the whole session, and pages written for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_bnn.report import report
from lightning_bnn.report.page import page
from tests.report.browser import Browser

Numbers = dict[str, Any]


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


@pytest.fixture(scope="session")
def classes() -> Numbers:
    """Two models on 2,000 examples: one that is right, one that is too sure."""
    generator = np.random.default_rng(0)
    scores = 2.5 * generator.normal(size=(2_000, 10))

    def softmax(values: np.ndarray) -> np.ndarray:
        powers = np.exp(values)
        return powers / powers.sum(-1, keepdims=True)

    right = softmax(scores)
    targets = (right.cumsum(1) > generator.random((2_000, 1))).argmax(1)
    draws = softmax(1.8 * scores + 0.3 * generator.normal(size=(3, *scores.shape)))
    far, near = softmax(generator.normal(size=(2, 400, 10)))
    drawn = np.stack([far, near])
    return report(
        {"honest net": right, "bold ensemble": draws},
        targets,
        ood={
            "letters": {"honest net": far, "bold ensemble": drawn},
            "rotated": {"honest net": near, "bold ensemble": drawn},
        },
        inputs=generator.random((2_000, 1, 8, 8)),
        title="Ten classes",
    ).numbers


@pytest.fixture(scope="session")
def numbers() -> Numbers:
    generator = np.random.default_rng(1)
    inputs = generator.uniform(-3, 3, 500)
    scale = 0.2 + 0.1 * np.abs(inputs)
    targets = np.sin(inputs) + scale * generator.normal(size=500)
    means = np.sin(inputs) + 0.15 * generator.normal(size=(5, 1))
    return report(
        {"narrow": np.sin(inputs), "draws": means},
        targets,
        scales={"narrow": scale / 2, "draws": np.broadcast_to(scale, (5, 500))},
        ood={
            "beyond": {
                "narrow": (np.zeros(200), np.full(200, 0.9)),
                "draws": (generator.normal(size=(5, 200)), np.full((5, 200), 0.5)),
            }
        },
        inputs=inputs,
        title="A sine",
    ).numbers
