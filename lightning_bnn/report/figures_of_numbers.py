"""The figures of a report on numbers: PIT and coverage, error by predicted sd, fit, shift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_bnn.report.figure_style import (
    GREY,
    as_array,
    grid,
    plain,
    series,
    shift_figure,
    shown,
)

__all__ = ["number_figures"]

Block = Mapping[str, Any]


def number_figures(models: Sequence[Block]) -> dict[str, Figure]:
    """All figures for which the models of a report on numbers have numbers.

    Example:
        >>> pit = {"edges": [0, 0.5, 1], "count": [4, 6], "lower": [1, 1], "upper": [9, 9]}
        >>> sorted(number_figures([{"name": "net", "pit": pit}]))
        ['calibration']
    """
    figures = {
        "calibration": _calibration(models),
        "selection": _selection(models),
        "fit": _fit(models),
        "shift": shift_figure(models, "sd", "predicted standard deviation"),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _calibration(models: Sequence[Block]) -> Figure | None:
    chosen = series(models, "pit")
    if not chosen:
        return None
    figure, columns = grid(len(chosen), heights=[2.2, 3.2])
    for (block, colour), (top, bottom) in zip(chosen, columns, strict=True):
        _draw_pit(top, block, colour)
        if block.get("coverage") is None:
            bottom.set_axis_off()
        else:
            _draw_coverage(bottom, block["coverage"], colour)
    columns[0][0].legend(frameon=False, fontsize=8)
    return figure


def _draw_pit(axes: Axes, block: Block, colour: str) -> None:
    part = block["pit"]
    edges, count, lower, upper = (as_array(part[k]) for k in ("edges", "count", "lower", "upper"))
    axes.bar(edges[:-1], count, np.diff(edges), align="edge", color=colour, alpha=0.6)
    low, high = (np.append(limit, limit[-1]) for limit in (lower, upper))  # to the last edge
    axes.fill_between(
        edges, low, high, step="post", color=GREY, alpha=0.35, lw=0, label="if calibrated"
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    verdict = (block.get("verdict") or {}).get("label", "")
    crps = (block.get("scalars") or {}).get("crps")
    axes.set_title(f"{plain(block['name'])}\n{verdict}, CRPS {shown(crps)}", fontsize=10)
    axes.set_xlabel("PIT of the target", fontsize=9)
    axes.set_ylabel("targets", fontsize=9)


def _draw_coverage(axes: Axes, part: Mapping[str, Any], colour: str) -> None:
    nominal, observed, lower, upper = (
        as_array(part[key]) for key in ("nominal", "observed", "lower", "upper")
    )
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls="--")
    axes.fill_between(nominal, lower, upper, color=GREY, alpha=0.25, lw=0)
    axes.plot(nominal, observed, "o-", color=colour, lw=1.5, ms=3)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), aspect="equal")
    axes.set_xlabel("nominal level of the interval", fontsize=9)
    axes.set_ylabel("share inside", fontsize=9)


def _selection(models: Sequence[Block]) -> Figure | None:
    chosen = series(models, "error_sd")
    if not chosen:
        return None
    figure, columns = grid(len(chosen), heights=[3.2])
    for (block, colour), (axes,) in zip(chosen, columns, strict=True):
        part = block["error_sd"]
        sd, rmse, lower, upper = (as_array(part[k]) for k in ("sd", "rmse", "lower", "upper"))
        if block.get("scatter") is not None:
            points, errors = (as_array(block["scatter"][key]) for key in ("sd", "error"))
            axes.scatter(points, np.abs(errors), s=4, color=GREY, alpha=0.3, lw=0)
        axes.fill_between(sd, lower, upper, color=GREY, alpha=0.3, lw=0, label="if calibrated")
        axes.vlines(sd, lower, upper, color=GREY, alpha=0.4, lw=2)
        axes.plot(sd, rmse, "o-", color=colour, lw=1.5, ms=4, label="root mean square error")
        axes.set_title(plain(block["name"]), fontsize=10)
        axes.set_xlabel("predicted standard deviation", fontsize=9)
        axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", nbins=5)
    columns[0][0].set_ylabel("size of the error", fontsize=9)
    columns[0][0].legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def _fit(models: Sequence[Block]) -> Figure | None:
    chosen = series(models, "fit")
    if not chosen:
        return None
    figure, columns = grid(len(chosen), heights=[3.0], width=4.2, columns=3)
    for (block, colour), (axes,) in zip(chosen, columns, strict=True):
        part = {key: v if key == "level" else as_array(v) for key, v in block["fit"].items()}
        order = np.argsort(part["x"])
        x = part["x"][order]
        outer = (part["lower"][order], part["upper"][order])
        inner = (part["epistemic_lower"][order], part["epistemic_upper"][order])
        share = f"{100 * part['level']:.0f}% interval"
        axes.fill_between(x, *outer, color=colour, alpha=0.18, lw=0, label=share)
        axes.fill_between(x, *inner, color=colour, alpha=0.35, lw=0, label="epistemic part")
        axes.plot(x, part["mean"][order], color=colour, lw=1.6, label="mean")
        axes.scatter(part["x"], part["y"], s=5, color="black", alpha=0.4, lw=0, label="targets")
        axes.set_title(plain(block["name"]), fontsize=10)
        axes.set_xlabel("input", fontsize=9)
        axes.set_ylabel("target", fontsize=9)
    columns[0][0].legend(frameon=False, fontsize=8)
    return figure
