"""A figure of a report, described once as data.

The page draws a description as SVG (``assets/plot.js``), and :mod:`lightning_bnn.report.figures`
draws the same one with matplotlib for loggers. Numbers are arrays or lists in which NaN and None
leave a mark out; text is ready to be shown.

A plot's table also is what pointing at it tells: the first column is the title, the others the
rows, and ``spans`` says over which stretch of the x axis each line of the table is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "COLOURS", "MODEL_COLOURS", "ROLES", "Axis", "BarRow", "Bars", "Figure", "Heat", "Mark",
    "Panels", "Part", "Picture", "Pictures", "Plot", "Table", "Tables", "Views", "arrays",
    "as_array", "described", "domain", "only", "spans_between", "table",
]  # fmt: skip

# On light and on dark ground. They keep apart for colour-blind eyes, and stand out by 3:1 or more.
COLOURS = {
    "blue": ("#1f66b0", "#62a8ee"),
    "orange": ("#c4560c", "#f29a4f"),
    "green": ("#0a7f62", "#41c39c"),
    "purple": ("#8148a8", "#c395e8"),
    "teal": ("#0e7a90", "#4fc0d6"),
    "brown": ("#86601a", "#d3ab5e"),
    "red": ("#c02640", "#ff7d8c"),
    "grey": ("#7a8494", "#8d97a7"),
    "ink": ("#1a2230", "#e7eaf0"),
    "soft": ("#556070", "#a3adbb"),
    "band": ("#7a849440", "#aab4c43d"),
}
MODEL_COLOURS = ("blue", "orange", "green", "purple", "teal", "brown", "red", "grey")
# What a mark's colour= may be: a role, or "model", the colour of the model that is shown.
ROLES = {
    "main": "blue", "right": "blue", "wrong": "orange", "epistemic": "purple", "aleatoric": "teal",
    "bad": "red", "muted": "grey", "ink": "ink", "total": "soft", "band": "band",
}  # fmt: skip


def as_array(values: Any) -> NDArray[np.float64]:
    """Numbers as floats: what is None, as in JSON, is NaN, which no drawing shows.

    Example:
        >>> as_array([0.5, None])
        array([0.5, nan])
    """
    return np.array(list(values), dtype=np.float64)


def arrays(data: Mapping[str, Any], *names: str) -> list[NDArray[np.float64]]:
    """Some lists of a dictionary as arrays.

    Example:
        >>> arrays({"x": [1, 2], "y": [None, 3]}, "x", "y")
        [array([1., 2.]), array([nan,  3.])]
    """
    return [as_array(data[name]) for name in names]


def only(values: ArrayLike, chosen: ArrayLike) -> NDArray[np.float64]:
    """The values where a condition holds, and NaN elsewhere.

    Example:
        >>> only([1.0, 2.0], [False, True])
        array([nan,  2.])
    """
    return np.where(chosen, np.asarray(values, np.float64), np.nan)


def domain(values: Any, zero: bool = False, air: float = 0.04) -> tuple[float, float]:
    """A range of an axis that holds the values and is never empty, with a little air.

    Args:
        values: Numbers; None and NaN do not count.
        zero: Whether it begins at zero, where there is no air.
        air: As a share of the range.

    Example:
        >>> domain([0.0, 10.0], zero=True, air=0.1), domain([])
        ((0.0, 11.0), (-0.04, 1.04))
    """
    known = as_array(values)
    known = known[np.isfinite(known)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # a single value
        half = abs(low) / 2 or 0.5
        low, high = (0.0, high or 1.0) if zero else (low - half, high + half)
    extra = air * (high - low)
    return (0.0 if zero and low == 0 else low - extra, high + extra)


def spans_between(
    places: Any, limits: tuple[float, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Stretches of an axis around ascending places, each up to half way to its neighbours.

    Example:
        >>> spans_between([1.0, 3.0], (0, 4))
        (array([0., 2.]), array([2., 4.]))
    """
    at = as_array(places)
    middles = (at[:-1] + at[1:]) / 2
    return np.append(limits[0], middles), np.append(middles, limits[1])


# ------------------------------------------------------------------ descriptions


@dataclass
class Axis:
    """An axis of a plot.

    Attributes:
        label: Its name.
        domain: Where it begins and ends.
        format: How ticks are written: None for numbers, "count", "percent", "power" (of ten) or
            "removed" (a place p stands for the share 1 - 10^-p).
        ticks: Where ticks are; None lets the drawer choose.
    """

    label: str
    domain: tuple[float, float] = (0.0, 1.0)
    format: str | None = None
    ticks: Sequence[float] | None = None


@dataclass
class Mark:
    """Marks of one kind in a plot.

    Attributes:
        kind: "line" (x, y); "area" between y and y2; "bars" and "boxes" from x to x2 and from y to
            y2, without air between boxes; "steps", a histogram with the edges x and the heights y;
            "dots" and "rings" at (x, y); "stems" and "ranges" from y to y2, thin and wide; "rules"
            through the whole height at x.
        x: Places on the x axis.
        y: Places on the y axis.
        x2: Where bars end.
        y2: Where bars, areas, stems and ranges end.
        label: Its entry in the legend, where it can be switched off; none if empty.
        key: Marks of one key are switched together.
        colour: One of ROLES, or "model".
        style: "dashed", "thin", "thick", "pale" or "strong", some of them with blanks between.
        weight: For dots their size, for bars their opacity, as shares of the largest.
        text: For rules, what is written beside each.
        shared: Whether the same marks of the other models are drawn too: "models" in their
            colours, "muted" in grey.
    """

    kind: Literal[
        "line", "area", "bars", "boxes", "steps", "dots", "rings", "stems", "ranges", "rules"
    ]  # fmt: skip
    x: Any = None
    y: Any = None
    x2: Any = None
    y2: Any = None
    label: str = ""
    key: str = ""
    colour: str = "main"
    style: str = ""
    weight: Any = None
    text: Sequence[str] | None = None
    shared: str = ""


@dataclass
class Table:
    """A table of text: its heading, its rows, a sentence below."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    chosen: int | None = None


def table(columns: Mapping[str, Iterable[str]], note: str = "") -> Table:
    """A table from its columns.

    Example:
        >>> table({"x": "ab", "y": "cd"}).rows
        [('a', 'c'), ('b', 'd')]
    """
    return Table(list(columns), list(zip(*columns.values(), strict=True)), note)


@dataclass
class Figure:
    """What every figure has.

    Attributes:
        id: Its name in the page, unique.
        title: Its heading.
        read: One or two sentences on how to read it.
        note: A further one.
        wide: Whether it takes the whole width.
        logged: Whether loggers get it too.
        table: The same numbers as a table.
        scores: A small table that stands above the drawing.
    """

    kind: ClassVar[str] = ""
    id: str
    title: str
    read: str = ""
    note: str = ""
    wide: bool = False
    logged: bool = True
    table: Table | None = None
    scores: Table | None = None


@dataclass
class Plot(Figure):
    """Marks over two numeric axes.

    Attributes:
        x: The horizontal axis.
        y: The vertical axis.
        marks: What is drawn, the first below.
        spans: Where on the x axis each line of the table is told: from and to.
        aspect: Height over width.

    Example:
        >>> figure = Plot("trend", "Trend", "It should rise.", x=Axis("x", (0, 2)),
        ...               y=Axis("y", (0, 4)), marks=[Mark("line", [0, 1, 2], [0, 1, 4])])
        >>> described(figure)["marks"][0]["y"]
        [0.0, 1.0, 4.0]
    """

    kind = "plot"
    x: Axis = field(default_factory=lambda: Axis("x"))
    y: Axis = field(default_factory=lambda: Axis("y"))
    marks: Sequence[Mark] = ()
    spans: tuple[Any, Any] | None = None
    aspect: float = 0.62


@dataclass
class Part:
    """A piece of a lying bar; ``lane`` 0 or 1 puts it into the upper or lower half."""

    start: float | None
    end: float | None
    text: str = ""
    label: str = ""
    key: str = ""
    colour: str = "main"
    lane: int | None = None


@dataclass
class BarRow:
    """A lying bar: its name on the left, a number on the right, its parts between."""

    name: str
    text: str
    parts: Sequence[Part]
    title: str = ""
    strong: bool = False
    line: float | None = None


@dataclass
class Bars(Figure):
    """Lying bars: sums, pairs and shares.

    Attributes:
        rows: From top to bottom.
        domain: Where the scale begins and ends.
        step: Height of a row in pixels.
    """

    kind = "bars"
    rows: Sequence[BarRow] = ()
    domain: tuple[float, float] = (0.0, 1.0)
    step: int = 30


@dataclass
class Heat(Figure):
    """A square matrix of counts, right on its diagonal."""

    kind = "heat"
    names: Sequence[str] = ()
    matrix: Sequence[Sequence[int]] = ()
    x_label: str = ""
    y_label: str = ""


@dataclass
class Picture:
    """An example with its picture (a data URI), or without."""

    name: str
    image: str | None
    right: bool
    says: str
    small: str
    rows: Sequence[tuple[str, str]]
    but: str = ""


@dataclass
class Pictures(Figure):
    """Examples with their pictures."""

    kind = "pictures"
    pictures: Sequence[Picture] = ()


@dataclass
class Tables(Figure):
    """A table as a figure of its own, with a further one to unfold."""

    kind = "tables"
    more: str = ""
    further: Table | None = None


@dataclass
class Panels(Figure):
    """Several plots in one figure, with one legend."""

    kind = "panels"
    panels: Sequence[Plot] = ()


@dataclass
class Views(Figure):
    """One figure of several, chosen by a switch; ``views`` has labels and figures of one kind.

    Figures of the same ``switch`` change together.
    """

    kind = "views"
    switch: str = ""
    views: Mapping[str, Figure] = field(default_factory=dict)


def described(value: Any) -> Any:
    """A description as JSON holds it: only what is not the default.

    Places of marks are rounded to a ten-thousandth of their axis, and a view has only what sets it
    apart from the first one, so that a page stays light.
    """
    if is_dataclass(value):
        kept = {each.name: getattr(value, each.name) for each in fields(value)}
        made: dict[str, Any] = {"kind": value.kind} if isinstance(value, Figure) else {}
        made |= {name: described(part) for name, part in kept.items() if not _is_empty(part)}
        if isinstance(value, Views):
            first = next(iter(made["views"].values()))
            others = [
                [label, {name: part for name, part in view.items() if first.get(name) != part}]
                for label, view in list(made["views"].items())[1:]
            ]
            made["views"] = [[next(iter(made["views"])), first], *others]
        if isinstance(value, Plot):
            digits = {"x": _decimals(value.x.domain), "y": _decimals(value.y.domain)}
            for mark, given in zip(made.get("marks", ()), value.marks, strict=True):
                for name in ("x", "y", "x2", "y2"):
                    if getattr(given, name) is not None:
                        mark[name] = _rounded(getattr(given, name), digits[name[0]])
            if value.spans is not None:
                made["spans"] = [_rounded(ends, digits["x"]) for ends in value.spans]
        return made
    if isinstance(value, Mapping):
        return {name: described(part) for name, part in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [described(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _is_empty(part: Any) -> bool:
    return (
        part is None or part is False or (isinstance(part, str | list | tuple | dict) and not part)
    )


def _decimals(limits: tuple[float, float]) -> int:
    return 4 - math.floor(math.log10(max(abs(limits[1] - limits[0]), 1e-300)))


def _rounded(values: Any, decimals: int) -> list[float | None]:
    return [round(v, decimals) if math.isfinite(v) else None for v in as_array(values).tolist()]
