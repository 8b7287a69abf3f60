"""Uncertainty of a classification: of what kind, by class, and what it is confused with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_bnn.report import figure as fig
from lightning_bnn.report.classification import PER_CLASS
from lightning_bnn.report.sample import Sample
from lightning_bnn.report.sections.base import Line, Numbers, Section
from lightning_bnn.report.sections.reliability import ONE_DRAW
from lightning_bnn.report.text import count, fixed, percent, short
from lightning_bnn.report.words import class_name, listed

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["ClassUncertainty"]

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
        counts, sums = model.sums.per_class[0], model.sums.per_class[1:]
        means = np.full(sums.shape, np.nan)
        np.divide(sums, counts, out=means, where=counts > 0)
        names = ["accuracy" if name == "correct" else name for name in PER_CLASS]
        return {
            "per_class": [
                {"class": k, "count": int(counts[k])} | dict(zip(names, means[:, k], strict=True))
                for k in range(len(counts))
            ],
            "confusion": _confusion(model.sample, len(counts)),
        }

    def words(self, document: Numbers) -> Iterator[Line]:
        """The classes that the data lack."""
        counted = document["models"][0]["per_class"]
        missing = [class_name(document, each["class"]) for each in counted if not each["count"]]
        if missing:
            one = len(missing) == 1
            which = f"{'class' if one else 'classes'} {listed(missing)}"
            it, its = ("it", "its") if one else ("them", "their")
            known = f"{its} accuracy is unknown, and the classwise ECE counts {it} with frequency 0"
            never = f"never {'occurs' if one else 'occur'} in these data"
            yield None, "note", f"{which} {never}: {known}."

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
    # By codes, since a full matrix of many classes would be mostly zeros.
    codes, counts = np.unique(target * classes + predicted, return_counts=True)
    targets, predictions = np.divmod(codes, classes)
    seen = np.bincount(target, minlength=classes) + np.bincount(predicted, minlength=classes)
    shown = np.sort(np.argsort(-seen, kind="stable")[:CONFUSION_CLASSES])
    place = np.full(classes, -1)
    place[shown] = np.arange(len(shown))
    matrix = np.zeros((len(shown), len(shown)), np.int64)
    inside = (place[targets] >= 0) & (place[predictions] >= 0)
    matrix[place[targets[inside]], place[predictions[inside]]] = counts[inside]
    wrong = np.flatnonzero(targets != predictions)
    largest = wrong[np.argsort(-counts[wrong], kind="stable")][:CONFUSION_PAIRS]
    return {
        "share": UNCERTAIN_SHARE,
        "count": number,
        "classes": shown,
        "matrix": matrix,
        "pairs": [
            {"target": int(targets[i]), "predicted": int(predictions[i]), "count": int(counts[i])}
            for i in largest
        ],
    }


def _per_class(block: Numbers, known: list[Numbers], document: Numbers) -> fig.Bars:
    alone = block["draws"] == 1

    def total(each: Numbers) -> float:
        return float(each["aleatoric"] + (each["epistemic"] or 0.0))

    shown = sorted(known, key=lambda each: -total(each))[:MOST_BARS]
    rows = []
    for each in sorted(shown, key=lambda each: each["class"]):
        start, end = each["aleatoric"], total(each)
        parts = [fig.Part(0, start, short(start), "aleatoric", "aleatoric", "aleatoric")]
        if not alone:
            text = short(each["epistemic"])
            parts.append(fig.Part(start, end, text, "epistemic", "epistemic", "epistemic"))
        name = class_name(document, each["class"])
        title = f"Class {name}: {count(each['count'])} examples, accuracy"
        rows.append(fig.BarRow(name, fixed(end, 3), parts, f"{title} {percent(each['accuracy'])}"))
    names = ("aleatoric",) if alone else ("aleatoric", "epistemic")
    table = [
        [
            class_name(document, each["class"]),
            count(each["count"]),
            percent(each["accuracy"]),
            percent(each["confidence"]),
            *(short(each[name]) for name in names),
        ]
        for each in block["per_class"]
    ]
    note = f"{len(shown)} of {len(table)} classes: those with the largest uncertainty."
    doubt = "epistemic uncertainty (mutual information) is disagreement among the draws, which"
    return fig.Bars(
        "per-class",
        "Uncertainty by true class",
        "Aleatoric uncertainty (expected entropy, in nats) is noise that more data of the same "
        f"kind would leave{'. ' + ONE_DRAW if alone else f'; {doubt} more data would shrink.'}",
        f"{note} The table has all." if len(shown) < len(table) else "",
        logged=False,
        rows=rows,
        domain=(0.0, max(map(total, shown)) or 1.0),
        step=24 if len(shown) > 12 else 32,
        table=fig.Table(["class", "examples", "accuracy", "confidence", *names], table),
    )


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
        "confusion",
        "Confusion of the most uncertain",
        f"The {percent(data['share'], 0)} of the predictions with the largest entropy "
        f"({count(data['count'])}): rows are true classes, columns predicted ones. Blue is right, "
        "orange is wrong, stronger is more.",
        " ".join(notes),
        logged=False,
        names=names,
        matrix=data["matrix"],
        x_label="predicted class",
        y_label="true class",
        table=fig.Table(
            ["true class", *names],
            [[name, *map(count, row)] for name, row in zip(names, data["matrix"], strict=True)],
        ),
    )
