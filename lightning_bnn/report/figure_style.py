"""What figures of matplotlib share: the palette, names, and a grid of axes without pyplot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_bnn.report.figure import COLOURS, MODEL_COLOURS, as_array

__all__ = ["GREY", "INSIDE", "as_array", "colours", "grid", "plain"]

INSIDE, GREY = COLOURS["blue"][0], COLOURS["grey"][0]
MOST_COLUMNS = 4
LONGEST_NAME = 28


def colours(count: int) -> list[str]:
    """One colour for each model; after the eighth they repeat.

    Example:
        >>> len(colours(10)), colours(10)[8] == colours(10)[0]
        (10, True)
    """
    return list(islice(cycle(COLOURS[name][0] for name in MODEL_COLOURS), count))


def plain(name: str, longest: int = LONGEST_NAME) -> str:
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
