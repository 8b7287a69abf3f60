"""Errors of a classification: what confidence is worth, and what the scores are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import betaincinv

from lightning_bnn.calibration.decomposition import brier_decomposition, nll_decomposition
from lightning_bnn.calibration.selective import risk_coverage
from lightning_bnn.report import figure as fig
from lightning_bnn.report.figure import Mark
from lightning_bnn.report.sections.base import Line, Numbers, Section
from lightning_bnn.report.sections.reliability import waterfall
from lightning_bnn.report.text import count, fixed, percent, ranges, short
from lightning_bnn.report.words import rounded_percent

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["ClassErrors"]

CURVE_POINTS = 200
# What the surest answers cost is said of at most so many models.
FEW_MODELS = 4


class ClassErrors(Section):
    """How much do the predictions tell, and can the wrong ones be found beforehand?"""

    key, order = "errors", 20
    title = "Sharpness and errors"
    lead = "How much do the predictions tell, and can the wrong ones be found beforehand?"
    task = "classification"

    def numbers(self, model: Statistics, block: Numbers) -> dict[str, Any]:
        """Risk and coverage, accuracy by entropy, decompositions of NLL and Brier score."""
        sums, sample = model.sums, model.sample
        curve = risk_coverage(sample["confidence"], 1.0 - sample["correct"])
        shown = np.unique(np.linspace(0, len(curve.risk) - 1, CURVE_POINTS).round().astype(int))
        counts = sums.entropy.count[0]
        accuracy = sums.entropy.observed[0] / np.where(counts > 0, counts, np.nan)
        # A yes-or-no label's Brier score is that of its 1 alone, half of the sum over both values.
        scale = 0.5 if model.labels else 1.0
        brier = brier_decomposition(sums.classwise)
        nll = nll_decomposition(sums.confidence, sums.mean("nll"), sums.mean("which_class"))
        entropy = {"edges": sums.entropy.edges, "count": counts, "accuracy": accuracy}
        return {
            "risk_coverage": {"coverage": curve.coverage[shown], "risk": curve.risk[shown]},
            "entropy_accuracy": entropy,
            "nll_decomposition": nll,
            "brier_decomposition": {part: scale * value for part, value in brier.items()},
        }

    def words(self, document: Numbers) -> Iterator[Line]:
        """What the surest answers cost, where there are enough of them to say."""
        blocks = document["models"]
        for block in blocks if len(blocks) <= FEW_MODELS else ():
            scalars = block["scalars"]
            coverage, risk = scalars["coverage_at_risk"], scalars["risk"]
            answered, errors = scalars["answered_at_risk"], scalars["errors_at_risk"]
            if coverage is None or coverage >= 1:
                continue
            if coverage <= 0:
                text = f"had more than {rounded_percent(risk)} errors here."
                yield block["name"], "warn", f"even the answers it is surest of {text}"
            elif answered:
                # Clopper and Pearson's upper end, at 95 percent. It cannot be below the risk, since
                # the coverage is the largest one at that risk; twice as much would be of no use.
                upper = float(betaincinv(errors + 1, max(answered - errors, 0.5), 0.95))
                if upper <= 2 * risk:
                    had = f"{rounded_percent(errors / answered)} errors" if errors else "no errors"
                    chance = f"up to {rounded_percent(upper)} allowing for chance"
                    surest = f"the {rounded_percent(coverage)} it is surest of"
                    yield block["name"], "note", f"{surest} had {had} here ({chance})."

    def figures(self, block: Numbers, document: Numbers) -> Iterator[fig.Figure]:
        """Risk against coverage, accuracy against entropy, and the decompositions."""
        yield _risk(block)
        yield _entropy(block["entropy_accuracy"])
        parts, two = block["nll_decomposition"], document["data"]["classes"] == 2
        steps = [
            ("uncertainty", parts["uncertainty"], 1, "muted"),
            ("resolution", parts["resolution"], -1, "right"),
            ("reliability", parts["reliability"], 1, "wrong"),
        ]
        which = [] if two else [("which class", parts["which_class"], 1, "epistemic")]
        rest = "Which class is the cost of guessing among the rest when the top class is wrong."
        yield from waterfall(
            "nll-decomposition", "What the NLL is made of",
            "Uncertainty is the score of always stating the accuracy. Resolution is what telling "
            "sure from unsure predictions gains. Reliability is what miscalibration costs: it "
            f"would be zero if every confidence were true. {'' if two else rest}".rstrip(),
            [*steps, *which], ("NLL", block["scalars"]["nll"]),
        )  # fmt: skip
        parts = block["brier_decomposition"]
        yield from waterfall(
            "brier-decomposition", "What the Brier score is made of",
            "The same split for the squared error of the probabilities, summed over all classes: "
            "the spread of the classes themselves, less what the predictions tell, plus what "
            "miscalibration costs.",
            [(name, parts[name], sign, colour) for name, _, sign, colour in steps],
            ("Brier", block["scalars"]["brier"]),
        )  # fmt: skip


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


def _entropy(data: Numbers) -> fig.Plot:
    edges, counts, accuracy = fig.arrays(data, "edges", "count", "accuracy")
    return fig.Plot(
        "entropy-accuracy",
        "Accuracy against entropy",
        "Where the model says that it is unsure, it should be wrong more often: the bars should "
        "fall from left to right. Pale bars rest on few predictions.",
        x=fig.Axis("predictive entropy (nats)", (edges[0], edges[-1])),
        y=fig.Axis("accuracy"),
        marks=[
            Mark("bars", edges[:-1], 0 * accuracy, edges[1:], fig.only(accuracy, counts > 0),
                 key="accuracy", weight=counts)
        ],
        table=fig.table({
            "entropy": ranges(edges[:-1], edges[1:], lambda edge: fixed(edge, 2)),
            "accuracy": map(percent, accuracy),
            "predictions": map(count, counts),
        }),
        spans=(edges[:-1], edges[1:]),
    )  # fmt: skip
