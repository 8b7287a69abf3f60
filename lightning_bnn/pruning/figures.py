"""The figures of pruning: the histogram of the ratios, and the scores against the share removed.

They are drawn from plain numbers, those of :meth:`lightning_bnn.pruning.PruneCurve.to_dict`. The
share f that is removed stands at −log10(1 − f): between 90 and 99 % lies as much room as between 0
and 90 %, because what is left falls tenfold in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from lightning_bnn.pruning.curve import percent
from lightning_bnn.report.figure_style import GREY, INSIDE, as_array, colours, grid, plain

__all__ = ["draw_all", "draw_curve", "draw_histogram"]

Block = Mapping[str, Any]

# Those drawn, the first three that there are: how wrong, how unlikely, how calibrated.
_LABELS = {
    "accuracy": "error (%)", "rmse": "RMSE", "nll": "NLL", "ece": "ECE", "coverage": "coverage",
    "crps": "CRPS", "brier": "Brier score",
}  # fmt: skip
_MOST_SCORES = 3
_MOST_LAYERS = 6


def draw_histogram(block: Block) -> Figure:
    """The ratios of all layers, stacked, with a line at the threshold of each fraction."""
    figure, ((axes,),) = grid(1, heights=[3.4], width=5.6)
    _draw_ratios(axes, block)
    return figure


def draw_curve(block: Block) -> Figure:
    """Up to three scores against the share removed, each in axes of its own."""
    names = _shown_scores(block)
    figure, columns = grid(len(names), heights=[2.6])
    for name, (axes,) in zip(names, columns, strict=True):
        _draw_score(axes, block, name)
    return figure


def draw_all(block: Block) -> Figure:
    """The histogram and the scores in one figure.

    Args:
        block: The plain numbers of a curve.

    Example:
        >>> layer = {"name": "weight", "total": 4, "median": 1.0, "counts": [2, 2]}
        >>> figure = draw_all({
        ...     "unit": "weight", "scope": "global", "total": 4, "score_names": ["nll"],
        ...     "results": [{"fraction": 0.5, "threshold": 0.9, "scores": {"nll": 0.1}}],
        ...     "histogram": {"log10_edges": [-1.0, 0.0, 1.0], "counts": [2, 2], "below": 0,
        ...                   "above": 0, "zero": 0, "layers": [layer]}})
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['weights in a bin', 'NLL']
    """
    names = _shown_scores(block)
    figure, ((first,), *others) = grid(1 + len(names), heights=[2.9], width=4.8, columns=2)
    _draw_ratios(first, block)
    for name, (axes,) in zip(names, others, strict=True):
        _draw_score(axes, block, name)
    return figure


def _shown_scores(block: Block) -> list[str]:
    known = [name for name in _LABELS if name in block["score_names"]]
    return [*known, *(n for n in block["score_names"] if n not in known)][:_MOST_SCORES]


def _draw_ratios(axes: Axes, block: Block) -> None:
    """A stack of layers; thresholds that would lie on each other are left out, smaller first."""
    histogram = block["histogram"]
    edges = as_array(histogram["log10_edges"])
    heights = np.zeros(len(edges) - 1)
    layers = _largest(histogram["layers"])
    for (name, counts), colour in zip(layers.items(), colours(len(layers)), strict=True):
        axes.stairs(heights + counts, edges, baseline=heights, fill=True, color=colour, alpha=0.55,
                    label=plain(name))  # fmt: skip
        heights = heights + counts
    axes.stairs(heights, edges, color="#5b6472", lw=0.8)
    if len(layers) > 1:
        axes.legend(frameon=False, fontsize=7, loc="best", handlelength=1.2)
    top = 1.28 * max(1.0, float(heights.max()))  # the upper quarter is for what lines are called
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, top))
    powers = np.arange(np.ceil(edges[0]), np.floor(edges[-1]) + 1)
    if len(powers) >= 2:
        axes.set_xticks(powers, [f"{10.0**power:g}" for power in powers])
    else:
        axes.xaxis.set_major_formatter(lambda value, _: f"{10.0**value:.2g}")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("signal-to-noise ratio |mean| / sd", fontsize=9)
    axes.set_ylabel(f"{_units(block)} in a bin", fontsize=9)
    if block["scope"] == "global":  # else each layer has a threshold of its own
        lines = {np.log10(r["threshold"]): r["fraction"] for r in block["results"]
                 if r["threshold"]}  # fmt: skip
        inside = [place for place in lines if edges[0] <= place <= edges[-1]]
        for place in _apart(inside, [0.034 * (edges[-1] - edges[0])] * len(inside)):
            axes.axvline(place, color="#1f2933", lw=0.9, ls="--", ymax=0.88)
            axes.text(place, 0.9 * top, percent(lines[place]), fontsize=7, ha="center",
                      rotation="vertical")  # fmt: skip
    outside = {"zero": "at zero", "below": "smaller", "above": "larger"}
    words = [f"{histogram[key]:,} {text}" for key, text in outside.items() if histogram[key]]
    if words:
        axes.set_title(f"not in view: {', '.join(words)}", fontsize=8, color=GREY)


def _largest(layers: Sequence[Block]) -> dict[str, np.ndarray]:
    """The counts of the largest layers, in the network's order, and of all others together."""
    counts = {layer["name"]: as_array(layer["counts"]) for layer in layers}
    if len(layers) <= _MOST_LAYERS:
        return counts
    largest = sorted(layers, key=lambda layer: -layer["total"])[: _MOST_LAYERS - 1]
    chosen = {layer["name"] for layer in largest}
    rest = [counts.pop(name) for name in list(counts) if name not in chosen]
    return {**counts, f"{len(rest)} other layers": np.sum(rest, axis=0)}


def _draw_score(axes: Axes, block: Block, name: str) -> None:
    """A score; the dashed line is that of the smallest fraction, by default nothing removed."""
    fractions = as_array(result["fraction"] for result in block["results"])
    values = as_array(result["scores"].get(name) for result in block["results"])
    if name == "accuracy":
        values = 100 * (1 - values)
    places = -np.log10(1 - fractions)
    axes.axhline(values[0], color=GREY, lw=1, ls="--", zorder=1)
    axes.plot(places, values, "o-", color=INSIDE, lw=1.5, ms=4)
    known = values[np.isfinite(values)]
    if known.size and known.min() > 0 and known.max() > 20 * known.min():
        axes.set_yscale("log")
    elif known.size:
        middle, half = (known.min() + known.max()) / 2, 0.025 * np.abs(known).max()
        if known.max() - known.min() < 2 * half:
            # else noise in the last digit would fill the axes and look like a change
            axes.set_ylim(middle - half, middle + half)
        axes.ticklabel_format(axis="y", useOffset=False)
    width = max(float(places[-1] - places[0]), 0.3)
    axes.set_xlim(places[0] - 0.05 * width, places[-1] + 0.05 * width)
    labels = [percent(fraction).removesuffix(" %") for fraction in fractions]
    needed = [0.07 * width * (1 + max(0, len(label) - 2) / 2) for label in labels]
    shown = _apart(list(places), needed)
    axes.set_xticks(
        places, [t if at in shown else "" for at, t in zip(places, labels, strict=True)]
    )
    axes.set_xlabel(f"{_units(block)} removed (%)", fontsize=9)
    axes.set_ylabel(_LABELS.get(name, name), fontsize=9)
    axes.grid(axis="y", color=GREY, alpha=0.2, lw=0.6)


def _apart(places: Sequence[float], needed: Sequence[float]) -> list[float]:
    """Those of ascending places that have the room that they need to the next on the right."""
    shown: list[float] = []
    for place, room in zip(reversed(places), reversed(needed), strict=True):
        if not shown or shown[-1] - place >= room:
            shown.append(place)
    return shown


def _units(block: Block) -> str:
    single = block.get("single", 0)
    if block["unit"] == "weight" or (single and single == block["total"]):
        return "weights"
    return "units and weights" if single else "units"
