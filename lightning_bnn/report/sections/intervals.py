"""Calibration of a regression: PIT, coverage of intervals, and the verdict in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning_bnn.calibration.bins import outside_band
from lightning_bnn.calibration.pit import coverage_curve, pit_histogram
from lightning_bnn.report import figure as fig
from lightning_bnn.report import words
from lightning_bnn.report.figure import Mark
from lightning_bnn.report.regression import LEVELS
from lightning_bnn.report.sections.base import Line, Numbers, Section
from lightning_bnn.report.text import count, fixed, percent, ranges, short

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["Intervals", "regression_headline"]

# A gap of the 90% interval below one point does not matter.
IMMATERIAL_GAP = 0.01


class Intervals(Section):
    """Do the stated distributions hold what they promise?"""

    key, order = "calibration", 10
    title = "Calibration"
    lead = "Do the stated distributions hold what they promise?"
    task = "regression"

    def numbers(self, model: Statistics, block: Numbers) -> dict[str, Any]:
        """The histogram of the PIT, and the coverage of central intervals."""
        coverage = coverage_curve(model.sums.central, LEVELS, model.sums.count)
        return {"pit": pit_histogram(model.sums.pit), "coverage": coverage}

    def words(self, document: Numbers) -> Iterator[Line]:
        """The verdict of each model, and what is not finite."""
        for block in document["models"]:
            yield block["name"], *regression_headline(block, words.statements(document))
            yield from words.about_invalid(block)

    def figures(self, block: Numbers, document: Numbers) -> Iterator[fig.Figure]:
        """The histogram of the PIT, and the coverage of the intervals."""
        yield _pit(block["pit"])
        yield _coverage(block["coverage"])


def _pit(data: Numbers) -> fig.Plot:
    edges, counts, lower, upper = fig.arrays(data, "edges", "count", "lower", "upper")
    left, right = edges[:-1], edges[1:]
    outside = outside_band(counts, lower, upper)
    expected = counts.sum() / len(counts)
    inside, beyond = fig.only(counts, ~outside), fig.only(counts, outside)
    return fig.Plot(
        "pit",
        "PIT histogram",
        "Where each observed value lies in its predicted distribution, as a probability. A "
        "calibrated model gives a flat histogram inside of the band (99% for all bars together). "
        "High ends: intervals too narrow. A hump: too wide. A slope: biased.",
        x=fig.Axis("probability integral transform"),
        y=fig.Axis("observations", fig.domain([*counts, *upper], zero=True), "count"),
        marks=[
            Mark("bars", left, 0 * counts, right, inside, "observations", "count"),
            Mark("bars", left, 0 * counts, right, beyond, "outside of the band", "outside", "bad"),
            Mark("boxes", left, lower, right, upper, "band of perfect calibration", "band", "band"),
            Mark("line", [0, 1], [expected, expected], key="flat", colour="ink", style="dashed"),
        ],
        table=fig.table({
            "PIT": ranges(left, right, lambda edge: fixed(edge, 2)),
            "observations": map(count, counts),
            "expected": [short(expected)] * len(counts),
            "band": ranges(lower, upper, short, outside),
        }),
        spans=(left, right),
    )  # fmt: skip


def _coverage(data: Numbers) -> fig.Plot:
    nominal, observed, lower, upper = fig.arrays(data, "nominal", "observed", "lower", "upper")
    outside = outside_band(observed, lower, upper)
    return fig.Plot(
        "coverage",
        "Coverage of the intervals",
        "The share of observations inside of the central interval of each stated level. On the "
        "diagonal the intervals keep their promise; below it they are too narrow, above it too "
        "wide.",
        x=fig.Axis("stated level of the interval"),
        y=fig.Axis("share inside"),
        marks=[
            Mark("area", nominal, lower, y2=upper, label="band of perfect calibration", key="band",
                 colour="band"),
            Mark("line", [0, 1], [0, 1], key="diagonal", colour="muted", style="dashed"),
            Mark("line", nominal, observed, key="model", colour="model", shared="models",
                 style="thick"),
            Mark("dots", nominal, observed, key="model", colour="model"),
            Mark("rings", nominal, fig.only(observed, outside), label="outside of the band",
                 key="outside", colour="bad"),
        ],
        table=fig.table({
            "level": [percent(level, 0) for level in nominal],
            "holds": map(percent, observed),
            "band": ranges(lower, upper, percent, outside),
        }),
        spans=fig.spans_between(nominal, (0, 1)),
    )  # fmt: skip


# ------------------------------------------------------------------ words


def regression_headline(block: Numbers, said: str) -> tuple[str, str]:
    """Level and text for a regression.

    Args:
        block: The model's numbers.
        said: What they are about, such as "400 examples".
    """
    label, scalars = block["verdict"]["label"], block["scalars"]
    held = f"the 90% interval holds {words.rounded_percent(scalars['coverage_90'])}"
    if label == "nothing found":
        return words.nothing_found(block, said, "the 90% interval")
    if label == "calibrated":
        return "good", f"well calibrated: {held}, and {said} show nothing amiss."
    if label == "biased":
        score = scalars["mean_score"]
        side = "low" if score > 0 else "high"
        return "bad", f"biased: predicts too {side} by {short(abs(score))} sd on average; {held}."
    if label in ("over-confident", "under-confident"):
        return _wrong_spread(block, label, held)
    if not outside_band(*fig.arrays(block["pit"], "count", "lower", "upper")).any():
        off = "the stated spread does not follow the errors"
        return "warn", f"calibrated on average, but {off}; {held}."
    return "bad", f"miscalibrated: the shape of the distribution is wrong; {held}."


def _wrong_spread(block: Numbers, label: str, held: str) -> tuple[str, str]:
    over, factor = label == "over-confident", block["scalars"]["widening_90"]
    level, kind, size = ("bad", "narrow", "larger") if over else ("warn", "wide", "smaller")
    gap = block["scalars"]["coverage_90"] - 0.9
    ratio = _spread_ratio(block)
    somewhere = bool(block["verdict"]["spread_outside"])
    if not somewhere and abs(ratio - 1) <= words.NEAR_ONE and abs(gap) < IMMATERIAL_GAP:
        by = words.rounded_percent(abs(ratio - 1))
        return "note", f"intervals too {kind} by about {by}: too small to matter ({held})."
    side = 1 if over else -1  # of a factor that mends the coverage too
    if side * gap < 0 and side * (factor - 1) > words.NEAR_ONE:
        verb = "widening" if over else "narrowing"
        fix = f"{verb} by a factor {factor:.2f} would make the 90% interval hold 90%"
        return level, f"intervals too {kind}: {held}; {fix}."
    where = "at some stated spreads" if somewhere else "beyond it"
    return level, f"intervals too {kind}: {held}, but {where} the errors are {size} than stated."


def _spread_ratio(block: Numbers) -> float:
    """Errors in units of what was stated: z of the verdict is (Σz² − n) / √(2n)."""
    z, count = block["verdict"]["z"], sum(block["pit"]["count"])
    if z is None or block["verdict"]["clustered"]:
        return math.inf  # not known from z
    return math.sqrt(max(0.0, 1 + z * math.sqrt(2 / count)))
