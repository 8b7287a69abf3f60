"""What the figures of a calibration report share: colours, a grid of axes, and shift histograms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = [
    "GREY",
    "INSIDE",
    "OUTSIDE",
    "as_array",
    "colours",
    "dashes",
    "grid",
    "middles",
    "name_lines",
    "plain",
    "series",
    "shift_figure",
    "shown",
]

Block = Mapping[str, Any]
# Told apart by people who see few colours, in this order.
PALETTE = ("#2f6db5", "#d9762b", "#1b8a5a", "#8e5ea2", "#b8860b", "#c2447a", "#3a9fbf", "#5b6472")
INSIDE, OUTSIDE, GREY = PALETTE[0], PALETTE[1], "#6b7280"
MOST_COLUMNS = 4
LONGEST_NAME = 28
LINES_BESIDE = 18
"""The entries of a legend that find room below each other beside a figure."""


def as_array(values: Iterable[float | None]) -> np.ndarray:
    """Numbers from JSON: what is null there is NaN here, which matplotlib leaves out.

    Example:
        >>> as_array([0.5, None])
        array([0.5, nan])
    """
    return np.array([math.nan if value is None else value for value in values], dtype=float)


def middles(edges: Iterable[float | None]) -> np.ndarray:
    """The middle of each bin.

    Example:
        >>> middles([0.0, 0.5, 1.0])
        array([0.25, 0.75])
    """
    values = as_array(edges)
    return (values[:-1] + values[1:]) / 2


def colours(count: int) -> list[str]:
    """One colour for each model; after the eighth they repeat.

    Example:
        >>> len(colours(10)), colours(10)[8] == colours(10)[0]
        (10, True)
    """
    return list(islice(cycle(PALETTE), count))


def plain(name: str) -> str:
    r"""A name as matplotlib shows it unchanged: without formulas, and not left out of a legend.

    The middle of a long one goes, since names often differ at their end.

    Example:
        >>> plain("$x$"), plain("_net")
        ('\\$x\\$', ' _net')
        >>> plain("a network with a very long name, run 12")
        'a network with… name, run 12'
    """
    half = LONGEST_NAME // 2
    if len(name) > LONGEST_NAME:
        name = f"{name[:half]}…{name[1 - half :]}"
    text = name.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def shown(value: float | None, digits: int = 3) -> str:
    """A number for a title, or a dash where there is none.

    Example:
        >>> shown(0.12345), shown(None)
        ('0.123', '–')
    """
    return "–" if value is None else f"{value:.{digits}f}"


def grid(
    models: int, heights: Sequence[float], width: float = 3.4, columns: int = MOST_COLUMNS
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a column of axes for each model; after the fourth a new band begins below.

    Args:
        models: How many columns are needed.
        heights: Height of each of the axes in a column, in inches.
        width: Width of a column, in inches.
        columns: The most columns side by side.

    Returns:
        The figure, and for each model its axes from top to bottom.

    Example:
        >>> figure, axes = grid(5, heights=[3.0, 1.5])
        >>> len(axes), len(axes[0]), len(figure.axes)
        (5, 2, 10)
    """
    across = min(models, columns)
    bands = math.ceil(models / across)
    figure = Figure(
        figsize=(width * across + 0.3, bands * sum(heights) + 0.3), layout="constrained"
    )
    places = figure.add_gridspec(bands * len(heights), across, height_ratios=list(heights) * bands)
    axes = []
    for model in range(models):
        band, column = divmod(model, across)
        first = band * len(heights)
        axes.append(
            [figure.add_subplot(places[first + row, column]) for row in range(len(heights))]
        )
    for each in figure.axes:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
    return figure, axes


def dashes(models: Sequence[Block]) -> dict[int, str]:
    """How the line of each model is dashed, by its id: colours that come again look different.

    Example:
        >>> models = [{"name": str(i)} for i in range(10)]
        >>> dashes(models)[id(models[0])], dashes(models)[id(models[8])]
        ('-', '--')
    """
    styles = ("-", "--", ":", "-.")
    return {
        id(block): styles[index // len(PALETTE) % len(styles)] for index, block in enumerate(models)
    }


def name_lines(axes: Axes) -> None:
    """A legend inside of the axes for few lines, beside the figure for many.

    Args:
        axes: Axes with labelled lines, in a figure with a constrained layout.
    """
    lines, labels = axes.get_legend_handles_labels()
    figure = axes.figure
    if len(lines) <= len(PALETTE) or not isinstance(figure, Figure):
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        return
    columns = math.ceil(len(lines) / LINES_BESIDE)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width + 3.2 * columns, height)
    figure.legend(
        lines, labels, frameon=False, fontsize=8, loc="outside right upper", ncols=columns
    )


def series(models: Sequence[Block], key: str) -> list[tuple[Block, str]]:
    """The models that have a part, each with its colour among all models.

    Example:
        >>> series([{"name": "a"}, {"name": "b", "fit": {}}, {"name": "c", "fit": None}], "fit")
        [({'name': 'b', 'fit': {}}, '#d9762b')]
    """
    pairs = zip(models, colours(len(models)), strict=True)
    return [(block, colour) for block, colour in pairs if block.get(key) is not None]


def shift_figure(models: Sequence[Block], score: str, label: str) -> Figure | None:
    """Histograms of one score on the report's data and on data from elsewhere.

    A column for each model, in it one histogram for each set; None if no model has any.

    Args:
        models: The models of a report.
        score: The score, a key of ``shift[name]["by"]``.
        label: What the score is called below the axis.
    """
    chosen = [block for block in models if block.get("shift")]
    if not chosen:
        return None
    names = list(dict.fromkeys(name for block in chosen for name in block["shift"]))
    figure, columns = grid(len(chosen), heights=[2.1] * len(names))
    for block, column in zip(chosen, columns, strict=True):
        for name, axes in zip(names, column, strict=True):
            _draw_shift(axes, block, name, score)
        column[-1].set_xlabel(label, fontsize=9)
    columns[0][0].legend(frameon=False, fontsize=8)
    return figure


def _draw_shift(axes: Axes, block: Block, name: str, score: str) -> None:
    part = (block["shift"].get(name) or {}).get("by", {}).get(score)
    if part is None:
        axes.set_axis_off()
        return
    edges = as_array(part["edges"])
    for key, colour, label in (
        ("inside", INSIDE, "the report's data"),
        ("outside", OUTSIDE, "from elsewhere"),
    ):
        shares = np.nan_to_num(as_array(part[key]))
        axes.stairs(shares, edges, fill=True, color=colour, alpha=0.45, label=label)
        axes.stairs(shares, edges, color=colour, lw=1)
    model, loader = plain(block["name"]), plain(name)
    between = ", " if len(model) + len(loader) <= LONGEST_NAME else ",\n"
    axes.set_title(f"{model}{between}{loader}: AUROC {shown(part['auroc'])}", fontsize=9)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
