"""Out-of-distribution data: how far each uncertainty score tells them from the report's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_bnn.calibration.separation import separation
from lightning_bnn.report import figure as fig
from lightning_bnn.report.figure import Mark
from lightning_bnn.report.rows import Array
from lightning_bnn.report.sections.base import Line, Numbers, Section
from lightning_bnn.report.sections.reliability import ONE_DRAW
from lightning_bnn.report.text import count, fixed, percent, ranges
from lightning_bnn.report.words import listed, plural

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["Shift", "as_ood_score", "told_apart"]

HISTOGRAM_BINS = 30
# AUROC from which shifted data count as told apart, below which as not seen, and below which
# the model is surer of them than of its own data: a little below chance, which is 0.5.
TOLD_APART, NOT_SEEN, SURER = 0.9, 0.7, 0.45
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
# How well a group does: from which AUROC, and what one model and what several do; then the same
# where no better group was named before, to which the short form could refer.
KINDS = (
    (TOLD_APART, "tells it apart", "tell it apart", "tells it apart", "tell it apart"),
    (NOT_SEEN, "does in part", "do in part", "partly tells it apart", "partly tell it apart"),
    (SURER, "does not", "do not", "does not tell it apart", "do not tell it apart"),
    (-1.0, *2 * ("is surer there than on its own data", "are surer there than on their own data")),
)


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
                    **separation(as_ood_score(score, inside), as_ood_score(score, values)),
                    "edges": edges,
                    "inside": _shares(inside, edges),
                    "outside": _shares(values, edges),
                }
            numbers[name] = {"examples": ood.examples, "invalid": ood.invalid, "by": scores}
        return {"shift": numbers}

    def words(self, document: Numbers) -> Iterator[Line]:
        """Of each data set, who tells it apart and who does not; the level is of the worst."""
        blocks = document["models"]
        for name in dict.fromkeys(name for block in blocks for name in block["shift"]):
            for block in blocks:
                bad = block["shift"].get(name, {}).get("invalid", 0)
                if bad:
                    text = f"{name}: {plural(bad, 'prediction')} not finite and left out."
                    yield block["name"], "bad", text
            judged = [(*best, block) for block in blocks if (best := _best(block, name))]
            if not judged:
                continue
            worst = min(area for area, *_ in judged)
            level = "good" if worst >= TOLD_APART else "warn" if worst >= NOT_SEEN else "bad"
            several = len(blocks) > 1
            named = [(area, score, block["name"]) for area, score, block in judged]
            text = told_apart(named) if several else _seen(*named[0][:2])
            examples = min(block["shift"][name]["examples"] for *_, block in judged)
            if examples < FEW_EXAMPLES:
                level, text = "note", f"{text}; {plural(examples, 'example')} cannot say much"
            yield None if several else blocks[0]["name"], level, f"{name}: {text}."

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
    # the average precision of guessing is the share of out-of-distribution examples
    own = document["data"]["examples"] - block["invalid"]["count"]
    other = data["examples"] - data["invalid"]
    chance = ""
    if document["data"]["sampled"] is None:
        chance = f" An AUPR of {fixed(other / (own + other), 2)} is chance."
    notes = [ONE_DRAW] if block["draws"] == 1 else []
    if data["invalid"]:
        notes.append(f"{count(data['invalid'])} predictions were not finite and are left out.")
    return fig.Plot(
        id_,
        name,
        "The more the two histograms lie apart, the better the score tells out-of-distribution "
        f"data. {count(data['examples'])} examples.{chance}",
        " ".join(notes),
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


def _seen(area: float, score: str) -> str:
    if area >= TOLD_APART:
        return f"told apart with AUROC {area:.2f} by {score}"
    if area >= NOT_SEEN:
        return f"partly told apart: AUROC {area:.2f} by {score}"
    if area >= SURER:
        return f"not told apart: AUROC {area:.2f} at best, by {score}"
    return f"surer there than on its own data: AUROC {area:.2f} at best, by {score}"


def told_apart(judged: Sequence[tuple[float, str, str]]) -> str:
    """Several models (AUROC, score, name), grouped by how well they do, with their AUROC."""
    parts: list[str] = []
    left = list(judged)
    for lowest, *verbs in KINDS:
        group = [entry for entry in left if entry[0] >= lowest]
        left = [entry for entry in left if entry[0] < lowest]
        if not group:
            continue
        verb = verbs[(len(group) > 1) + 2 * (not parts)]
        areas = sorted({f"{area:.2f}" for area, _, _ in group})
        shown = areas[0] if len(areas) == 1 else f"{areas[0]} to {areas[-1]}"
        scores = {score for _, score, _ in group}
        by = f" by {scores.pop()}" if len(scores) == 1 else ""
        names = listed([name for _, _, name in group])
        parts.append(f"{names} {verb} ({'' if parts else 'AUROC '}{shown}{by})")
    return "; ".join(parts)
