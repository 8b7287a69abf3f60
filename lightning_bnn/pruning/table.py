"""The table of a pruning curve, in plain text and at most 100 columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["align", "curve_table"]

WIDTH = 100
_THRESHOLDS = {"global": "one threshold for all layers", "layer": "the same share of each layer"}
_UNITS = {"weight": "weights", "channel": "units"}


def curve_table(block: Mapping[str, Any]) -> str:
    """A row for each fraction: what is left, each score, and its difference from the first row.

    Differences are left out where the table would be wider than 100 columns.

    Args:
        block: The plain numbers of a curve.

    Example:
        >>> block = {"unit": "weight", "scope": "global", "total": 4, "protected": 0,
        ...     "score_names": ["nll"], "results": [
        ...         {"fraction": 0.0, "remaining": 4, "threshold": None, "scores": {"nll": 0.5}},
        ...         {"fraction": 0.5, "remaining": 2, "threshold": 0.25, "scores": {"nll": 0.75}}]}
        >>> print(curve_table(block))
        4 weights by signal-to-noise ratio, one threshold for all layers
        removed  left  ratio up to     nll
            0 %     4            –  0.5000
           50 %     2         0.25  0.7500  +0.2500
    """
    results = block["results"]
    columns = [
        _column("removed", [f"{100 * result['fraction']:.6g} %" for result in results]),
        _column("left", [f"{result['remaining']:,}" for result in results]),
        _column("ratio up to", [_threshold(result["threshold"]) for result in results]),
    ]
    scores = {
        name: [result["scores"].get(name) for result in results] for name in block["score_names"]
    }
    for differences in (True, False):
        rows = _join([*columns, *_score_columns(scores, differences)])
        if max(map(len, rows)) <= WIDTH:
            break
    return "\n".join([_title(block), *rows])


def align(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells below their headings, the first column to the left and the others to the right.

    Example:
        >>> print(align(("layer", "left"), [("0.weight", "5"), ("1.weight", "12")]))
        layer     left
        0.weight     5
        1.weight    12
    """
    first, *others = zip(headings, *rows, strict=True)
    width = max(map(len, first))
    columns = [[cell.ljust(width) for cell in first]]
    return "\n".join(_join([*columns, *(_column(heading, cells) for heading, *cells in others)]))


def _title(block: Mapping[str, Any]) -> str:
    single = block.get("single", 0)
    counts = [(block["total"] - single, _UNITS[block["unit"]]), (single, "single weights")]
    what = " and ".join(f"{count:,} {noun}" for count, noun in counts if count)
    text = f"{what} by signal-to-noise ratio, {_THRESHOLDS[block['scope']]}"
    return f"{text}; {block['protected']:,} more are protected" if block["protected"] else text


def _score_columns(
    scores: Mapping[str, Sequence[float | None]], differences: bool
) -> list[list[str]]:
    columns = []
    for name, values in scores.items():
        shape = _shape(values)
        columns.append(_column(name, [_number(value, shape) for value in values]))
        if differences and len(values) > 1:
            first = values[0]
            changes = ["" if first is None else _change(v, first, shape) for v in values[1:]]
            columns.append(_column("", ["", *changes]))
    return columns


def _shape(values: Sequence[float | None]) -> str:
    """How the numbers of a column are written: about five digits, at most four after the point."""
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    if largest >= 1e6:
        return ".4g"
    before = len(str(int(largest)))
    return f".{max(0, 5 - before)}f"


def _number(value: float | None, shape: str) -> str:
    return "–" if value is None else format(value, shape)


def _change(value: float | None, first: float, shape: str) -> str:
    return "" if value is None else format(value - first, f"+{shape}")


def _threshold(value: float | None) -> str:
    return "–" if value is None or not math.isfinite(value) else f"{value:.3g}"


def _column(heading: str, cells: Sequence[str]) -> list[str]:
    """The heading and the cells, aligned to the right."""
    width = max(map(len, (heading, *cells)))
    return [text.rjust(width) for text in (heading, *cells)]


def _join(columns: Sequence[Sequence[str]]) -> list[str]:
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
