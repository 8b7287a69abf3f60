"""Errors of a classification: what confidence is worth, and what the scores are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_bnn.calibration.decomposition import brier_decomposition, nll_decomposition
from lightning_bnn.calibration.selective import risk_coverage
from lightning_bnn.report import figure as fig
from lightning_bnn.report.figure import Mark
from lightning_bnn.report.sections.base import Line, Numbers, Section
from lightning_bnn.report.text import count, percent, short
from lightning_bnn.report.words import rounded_percent

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["ClassErrors"]

CURVE_POINTS = 200
# What the surest answers cost is said of at most so many models, and from so many expected errors:
# of fewer answers a share of errors says little.
FEW_MODELS = 4
FEWEST_ERRORS = 5
# How the two scores are made up of their parts: name, sign, colour.
STEPS = (
    ("uncertainty", 1, "muted"),
    ("resolution", -1, "right"),
    ("reliability", 1, "wrong"),
    ("which_class", 1, "epistemic"),
)


class ClassErrors(Section):
    """How much do the predictions tell, and can the wrong ones be found beforehand?"""

    key, order = "errors", 20
    title = "Sharpness and errors"
    lead = "How much do the predictions tell, and can the wrong ones be found beforehand?"
    task = "classification"

    def numbers(self, model: Statistics, block: Numbers) -> dict[str, Any]:
        """Risk and coverage, decompositions of NLL and Brier score."""
        sums, sample = model.sums, model.sample
        risk = risk_coverage(sample["confidence"], 1.0 - sample["correct"])
        shown = np.unique(np.linspace(0, len(risk) - 1, CURVE_POINTS).round().astype(int))
        # A yes-or-no label's Brier score is that of its 1 alone, half of the sum over both values.
        scale = 0.5 if model.labels else 1.0
        brier = brier_decomposition(sums.classwise)
        return {
            "risk_coverage": {"coverage": (shown + 1) / len(risk), "risk": risk[shown]},
            "nll_decomposition": nll_decomposition(
                sums.confidence, sums.mean("nll"), sums.mean("which_class")
            ),
            "brier_decomposition": {part: scale * value for part, value in brier.items()},
        }

    def words(self, document: Numbers) -> Iterator[Line]:
        """What the surest answers cost."""
        blocks = document["models"]
        for block in blocks if len(blocks) <= FEW_MODELS else ():
            coverage, risk = (block["scalars"][key] for key in ("coverage_at_risk", "risk"))
            errors = rounded_percent(risk)
            if coverage <= 0:
                text = f"even the answers it is surest of had more than {errors} errors here."
                yield block["name"], "warn", text
            elif coverage < 1 and coverage * document["data"]["rows"] * risk >= FEWEST_ERRORS:
                surest = f"the {rounded_percent(coverage)} it is surest of"
                yield block["name"], "note", f"{surest} had at most {errors} errors here."

    def figures(self, block: Numbers, document: Numbers) -> Iterator[fig.Figure]:
        """Risk against coverage, and the decompositions."""
        yield _risk(block)
        two = document["data"]["classes"] == 2
        rest = " Which class is the cost of guessing among the rest when the top class is wrong."
        yield from _waterfall(
            "nll-decomposition", "What the NLL is made of",
            "Uncertainty is the score of always stating the accuracy. Resolution is what telling "
            "sure from unsure predictions gains. Reliability is what miscalibration costs: it "
            f"would be zero if every confidence were true.{'' if two else rest}",
            block["nll_decomposition"], STEPS[: 3 if two else 4], ("NLL", block["scalars"]["nll"]),
        )  # fmt: skip
        yield from _waterfall(
            "brier-decomposition", "What the Brier score is made of",
            "The same split for the squared error of the probabilities, summed over all classes: "
            "the spread of the classes themselves, less what the predictions tell, plus what "
            "miscalibration costs.",
            block["brier_decomposition"], STEPS[:3], ("Brier", block["scalars"]["brier"]),
        )  # fmt: skip


def _waterfall(
    id_: str,
    title: str,
    read: str,
    values: Numbers,
    steps: Sequence[tuple[str, int, str]],
    total: tuple[str, float | None],
) -> Iterator[fig.Bars]:
    """Steps (name, sign, colour) that add up to a total; nothing if one is not known."""
    if None in (total[1], *(values[name] for name, *_ in steps)):
        return
    rows, at, ends = [], 0.0, [0.0, total[1] or 0.0]
    for name, sign, colour in steps:
        step = sign * (values[name] if abs(values[name]) >= 1e-12 else 0.0)
        parts = [fig.Part(at, at + step, short(step), key=name, colour=colour)]
        at += step
        ends.append(at)
        rows.append(fig.BarRow(name.replace("_", " "), short(step), parts, line=at))
    parts = [fig.Part(0, total[1], short(total[1]), key="total", colour="total")]
    rows.append(fig.BarRow(total[0], short(total[1]), parts, strong=True))
    table = fig.Table(["part", "value"], [[row.name, row.text] for row in rows])
    yield fig.Bars(
        id_, title, read, logged=False, rows=rows, domain=(min(ends), max(ends)), table=table
    )


def _risk(block: Numbers) -> fig.Plot:
    scalars, curve = block["scalars"], block["risk_coverage"]
    coverage, risks = fig.arrays(curve, "coverage", "risk")
    risk, kept = scalars["risk"], scalars["coverage_at_risk"]
    told = np.unique(np.append(np.arange(0, len(risks), -(-len(risks) // 50)), len(risks) - 1))
    # the first few predictions alone say little, and would squeeze the rest
    heights = fig.domain([*risks[coverage >= 0.05], 1.2 * risk], zero=True)
    note = f"{count(len(told))} of {count(len(risks))} points; the JSON file has all of them."
    return fig.Plot(
        "risk-coverage",
        "Risk against coverage",
        "The error rate if only the most confident share of the predictions is kept and the rest "
        "is handed on. Lower is better; the area under the curve is the AURC "
        f"({short(scalars['aurc'])}). With at most {percent(risk, 0)} errors, {percent(kept)} of "
        "the predictions can be kept.",
        x=fig.Axis("coverage: share that is kept"),
        y=fig.Axis("risk: error rate", heights, "percent"),
        marks=[
            Mark("line", coverage, risks, key="model", colour="model", shared="models",
                 style="thick"),
            Mark("line", [0, 1], [risk, risk], label="accepted risk", key="limit", colour="ink",
                 style="dashed"),
            Mark("line", [kept, kept], [0, risk], key="limit", colour="ink", style="dashed"),
            Mark("dots", [kept], [risk if kept else None], key="limit", colour="ink"),
        ],
        table=fig.table(
            {
                "coverage": map(percent, coverage[told]),
                "risk": [percent(each, 2) for each in risks[told]],
            },
            note if len(told) < len(risks) else "",
        ),
        spans=fig.spans_between(coverage[told], (0, 1)),
    )  # fmt: skip
