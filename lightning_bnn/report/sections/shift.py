"""Out-of-distribution data: how far each uncertainty score tells them from the report's own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_bnn.calibration.separation import separation
from lightning_bnn.report import figure as fig
from lightning_bnn.report.figure import Mark
from lightning_bnn.report.rows import Array
from lightning_bnn.report.sections.base import Line, Numbers, Section
from lightning_bnn.report.text import count, fixed, percent, ranges
from lightning_bnn.report.words import ONE_DRAW, listed, plural

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["Shift", "as_ood_score"]

HISTOGRAM_BINS = 30
# From which AUROC data count as told apart, how good that is, and what is said of it. A little
# below chance, which is 0.5, the model is surer of them than of its own data.
KINDS = (
    (0.9, "good", "told apart"),
    (0.7, "warn", "partly told apart"),
    (0.45, "bad", "not told apart"),
    (-1.0, "bad", "taken for more familiar than the data of the report"),
)
# Of fewer examples an AUROC says little.
FEW_EXAMPLES = 30
# What a score is called on the page, in a sentence, and its unit.
SCORES = {
    "entropy": ("Entropy", "entropy", " (nats)"),
    "mutual_information": ("Mutual information", "mutual information", " (nats)"),
    "maximum_probability": ("Maximum probability", "maximum probability", ""),
    "sd": ("Standard deviation", "predicted sd", ""),
    "epistemic_sd": ("Epistemic sd", "epistemic sd", ""),
}


class Shift(Section):
    """Does the uncertainty tell out-of-distribution data from those of the report?"""

    key, order = "shift", 60
    title = "Shift"
    lead = (
        "Data of another kind, which the model should find strange. AUROC and AUPR: how well the "
        "score ranks out-of-distribution examples above familiar ones (1 is perfect, an AUROC of "
        "0.5 is chance). FPR95: the share of out-of-distribution examples taken for familiar when "
        "95% of the familiar ones are kept (lower is better)."
    )

    def numbers(self, model: Statistics, block: Numbers) -> dict[str, Any]:
        """By data set and by score: AUROC, AUPR, FPR95, and both histograms."""
        numbers: dict[str, Any] = {}
        for name, ood in model.ood.items():
            scores = {}
            for score in model.sums.ood:
                if not ood.has(score, model.draws):
                    continue
                inside, values = model.scores(score), ood.scores(score)
                edges = _edges(score, model.classes, inside, values)
                scores[score] = {
                    "chance": len(values) / (len(inside) + len(values)),
                    **separation(as_ood_score(score, inside), as_ood_score(score, values)),
                    "edges": edges,
                    "inside": _shares(inside, edges),
                    "outside": _shares(values, edges),
                }
            invalid = len(ood.invalid)
            numbers[name] = {"examples": ood.examples, "invalid": invalid, "by": scores}
        return {"shift": numbers}

    def words(self, document: Numbers) -> Iterator[Line]:
        """Of each data set, how well the models tell it apart."""
        blocks = document["models"]
        for name in dict.fromkeys(name for block in blocks for name in block["shift"]):
            for block in blocks:
                bad = block["shift"].get(name, {}).get("invalid", 0)
                if bad:
                    text = f"{name}: {plural(bad, 'prediction')} not finite and left out."
                    yield block["name"], "bad", text
            judged = [(*best, block) for block in blocks if (best := _best(block, name))]
            highest = math.inf
            for lowest, level, kind in KINDS:
                group = [each for each in judged if lowest <= each[0] < highest]
                highest = lowest
                if not group:
                    continue
                areas = sorted({f"{area:.2f}" for area, *_ in group})
                shown = areas[0] if len(areas) == 1 else f"{areas[0]} to {areas[-1]}"
                scores = {score for _, score, _ in group}
                by = f" by {scores.pop()}" if len(scores) == 1 else ""
                names = [block["name"] for *_, block in group]
                who = f" by {listed(names)}" if len(blocks) > 1 else ""
                text = f"{name}: {kind}{who} (AUROC {shown}{by})"
                examples = min(block["shift"][name]["examples"] for *_, block in group)
                if examples < FEW_EXAMPLES:
                    level, text = "note", f"{text}; {plural(examples, 'example')} cannot say much"
                yield names[0] if len(blocks) == 1 else None, level, f"{text}."

    def figures(self, block: Numbers, document: Numbers) -> Iterator[fig.Figure]:
        """Histograms of each score on both kinds of data, with a switch between scores."""
        for at, (name, data) in enumerate(block["shift"].items()):
            views = {
                SCORES[score][0]: _histograms(f"shift-{at}", name, data, score, block, document)
                for score in data["by"]
            }
            if views:
                yield fig.Views(f"shift-{at}", name, switch="score", views=views)


def as_ood_score(score: str, values: Array) -> Array:
    """A score turned so that larger means out-of-distribution: a maximum probability is not."""
    return 1.0 - values if score == "maximum_probability" else values


def _edges(score: str, classes: int | None, inside: Array, outside: Array) -> Array:
    if score == "entropy":
        return np.linspace(0.0, math.log(classes or 2), HISTOGRAM_BINS + 1)
    if score == "maximum_probability":
        return np.linspace(1.0 / (classes or 2), 1.0, HISTOGRAM_BINS + 1)
    # Few very large values would press all others into one bar: they go into the last one.
    highest = max(float(np.quantile(side, 0.99)) for side in (inside, outside) if len(side))
    return np.linspace(0.0, max(highest, 1e-12), HISTOGRAM_BINS + 1)


def _shares(values: Array, edges: Array) -> Array:
    counts = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0]
    return counts / max(1, len(values))


def _histograms(
    id_: str, name: str, data: Numbers, score: str, block: Numbers, document: Numbers
) -> fig.Plot:
    chosen = data["by"][score]
    edges, inside, outside = fig.arrays(chosen, "edges", "inside", "outside")
    left, right = edges[:-1], edges[1:]
    label, source = SCORES[score][0], f"{document['data']['source']} data"
    marks = [
        Mark("steps", edges, inside, label=source, key="inside", colour="right"),
        Mark("steps", edges, outside, label=name, key="outside", colour="wrong"),
    ]
    seen = np.flatnonzero((inside > 0) | (outside > 0))
    scores = list(data["by"])
    table = [
        [SCORES[name][0], *(fixed(by[kind], 3) for kind in ("auroc", "aupr", "fpr95"))]
        for name, by in data["by"].items()
    ]
    return fig.Plot(
        id_,
        name,
        "The more the two histograms lie apart, the better the score tells out-of-distribution "
        f"data. {count(data['examples'])} examples. An AUPR of {fixed(chosen['chance'], 2)} is "
        "chance.",
        ONE_DRAW if block["draws"] == 1 else "",
        logged=score == scores[0],
        x=fig.Axis(label.lower() + SCORES[score][2], (edges[0], max(edges[-1], edges[0] + 1e-12))),
        y=fig.Axis("share", fig.domain([*inside, *outside], zero=True), "percent"),
        marks=marks,
        scores=fig.Table(["score", "AUROC", "AUPR", "FPR95"], table, chosen=scores.index(score)),
        table=fig.Table(
            [label.lower(), source, name],
            list(zip(ranges(left[seen], right[seen]), map(percent, inside[seen]),
                     map(percent, outside[seen]), strict=True)),
        ),
        spans=(left[seen], right[seen]),
        aspect=0.5,
    )  # fmt: skip


def _best(block: Numbers, name: str) -> tuple[float, str] | None:
    """The largest AUROC of a data set and the score that gives it."""
    by = block["shift"].get(name, {}).get("by", {}).items()
    known = [(each["auroc"], SCORES[score][1]) for score, each in by if each["auroc"] is not None]
    return max(known, key=lambda each: each[0], default=None)
