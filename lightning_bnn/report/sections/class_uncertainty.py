"""Uncertainty of a classification: of what kind, by class, and what it is confused with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_bnn.report import figure as fig
from lightning_bnn.report.classification import PER_CLASS
from lightning_bnn.report.sample import Sample
from lightning_bnn.report.sections.base import Numbers, Section
from lightning_bnn.report.text import count, percent, short
from lightning_bnn.report.words import ONE_DRAW, class_name

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["ClassUncertainty", "two_kinds"]

# The share of rows that are called the most uncertain, and how many classes and pairs are shown.
UNCERTAIN_SHARE = 0.1
CONFUSION_CLASSES = 20
CONFUSION_PAIRS = 10
MOST_BARS = 24


class ClassUncertainty(Section):
    """Where the doubt lies, and what kind of doubt it is."""

    key, order = "uncertainty", 30
    title = "Uncertainty"
    lead = "Where the doubt lies, and what kind of doubt it is."
    task = "classification"

    def numbers(self, model: Statistics, block: Numbers) -> dict[str, Any]:
        """Means by observed class, and the confusion of the most uncertain rows."""
        counts = model.sums.per_class[0]
        means = model.sums.per_class[1:] / np.where(counts > 0, counts, np.nan)
        names = ["accuracy" if name == "correct" else name for name in PER_CLASS]
        return {
            "per_class": [
                {"class": k, "count": int(counts[k])} | dict(zip(names, means[:, k], strict=True))
                for k in range(len(counts))
            ],
            "confusion": _confusion(model.sample, len(counts)),
        }

    def figures(self, block: Numbers, document: Numbers) -> Iterator[fig.Figure]:
        """Uncertainty by true class, and the confusion of the most uncertain."""
        known = [each for each in block["per_class"] if each["aleatoric"] is not None]
        if known:
            yield _per_class(block, known, document)
        yield _matrix(block["confusion"], document)


def _confusion(sample: Sample, classes: int) -> dict[str, Any]:
    """What the most uncertain rows are taken for."""
    entropy = sample["entropy"]
    number = max(1, math.ceil(UNCERTAIN_SHARE * len(entropy)))
    chosen = np.argsort(-entropy, kind="stable")[:number]
    target, predicted = sample["target"][chosen], sample["predicted"][chosen]
    seen = np.bincount(target, minlength=classes) + np.bincount(predicted, minlength=classes)
    shown = np.sort(np.argsort(-seen, kind="stable")[:CONFUSION_CLASSES])
    inside = np.isin(target, shown) & np.isin(predicted, shown)
    matrix = np.zeros((len(shown), len(shown)), np.int64)
    places = (np.searchsorted(shown, each[inside]) for each in (target, predicted))
    np.add.at(matrix, tuple(places), 1)
    wrong = np.stack([target, predicted], 1)[target != predicted]
    pairs, counts = np.unique(wrong, axis=0, return_counts=True)
    largest = np.argsort(-counts, kind="stable")[:CONFUSION_PAIRS]
    return {
        "share": UNCERTAIN_SHARE,
        "count": number,
        "classes": shown,
        "matrix": matrix,
        "pairs": [
            {"target": pairs[i, 0], "predicted": pairs[i, 1], "count": counts[i]} for i in largest
        ],
    }


def two_kinds(
    name: str, title: str, aleatoric: float, epistemic: float | None, unit: str = ""
) -> fig.BarRow:
    """A bar of aleatoric and epistemic uncertainty; of one draw (None) the first alone."""
    total = aleatoric + (epistemic or 0.0)
    first, second = f"aleatoric{unit}", f"epistemic{unit}"
    parts = [fig.Part(0, aleatoric, short(aleatoric), first, "aleatoric", "aleatoric")]
    if epistemic is not None:
        text = short(epistemic)
        parts.append(fig.Part(aleatoric, total, text, second, "epistemic", "epistemic"))
    return fig.BarRow(name, short(total), parts, title)


def _per_class(block: Numbers, known: list[Numbers], document: Numbers) -> fig.Bars:
    alone = block["draws"] == 1
    shown = sorted(known, key=lambda each: -each["aleatoric"] - each["epistemic"])[:MOST_BARS]
    rows = []
    for each in sorted(shown, key=lambda each: each["class"]):
        name = class_name(document, each["class"])
        title = f"Class {name}: {count(each['count'])} examples, accuracy"
        title += f" {percent(each['accuracy'])}"
        epistemic = None if alone else each["epistemic"]
        rows.append(two_kinds(name, title, each["aleatoric"], epistemic))
    columns = {
        "class": [class_name(document, each["class"]) for each in block["per_class"]],
        "examples": [count(each["count"]) for each in block["per_class"]],
    }
    for name in ("accuracy", "confidence"):
        columns[name] = [percent(each[name]) for each in block["per_class"]]
    for name in ("aleatoric",) if alone else ("aleatoric", "epistemic"):
        columns[name] = [short(each[name]) for each in block["per_class"]]
    note = f"{len(shown)} of {len(block['per_class'])} classes: those with the largest uncertainty."
    doubt = "epistemic uncertainty (mutual information) is disagreement among the draws, which"
    return fig.Bars(
        "per-class", "Uncertainty by true class",
        "Aleatoric uncertainty (expected entropy, in nats) is noise that more data of the same "
        f"kind would leave{'. ' + ONE_DRAW if alone else f'; {doubt} more data would shrink.'}",
        f"{note} The table has all." if len(shown) < len(block["per_class"]) else "",
        logged=False, rows=rows,
        domain=fig.domain([row.parts[-1].end for row in rows], zero=True, air=0),
        step=24 if len(shown) > 12 else 32, table=fig.table(columns),
    )  # fmt: skip


def _matrix(data: Numbers, document: Numbers) -> fig.Heat:
    names = [class_name(document, k) for k in data["classes"]]
    inside = int(np.sum(data["matrix"]))
    pairs = [
        f"{class_name(document, pair['target'])} taken for "
        f"{class_name(document, pair['predicted'])} ({count(pair['count'])})"
        for pair in data["pairs"][:3]
        if pair["count"] >= 2
    ]
    notes = []
    if inside < data["count"]:
        notes.append(f"{count(inside)} of them fall into the {len(names)} classes shown.")
    if pairs:
        notes.append(f"Most frequent: {', '.join(pairs)}.")
    return fig.Heat(
        "confusion", "Confusion of the most uncertain",
        f"The {percent(data['share'], 0)} of the predictions with the largest entropy "
        f"({count(data['count'])}): rows are true classes, columns predicted ones. Blue is right, "
        "orange is wrong, stronger is more.",
        " ".join(notes), logged=False, names=names, matrix=data["matrix"],
        x_label="predicted class", y_label="true class",
        table=fig.Table(
            ["true class", *names],
            [[name, *map(count, row)] for name, row in zip(names, data["matrix"], strict=True)],
        ),
    )  # fmt: skip
