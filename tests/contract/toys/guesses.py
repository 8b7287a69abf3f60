"""A section of the report: how often each class is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_bnn.report import Section
from lightning_bnn.report import figure as fig


class Guesses(Section):
    """Counts predicted classes, batch by batch, over all processes."""

    key, order, task = "guesses", 45, "classification"
    title, lead = "Guesses", "How often is each class predicted?"

    def __init__(self) -> None:
        self.counts: Any = 0

    def add(self, rows: Any) -> None:
        classes = rows.log_probabilities.shape[1]
        self.counts = self.counts + np.bincount(rows.columns["predicted"], minlength=classes)

    def merge(self, other: Guesses) -> None:
        self.counts = self.counts + other.counts

    def numbers(self, model: Any, block: Any) -> dict[str, Any]:
        return {"guesses": self.counts}

    def words(self, document: Any) -> Iterator[tuple[str, str, str]]:
        for block in document["models"]:
            most = int(np.argmax(block["guesses"]))
            yield block["name"], "note", f"It predicts class {most} most often."

    def figures(self, block: Any, document: Any) -> Iterator[fig.Figure]:
        counts = fig.as_array(block["guesses"])
        place = np.arange(len(counts), dtype=float)
        yield fig.Plot(
            "guesses",
            "Predicted classes",
            "How often each class has the highest probability.",
            x=fig.Axis("class"),
            y=fig.Axis("examples", fig.domain(counts, zero=True), "count"),
            marks=[fig.Mark("bars", place - 0.4, 0 * counts, place + 0.4, counts, "examples")],
        )


CONTRACT = "section", Guesses
