"""Calibration of a classification: reliability, confidence, temperature, and the verdict in words.

The sentence of a model follows the verdict (:mod:`lightning_bnn.calibration.verdict`); its figures
come from the bins that leave the band and from the temperature. Nothing is called a fault that is
too small to matter: with very many examples a gap of a tenth of a point is significant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_bnn.calibration.bins import outside_band, reliability_curve
from lightning_bnn.calibration.temperature import scaled
from lightning_bnn.report import figure as fig
from lightning_bnn.report import words
from lightning_bnn.report.figure import Mark
from lightning_bnn.report.sections.base import Line, Numbers, Section
from lightning_bnn.report.text import count, fixed, percent, ranges, short

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["Reliability", "class_headline"]

# A fault is immaterial below a mean gap of one point, a temperature within 5 percent of 1, and
# no gap of 5 points in any bin that leaves the band.
IMMATERIAL_GAP, IMMATERIAL_TEMPERATURE, IMMATERIAL_BIN = 0.01, 0.05, 0.05


class Reliability(Section):
    """Does a stated probability come true as often as it says?"""

    key, order = "calibration", 10
    title = "Calibration"
    lead = "Does a stated probability come true as often as it says?"
    task = "classification"

    def numbers(self, model: Statistics, block: Numbers) -> dict[str, Any]:
        """Reliability in bins of equal width and of equal mass, confidence, temperature."""
        return {
            "reliability": {
                "width": reliability_curve(model.sums.confidence),
                "mass": reliability_curve(model.sums.by_mass(model)),
            },
            "temperature": _temperature(model),
        }

    def words(self, document: Numbers) -> Iterator[Line]:
        """The verdict of each model and what would mend it; what is not finite."""
        for block in document["models"]:
            yield block["name"], *class_headline(block, words.statements(document))
            yield from words.about_invalid(block)
            if number := block["temperature"]["invalid"]:
                text = f"{words.plural(number, 'validation prediction')} not finite and left out."
                yield block["name"], "bad", text

    def figures(self, block: Numbers, document: Numbers) -> Iterator[fig.Figure]:
        """Reliability diagram, histogram of confidence, temperature scaling."""
        curves = block["reliability"]
        views = {"Equal width": _diagram(curves["width"]), "Equal mass": _diagram(curves["mass"])}
        yield fig.Views("reliability", "Reliability diagram", switch="bins", views=views)
        yield _confidence(block)
        if block["temperature"]["value"] is not None:
            yield _scaling(block["temperature"])


def _temperature(model: Statistics) -> dict[str, Any]:
    kept, other, validation = model.kept, None, model.validation
    if validation is not None and validation.rows:
        other = validation.kept["log_probabilities"], validation.kept["target"]
    result = scaled(kept["log_probabilities"], kept["target"], other, kept.example, model.bins)
    for when in ("before", "after"):
        # A yes-or-no label's Brier score is that of its 1 alone, half of the sum over both values.
        result[when]["brier"] *= 0.5 if model.labels else 1.0
    result["invalid"] = 0 if validation is None else len(validation.invalid)
    return result


# ------------------------------------------------------------------ figures


def _diagram(curve: Numbers) -> fig.Plot:
    edges, counts = fig.arrays(curve, "edges", "count")
    known = counts > 0
    left, right, counts = edges[:-1][known], edges[1:][known], counts[known]
    stated, observed, lower, upper = (
        values[known] for values in fig.arrays(curve, "stated", "observed", "lower", "upper")
    )
    outside = outside_band(observed, lower, upper)
    return fig.Plot(
        "reliability",
        "Reliability diagram",
        "Each dot is a bin of predictions (larger: more of them): how sure they were, and how "
        "often they were right. On the diagonal the stated confidence is true; below it the model "
        "is over-confident. The grey band is where the dots of a perfectly calibrated model would "
        "lie with this many examples (99% for all bins together).",
        x=fig.Axis("stated confidence"),
        y=fig.Axis("share that was right"),
        marks=[
            Mark("boxes", left, lower, right, upper, "band of perfect calibration", "band", "band"),
            Mark("stems", stated, stated, y2=observed, label="gap", key="gap", colour="wrong"),
            Mark("line", [0, 1], [0, 1], key="diagonal", colour="muted", style="dashed"),
            Mark("line", stated, observed, key="dots", shared="muted"),
            Mark("dots", stated, observed, label="observed", key="dots", weight=counts),
            Mark("rings", stated, fig.only(observed, outside), label="outside of the band",
                 key="outside", colour="bad", weight=counts),
        ],
        table=fig.table({
            "confidence": ranges(left, right, _two),
            "stated": map(_three, stated),
            "right": map(_three, observed),
            "gap": map(_three, observed - stated),
            "band": ranges(lower, upper, _three, outside),
            "predictions": map(count, counts),
        }),
        spans=(left, right),
        aspect=0.72,
    )  # fmt: skip


def _confidence(block: Numbers) -> fig.Plot:
    curve = block["reliability"]["width"]
    edges, total, shares = fig.arrays(curve, "edges", "count", "observed")
    right = np.round(total * np.nan_to_num(shares))
    wrong = total - right
    mean, accuracy = block["scalars"]["mean_confidence"], block["scalars"]["accuracy"]
    return fig.Plot(
        "confidence",
        "How sure the model is",
        "Predictions by their confidence, split into right and wrong ones. Mean confidence "
        f"{percent(mean)}, accuracy {percent(accuracy)}: where the first lies above the second, "
        "the model promises more than it keeps.",
        "The solid line is the mean confidence, the dashed one the accuracy.",
        x=fig.Axis("stated confidence"),
        y=fig.Axis("predictions", fig.domain(total, zero=True), "count"),
        marks=[
            Mark("bars", edges[:-1], wrong, edges[1:], fig.only(total, right > 0), "right", "right",
                 "right"),
            Mark("bars", edges[:-1], 0 * wrong, edges[1:], fig.only(wrong, wrong > 0), "wrong",
                 "wrong", "wrong"),
            Mark("rules", [mean], key="marks", label="accuracy and mean confidence", colour="ink"),
            Mark("rules", [accuracy], key="marks", colour="ink", style="dashed"),
        ],
        table=fig.table({
            "confidence": ranges(edges[:-1], edges[1:], _two),
            "right": map(count, right),
            "wrong": map(count, wrong),
            "share right": map(percent, shares),
        }),
        spans=(edges[:-1], edges[1:]),
    )  # fmt: skip


def _two(value: float) -> str:
    return fixed(value, 2)


def _three(value: float) -> str:
    return fixed(value, 3)


def _scaling(data: Numbers) -> fig.Bars:
    where = (
        "It was fitted on validation data."
        if data["fitted_on"] == "validation"
        else "It was fitted on one half of the examples and judged on the other, both ways."
    )
    rows, table = [], []
    for key, name in (("nll", "NLL"), ("ece", "ECE"), ("brier", "Brier")):
        before, after = data["before"][key], data["after"][key]
        if before is None or after is None:
            continue
        most, texts = max(before, after, 1e-12), [short(before), short(after)]
        parts = [
            fig.Part(0, max(0.0, before) / most, texts[0], "as it is", "before", "muted", 0),
            fig.Part(0, max(0.0, after) / most, texts[1], "with the temperature", "after", "main",
                     1),
        ]  # fmt: skip
        rows.append(fig.BarRow(name, " → ".join(texts), parts))
        table.append([name, *texts])
    verdict = data["verdict_after"]
    return fig.Bars(
        "temperature", f"Temperature scaling, T = {fixed(data['value'], 2)}",
        "The scores as they are, and after dividing all log-probabilities by one temperature. "
        f"{where} T above 1 softens, T below 1 sharpens. Each pair of bars has its own scale.",
        f"The verdict with the temperature: {verdict}." if verdict else "",
        logged=False, rows=rows, step=46,
        table=fig.Table(["score", "as it is", "with the temperature"], table),
    )  # fmt: skip


# ------------------------------------------------------------------ words


def class_headline(block: Numbers, said: str) -> tuple[str, str]:
    """Level and text for a model of classes.

    Args:
        block: The model's numbers.
        said: What they are about, such as "719 examples".
    """
    label, curve = block["verdict"]["label"], block["reliability"]["width"]
    over, under = _misses(curve, "over"), _misses(curve, "under")
    if label == "nothing found":
        return words.nothing_found(block, said, "a bin")
    if label == "calibrated" and block["verdict"]["clustered"]:  # by the score alone
        return "good", f"neither over- nor under-confident on the whole, as far as {said} show."
    if label == "calibrated":
        return "good", f"well calibrated: no gap is beyond what {said} allow."
    if label == "miscalibrated":
        parts = " and ".join(part for part in (over, under) if part)
        return "bad", f"miscalibrated: {parts or 'some bins leave the band'}."
    if _immaterial(block):
        small = f"too small to matter (temperature {block['temperature']['value']:.2f})"
        return "note", f"{label} by less than a point on average: {small}."
    level, text = ("bad", over) if label == "over-confident" else ("warn", under)
    text = text or f"{label} on the whole, though no single bin shows it"
    return level, f"{text}; {_remedy(block, label)}."


def _immaterial(block: Numbers) -> bool:
    """Whether a significant fault is too small to matter."""
    error, value = block["scalars"]["ece"], block["temperature"]["value"]
    if error is None or value is None or block["invalid"]["impossible"]:
        return False
    stated, observed, lower, upper = fig.arrays(
        block["reliability"]["width"], "stated", "observed", "lower", "upper"
    )
    gaps = np.abs(stated - observed)[outside_band(observed, lower, upper)]
    near = abs(value - 1) <= IMMATERIAL_TEMPERATURE
    return bool(error < IMMATERIAL_GAP and near and gaps.max(initial=0) < IMMATERIAL_BIN)


def _misses(curve: Numbers, side: str) -> str:
    """Where and how far the observed misses the stated share, in the two heaviest runs of bins."""
    counts, stated, observed, lower, upper = fig.arrays(
        curve, "count", "stated", "observed", "lower", "upper"
    )
    runs: list[list[int]] = []
    for index in np.flatnonzero(observed < lower if side == "over" else observed > upper).tolist():
        # Empty bins do not end a run: nothing was stated there.
        if runs and not counts[runs[-1][-1] + 1 : index].any():
            runs[-1].append(index)
        else:
            runs.append([index])
    heaviest = sorted(sorted(runs, key=lambda run: -counts[run].sum())[:2])
    gaps = [np.average(np.abs(stated - observed)[run], weights=counts[run]) for run in heaviest]
    edges = curve["edges"]
    parts = [
        f"by {words.points(gap)} between {edges[run[0]]:.3g} and {edges[run[-1] + 1]:.3g}"
        for gap, run in zip(gaps, heaviest, strict=True)
    ]
    return f"{side}-confident {' and '.join(parts)}" if parts else ""


def _remedy(block: Numbers, label: str) -> str:
    """What a temperature would do: mend it if the scaled rows pass where a fault would show."""
    temperature = block["temperature"]
    value, before, after = temperature["value"], temperature["before"], temperature["after"]
    falls = [
        None not in (before[name], after[name]) and after[name] < before[name]
        for name in ("nll", "ece")
    ]
    side = 1 if label == "over-confident" else -1
    if value is None or side * (value - 1) <= words.NEAR_ONE or not all(falls):
        return "no single temperature mends it"
    mends = temperature["verdict_after"] == "calibrated" and words.unseen_gap(block) <= words.COARSE
    change = f"ECE {before['ece']:.3f} to {after['ece']:.3f}"
    return f"temperature {value:.2f} would {'mend it' if mends else 'help'} ({change})"
