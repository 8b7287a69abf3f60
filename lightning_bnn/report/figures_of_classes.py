"""The figures of a report on classes: reliability, selective prediction, shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_bnn.report.figure_style import (
    GREY,
    OUTSIDE,
    as_array,
    dashes,
    grid,
    middles,
    name_lines,
    plain,
    series,
    shift_figure,
    shown,
)

__all__ = ["class_figures"]

Block = Mapping[str, Any]


def class_figures(models: Sequence[Block]) -> dict[str, Figure]:
    """All figures for which the models of a report on classes have numbers.

    Example:
        >>> block = {"name": "net", "risk_coverage": {"coverage": [0.5, 1], "risk": [0.0, 0.1]}}
        >>> sorted(class_figures([block]))
        ['selection']
    """
    figures = {
        "calibration": _calibration(models),
        "selection": _selection(models),
        "shift": shift_figure(models, "entropy", "entropy of the prediction (nats)"),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _calibration(models: Sequence[Block]) -> Figure | None:
    chosen = series(models, "reliability")
    if not chosen:
        return None
    figure, columns = grid(len(chosen), heights=[3.2, 1.5])
    for (block, colour), (top, bottom) in zip(chosen, columns, strict=True):
        _draw_reliability(top, block, colour)
        if block.get("confidence") is None:
            bottom.set_axis_off()
        else:
            _draw_confidence(bottom, block["confidence"], colour)
    columns[0][0].set_ylabel("share that came true", fontsize=9)
    columns[0][0].legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def _draw_reliability(axes: Axes, block: Block, colour: str) -> None:
    """Equal-width bins: the share that came true against the mean confidence, and its band."""
    curve = block["reliability"]["width"]
    stated, came, lower, upper = (
        as_array(curve[key]) for key in ("stated", "came", "lower", "upper")
    )
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls="--", zorder=1)
    filled = np.isfinite(stated)
    axes.fill_between(
        stated[filled], lower[filled], upper[filled],
        color=GREY, alpha=0.2, lw=0, label="if calibrated",
    )  # fmt: skip
    # bars beside the band: a lone bin has a band too, but no area between its neighbours
    axes.vlines(stated[filled], lower[filled], upper[filled], color=GREY, alpha=0.35, lw=2)
    axes.plot(stated[filled], came[filled], "o-", color=colour, lw=1.5, ms=4, label="observed")
    axes.set(xlim=(0, 1), ylim=(0, 1.02), aspect="equal")
    verdict = (block.get("verdict") or {}).get("label", "")
    ece = (block.get("scalars") or {}).get("ece")
    axes.set_title(f"{plain(block['name'])}\n{verdict}, ECE {shown(ece)}", fontsize=10)


def _draw_confidence(axes: Axes, part: Mapping[str, Any], colour: str) -> None:
    edges, right, wrong = (as_array(part[key]) for key in ("edges", "right", "wrong"))
    widths = np.diff(edges)
    axes.bar(middles(edges), right, widths * 0.92, color=colour, alpha=0.55, label="right")
    # the error colour of all models but the one whose own colour it is
    error = "#7a1f1f" if colour == OUTSIDE else OUTSIDE
    axes.bar(middles(edges), wrong, widths * 0.92, bottom=right, color=error, label="wrong")
    axes.set_xlim(0, 1)
    axes.set_yscale("symlog", linthresh=10)
    axes.set_ylim(0, 2 * max(1.0, float(np.nanmax(right + wrong))))
    axes.set_xlabel("confidence", fontsize=9)
    axes.set_ylabel("examples", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _selection(models: Sequence[Block]) -> Figure | None:
    chosen = series(models, "risk_coverage")
    if not chosen:
        return None
    figure, ((left,), (right,)) = grid(2, heights=[3.2], width=4.6)
    style = dashes(models)
    for block, colour in chosen:
        curve = block["risk_coverage"]
        aurc = (block.get("scalars") or {}).get("aurc")
        label = f"{plain(block['name'])}: AURC {shown(aurc, 4)}"
        left.plot(
            as_array(curve["coverage"]), as_array(curve["risk"]),
            color=colour, ls=style[id(block)], lw=1.6, label=label,
        )  # fmt: skip
    left.set(xlim=(0, 1.005), xlabel="share of examples answered", ylabel="error among them")
    left.set_ylim(bottom=0)
    name_lines(left)
    drawn = [(b, b["entropy_accuracy"], c) for b, c in series(models, "entropy_accuracy")]
    if not drawn:
        right.set_axis_off()
        return figure
    for block, part, colour in drawn:
        accuracy = as_array(part["accuracy"])
        known = np.isfinite(accuracy)
        right.plot(
            middles(part["edges"])[known], accuracy[known], "o",
            color=colour, ls=style[id(block)], lw=1.4, ms=3.5, label=plain(block["name"]),
        )  # fmt: skip
    right.set(ylim=(0, 1.02), xlabel="entropy of the prediction (nats)", ylabel="accuracy")
    return figure
