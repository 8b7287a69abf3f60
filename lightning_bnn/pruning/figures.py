"""The figures of pruning: the histogram of the ratios, and the scores against the share removed.

All are drawn from plain numbers, those of :meth:`lightning_bnn.pruning.PruneCurve.to_dict`, in the
manner of the calibration report. The share f that is removed stands at −log10(1 − f): between 90
and 99 % lies as much room as between 0 and 90 %, because what is left falls tenfold in both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_all", "draw_curve", "draw_histogram"]

Block = Mapping[str, Any]

# Those drawn, the first three that there are: how wrong, how unlikely, how calibrated.
_SHOWN = ("accuracy", "rmse", "nll", "ece", "coverage", "crps", "brier")
_LABELS = {"accuracy": "error (%)", "rmse": "RMSE", "coverage": "coverage", "brier": "Brier score"}
_MOST_SCORES = 3
_MOST_LAYERS = 6
_LEAST_HEIGHT = 0.05
"""The height of the axes of a score that does not change, as a share of the score."""
_LOGARITHMIC_FROM = 20.0
"""A score that grows by this factor is drawn on a logarithmic axis."""


def draw_histogram(block: Block) -> Figure:
    """The ratios of all layers, stacked, with a line at the threshold of each fraction.

    Lines that would lie on each other are left out, the smaller fraction first. There are none for
    the scope "layer", where each layer has a threshold of its own.

    Args:
        block: The plain numbers of a curve.

    Example:
        >>> layer = {"name": "weight", "total": 4, "median": 1.0, "counts": [2, 2]}
        >>> figure = draw_histogram({
        ...     "unit": "weight", "scope": "global", "total": 4,
        ...     "results": [{"fraction": 0.5, "threshold": 0.9}],
        ...     "histogram": {"log10_edges": [-1.0, 0.0, 1.0], "counts": [2, 2], "below": 0,
        ...                   "above": 0, "zero": 0, "layers": [layer]}})
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['50 %']
    """
    from lightning_bnn.report.figure_style import grid

    figure, ((axes,),) = grid(1, heights=[3.4], width=5.6)
    _draw_ratios(axes, block)
    return figure


def draw_curve(block: Block) -> Figure:
    """Up to three scores against the share removed, each in axes of its own.

    The dashed line is the score of the smallest fraction, which is nothing removed by default.

    Args:
        block: The plain numbers of a curve.

    Example:
        >>> figure = draw_curve({"unit": "weight", "score_names": ["accuracy", "nll"], "results": [
        ...     {"fraction": 0.0, "scores": {"accuracy": 0.98, "nll": 0.05}},
        ...     {"fraction": 0.9, "scores": {"accuracy": 0.97, "nll": 0.06}}]})
        >>> [axes.get_ylabel() for axes in figure.axes]
        ['error (%)', 'NLL']
    """
    from lightning_bnn.report.figure_style import grid

    names = shown_scores(block)
    figure, columns = grid(len(names), heights=[2.6])
    for name, (axes,) in zip(names, columns, strict=True):
        _draw_score(axes, block, name)
    return figure


def draw_all(block: Block) -> Figure:
    """The histogram and the scores in one figure.

    Args:
        block: The plain numbers of a curve.
    """
    from lightning_bnn.report.figure_style import grid

    names = shown_scores(block)
    figure, ((first,), *others) = grid(1 + len(names), heights=[2.9], width=4.8, columns=2)
    _draw_ratios(first, block)
    for name, (axes,) in zip(names, others, strict=True):
        _draw_score(axes, block, name)
    return figure


def shown_scores(block: Block) -> list[str]:
    """The scores that a figure shows: of those that a task has, the first three.

    Example:
        >>> shown_scores({"score_names": ["accuracy", "nll", "brier", "ece"]})
        ['accuracy', 'nll', 'ece']
        >>> shown_scores({"score_names": ["my_score"]})
        ['my_score']
    """
    names = list(block["score_names"])
    known = [name for name in _SHOWN if name in names]
    return [*known, *(name for name in names if name not in known)][:_MOST_SCORES]


def _draw_ratios(axes: Axes, block: Block) -> None:
    from lightning_bnn.report.figure_style import colours, plain

    part = block["histogram"]
    edges = np.asarray(part["log10_edges"], dtype=float)
    base = np.zeros(len(edges) - 1)
    pieces = _pieces(part["layers"])
    for (name, counts), colour in zip(pieces, colours(len(pieces)), strict=True):
        label = plain(name)
        axes.stairs(base + counts, edges, baseline=base, fill=True, color=colour, alpha=0.55,
                    label=label)  # fmt: skip
        base = base + counts
    axes.stairs(base, edges, color="#5b6472", lw=0.8)
    axes.set_xlim(edges[0], edges[-1])
    # the upper quarter is for what the lines are called
    axes.set_ylim(0, 1.28 * max(1.0, float(base.max())))
    powers = np.arange(np.ceil(edges[0]), np.floor(edges[-1]) + 1)
    if len(powers) >= 2:
        axes.set_xticks(powers, [f"{10.0**power:g}" for power in powers])
    else:
        axes.xaxis.set_major_formatter(lambda value, _: f"{10.0**value:.2g}")
    axes.set_xlabel("signal-to-noise ratio |mean| / sd", fontsize=9)
    axes.set_ylabel(f"{_units(block)} in a bin", fontsize=9)
    axes.yaxis.set_major_formatter(_short)
    if len(pieces) > 1:
        axes.legend(frameon=False, fontsize=7, loc="best", handlelength=1.2)
    if block["scope"] == "global":
        _draw_thresholds(axes, block["results"])
    _say_what_is_outside(axes, part)


def _draw_thresholds(axes: Axes, results: Sequence[Block]) -> None:
    """A labelled line for each threshold within the axes that has room."""
    left, right = axes.get_xlim()
    room = 0.034 * (right - left)
    top = axes.get_ylim()[1]
    last = right + room
    for result in reversed(results):
        threshold = result["threshold"]
        place = np.log10(threshold) if threshold else -np.inf
        if not left <= place <= min(right, last - room):
            continue
        axes.axvline(place, color="#1f2933", lw=0.9, ls="--", ymax=0.88)
        axes.text(place, 0.9 * top, percent(result["fraction"]), fontsize=7, ha="center",
                  rotation="vertical")  # fmt: skip
        last = place


def _say_what_is_outside(axes: Axes, part: Block) -> None:
    words = [
        f"{part[key]:,} {text}"
        for key, text in (("zero", "at zero"), ("below", "smaller"), ("above", "larger"))
        if part[key]
    ]
    if words:
        axes.set_title(f"not in view: {', '.join(words)}", fontsize=8, color="#6b7280")


def _pieces(layers: Sequence[Block]) -> list[tuple[str, np.ndarray]]:
    """The counts of the largest layers, in the network's order, and of all others together."""
    largest = sorted(layers, key=lambda layer: -layer["total"])
    if len(layers) > _MOST_LAYERS:
        largest = largest[: _MOST_LAYERS - 1]
    chosen = {layer["name"] for layer in largest}
    found = [(x["name"], np.asarray(x["counts"], dtype=float)) for x in layers]
    kept = [(name, counts) for name, counts in found if name in chosen]
    rest = [counts for name, counts in found if name not in chosen]
    return [*kept, (f"{len(rest)} other layers", np.sum(rest, axis=0))] if rest else kept


def _draw_score(axes: Axes, block: Block, name: str) -> None:
    from lightning_bnn.report.figure_style import GREY, INSIDE, as_array

    results = block["results"]
    places = -np.log10(1 - as_array(result["fraction"] for result in results))
    values = as_array(result["scores"].get(name) for result in results)
    if name == "accuracy":
        values = 100 * (1 - values)
    axes.axhline(values[0], color=GREY, lw=1, ls="--", zorder=1)
    axes.plot(places, values, "o-", color=INSIDE, lw=1.5, ms=4)
    _scale(axes, values[np.isfinite(values)])
    width = max(float(places[-1] - places[0]), 0.3)
    axes.set_xlim(places[0] - 0.05 * width, places[-1] + 0.05 * width)
    axes.set_xticks(places, _tick_labels(places, [result["fraction"] for result in results]))
    axes.set_xlabel(f"{_units(block)} removed (%)", fontsize=9)
    axes.set_ylabel(_LABELS.get(name, name.upper() if name in _SHOWN else name), fontsize=9)
    axes.grid(axis="y", color=GREY, alpha=0.2, lw=0.6)


def _scale(axes: Axes, values: np.ndarray) -> None:
    """A logarithmic axis for a score that grows much; a wide one for a score that hardly moves."""
    if not values.size:
        return
    low, high = float(values.min()), float(values.max())
    if low > 0 and high > _LOGARITHMIC_FROM * low:
        axes.set_yscale("log")
        return
    # else noise in the last digit would fill the axes and look like a change
    least = _LEAST_HEIGHT * max(abs(low), abs(high))
    if high - low < least:
        axes.set_ylim((low + high - least) / 2, (low + high + least) / 2)
    axes.ticklabel_format(axis="y", useOffset=False)


def _tick_labels(places: np.ndarray, fractions: Sequence[float]) -> list[str]:
    """The shares in percent; nothing where a label would lie on that to its right."""
    room = 0.07 * float(places[-1] - places[0])
    labels = []
    last = np.inf
    for place, fraction in zip(places[::-1], fractions[::-1], strict=True):
        text = percent(fraction).removesuffix(" %")
        free = last - place >= room * (1 + max(0, len(text) - 2) / 2)
        labels.append(text if free else "")
        last = place if free else last
    return labels[::-1]


def percent(fraction: float) -> str:
    """A share in percent, with as many digits as it takes.

    Example:
        >>> percent(0.5), percent(0.995), percent(0.99)
        ('50 %', '99.5 %', '99 %')
    """
    return f"{100 * fraction:.6g} %"


def _units(block: Block) -> str:
    single = block.get("single", 0)
    if block["unit"] == "weight" or (single and single == block["total"]):
        return "weights"
    return "units and weights" if single else "units"


def _short(value: float, _: Any) -> str:
    """Large counts in thousands or millions, so that the axis stays narrow."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
