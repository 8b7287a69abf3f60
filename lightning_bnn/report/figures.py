"""Figures drawn with matplotlib: those of a report for loggers, and two of predictions.

The figures of a report are drawn from the same descriptions as the page
(:mod:`lightning_bnn.report.figure`), without pyplot, so that a logger can take them from any thread
and none stays behind. Those of predictions draw on axes that the caller made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from torch import Tensor

from lightning_bnn.posteriors import Posterior
from lightning_bnn.predictive import OrderedPredictive
from lightning_bnn.report.figure import COLOURS, MODEL_COLOURS, ROLES, as_array

__all__ = ["calibration_figures", "draw_regression", "draw_shift"]

BLUE, ORANGE, GREY = (COLOURS[name][0] for name in ("blue", "orange", "grey"))
Description = Mapping[str, Any]


def calibration_figures(numbers: Mapping[str, Any]) -> dict[str, Figure]:
    """The figures of a calibration report, for loggers and papers.

    There is one for each section of the page that has plots for loggers: "calibration", "errors",
    "shift", "pruning" and those of a user's own. A column is a model, a row is a figure.

    Args:
        numbers: The numbers of a report, such as ``Report.numbers`` or its JSON file.

    Returns:
        The figures by the section's name.

    Example:
        >>> from lightning_bnn.report import report
        >>> made = report([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]], [0, 1, 1], bins=2)
        >>> sorted(calibration_figures(made.numbers))
        ['calibration', 'errors']
    """
    sections: dict[str, list[tuple[str, str, dict[str, Description]]]] = {}
    for block, name in zip(numbers["models"], cycle(MODEL_COLOURS), strict=False):
        for section in block["sections"]:
            logged = {each["id"]: each for each in _logged(section["figures"])}
            if logged:
                columns = sections.setdefault(section["id"], [])
                columns.append((block["name"], COLOURS[name][0], logged))
    return {name: _section(columns) for name, columns in sections.items()}


def _logged(figures: Sequence[Description]) -> Iterator[Description]:
    """The plots that loggers get; of several views the first, of panels each."""
    for each in figures:
        if each["kind"] == "views":
            yield from _logged([each["views"][0][1]])
        elif each["kind"] == "panels":
            yield from each["panels"]
        elif each.get("logged") and each["kind"] == "plot":
            yield each


def _section(columns: Sequence[tuple[str, str, dict[str, Description]]]) -> Figure:
    ids = list(dict.fromkeys(id_ for *_, logged in columns for id_ in logged))
    figure = Figure(figsize=(4.0 * len(columns) + 0.3, 2.9 * len(ids) + 0.3), layout="constrained")
    axes = figure.subplots(len(ids), len(columns), squeeze=False)
    for (name, colour, logged), column in zip(columns, axes.T, strict=True):
        for id_, place in zip(ids, column, strict=True):
            place.spines[["top", "right"]].set_visible(False)
            place.tick_params(labelsize=8)
            if id_ not in logged:
                place.set_axis_off()
                continue
            each = logged[id_]
            _plot(place, each, colour)
            model = f"{plain(name)}\n" if len(columns) > 1 and place is column[0] else ""
            place.set_title(f"{model}{plain(each['title'], 40)}", fontsize=9)
    return figure


def plain(name: str, longest: int = 28) -> str:
    r"""A name as matplotlib shows it unchanged: without formulas, and not left out of a legend.

    The middle of a long one goes, since names often differ at their end.

    Example:
        >>> plain("$x$"), plain("_net")
        ('\\$x\\$', ' _net')
        >>> plain("a network with a very long name, run 12")
        'a network with… name, run 12'
    """
    half = longest // 2
    if len(name) > longest:
        name = f"{name[:half]}…{name[1 - half :]}"
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _plot(axes: Axes, figure: Description, model: str) -> None:
    for mark in figure["marks"]:
        role = mark["colour"]
        colour = model if role in ("model", "main") else COLOURS[ROLES[role]][0]
        _mark(axes, mark, colour, plain(mark["label"]) if "label" in mark else None)
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        axes.set(**{f"{name}lim": figure[name]["domain"]})
        if "ticks" in figure[name]:
            axis.set_ticks(figure[name]["ticks"])
        if figure[name].get("format") in FORMATS:
            axis.set_major_formatter(FORMATS[figure[name]["format"]])
    axes.set_xlabel(plain(figure["x"]["label"], 60), fontsize=9)
    axes.set_ylabel(plain(figure["y"]["label"], 40), fontsize=9)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7)


# How an axis writes its ticks, as the page does.
FORMATS: dict[str, Callable[[float, Any], str]] = {
    "count": lambda value, _: f"{value:,.0f}",
    "percent": lambda value, _: f"{100 * value:.3g}%",
    "power": lambda value, _: f"{10.0**value:.3g}",
    "removed": lambda value, _: f"{100 * (1 - 10.0**-value):.6g}%",
}


def _mark(axes: Axes, mark: Description, colour: str, label: str | None) -> None:
    x, y, x2, y2 = (as_array(mark.get(name, [])) for name in ("x", "y", "x2", "y2"))
    if not all(np.isfinite(each).any() for each in (x, y, x2, y2) if len(each)):
        return  # no entry in the legend for what is not there
    kind, style = mark["kind"], mark.get("style", "").split()
    weight = as_array(mark["weight"] if "weight" in mark else [1.0] * len(x))
    if kind not in ("steps", "rules"):
        places = [each for each in (x, y, x2, y2) if len(each)]
        known = np.isfinite(np.stack(places)).all(0)
        x, y, x2, y2, weight = (
            each[known] if len(each) else each for each in (x, y, x2, y2, weight)
        )
    size = np.sqrt(weight / max(weight.max(initial=0), 1e-12))
    shown: dict[str, Any] = {"color": colour, "label": label}
    alpha = 0.4 if "pale" in style or "strong" in style else None
    dash = "--" if "dashed" in style else "-"
    if kind == "line":
        axes.plot(x, y, ls=dash, lw=2 if "thick" in style else 1.3, **shown)
    elif kind == "area":
        pale = alpha or (None if mark["colour"] == "band" else 0.2)
        axes.fill_between(x, y, y2, lw=0, alpha=pale, **shown)
    elif kind == "steps":
        axes.stairs(np.nan_to_num(y), x, fill=True, alpha=0.4, **shown)
        axes.stairs(np.nan_to_num(y), x, color=colour)
    elif kind in ("bars", "boxes"):
        shades: Any = colour
        if "weight" in mark:
            shades = [to_rgba(colour, 0.3 + 0.7 * share) for share in size]
        width = (x2 - x) * (0.94 if kind == "bars" else 1.0)
        axes.bar(x, y2 - y, width, bottom=y, align="edge", color=shades, label=label, alpha=alpha)
    elif kind == "dots":
        area = 4 if alpha else (2.5 + 3 * size) ** 2
        axes.scatter(x, y, area, lw=0, zorder=3, alpha=alpha, **shown)
    elif kind == "rings":
        area = 2.5 * (2.5 + 3 * size) ** 2
        axes.scatter(x, y, area, facecolors="none", edgecolors=colour, label=label, zorder=4)
    elif kind in ("stems", "ranges"):
        axes.vlines(x, y, y2, lw=3 if kind == "stems" else 7, **shown)
    elif kind == "rules":
        for at, text in zip(x, mark.get("text", [""] * len(x)), strict=True):
            axes.axvline(at, color=colour, lw=1, ls=dash, label=label)
            axes.text(at, 0.98, plain(text), fontsize=7, ha="right", va="top", rotation=90,
                      transform=axes.get_xaxis_transform())  # fmt: skip
            label = None


def draw_regression(
    axes: Axes,
    inputs: Tensor,
    predictive: OrderedPredictive,
    observed: Sequence[Tensor] | None = None,
    truth: Tensor | None = None,
) -> None:
    """Draw a one-dimensional regression: its mean, its interval, and where that comes from.

    The outer band is the central 95 % interval of the mixture; the inner one is ±2 standard
    deviations of the mean alone, which more data would narrow.

    Args:
        axes: Where to draw.
        inputs: A sorted grid of shape (points,) or (points, 1).
        predictive: The prediction on the grid.
        observed: Training inputs and targets.
        truth: The noise-free curve on the grid.
    """
    grid = inputs.flatten().cpu()
    mean = predictive.mean.flatten().cpu()
    lower, upper = (edge.flatten().cpu() for edge in predictive.interval(0.95))
    spread = 2 * predictive.epistemic.flatten().sqrt().cpu()
    axes.fill_between(grid, lower, upper, color=BLUE, alpha=0.18, lw=0, label="95% interval")
    axes.fill_between(
        grid, mean - spread, mean + spread, color=BLUE, alpha=0.3, lw=0, label="epistemic part"
    )
    axes.plot(grid, mean, color=BLUE, lw=1.8, label="mean")
    if truth is not None:
        axes.plot(grid, truth.flatten().cpu(), color=GREY, lw=1, ls="--", label="truth")
    if observed is not None:
        points, values = (part.flatten().cpu() for part in observed)
        axes.scatter(points, values, s=5, color="black", alpha=0.35, lw=0, label="data", zorder=3)
    axes.set_xlim(float(grid[0]), float(grid[-1]))
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def draw_shift(
    axes: Axes,
    posteriors: Mapping[str, Posterior],
    shifted: Mapping[float, Tensor],
    targets: Tensor,
    draws: int = 32,
) -> None:
    """Draw mean confidence and accuracy of classifiers as their inputs move away.

    A model that knows when it errs keeps its confidence (solid) near its accuracy (dashed).

    Args:
        axes: Where to draw.
        posteriors: Posteriors of classifiers, by name.
        shifted: The inputs, by the size of the shift.
        targets: Their classes, which the shift does not change.
        draws: Draws of the weights in each prediction.
    """
    for (name, posterior), colour in zip(posteriors.items(), (BLUE, ORANGE), strict=False):
        confidence, accuracy = [], []
        for inputs in shifted.values():
            predictive = posterior.predict(inputs, draws)
            confidence.append(float(predictive.mean.max(1).values.mean()))
            accuracy.append(
                float((predictive.mean.argmax(1).cpu() == targets.cpu()).float().mean())
            )
        levels = list(shifted)
        axes.plot(levels, confidence, color=colour, lw=1.8, label=f"{name}: confidence")
        axes.plot(levels, accuracy, color=colour, lw=1.4, ls="--", label=f"{name}: accuracy")
    axes.set_ylim(0, 1.03)
    axes.legend(frameon=False, fontsize=8, loc="lower left")
