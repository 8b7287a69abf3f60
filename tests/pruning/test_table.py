"""The lines of a table, as they are read: columns, differences and the width of a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_bnn.pruning.table import WIDTH, align, curve_table

Rows = list[tuple[float, int, float | None, dict[str, float | None]]]


def block(rows: Rows, **changes: Any) -> dict[str, Any]:
    """The plain numbers of a curve: fraction, how many are left, threshold and scores."""
    results = [
        {"fraction": fraction, "remaining": left, "threshold": threshold, "scores": scores}
        for fraction, left, threshold, scores in rows
    ]
    return {
        "unit": "weight", "scope": "global", "total": rows[0][1], "protected": 0,
        "score_names": list(rows[0][3]), "results": results, **changes,
    }  # fmt: skip


def column(values: Mapping[float, float | None]) -> list[str]:
    """How a score is printed at some shares, without its differences."""
    rows: Rows = [(share, 1, None, {"score": value}) for share, value in values.items()]
    return [line.split()[4] for line in curve_table(block(rows)).splitlines()[2:]]


def test_a_table_of_two_scores() -> None:
    rows: Rows = [
        (0.0, 12345, None, {"accuracy": 0.9, "nll": 12.5}),
        (0.5, 6173, 0.0123456, {"accuracy": 0.95, "nll": 12.25}),
        (0.995, 62, 123.456, {"accuracy": 0.1, "nll": 112.5}),
    ]
    assert curve_table(block(rows)).splitlines() == [
        "12,345 weights by signal-to-noise ratio, one threshold for all layers",
        "removed    left  ratio up to  accuracy              nll",
        "    0 %  12,345            –    0.9000            12.50",
        "   50 %   6,173       0.0123    0.9500  +0.0500   12.25    -0.25",
        " 99.5 %      62          123    0.1000  -0.8000  112.50  +100.00",
    ]


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({}, "4 weights by signal-to-noise ratio, one threshold for all layers"),
        ({"unit": "channel"}, "4 units by signal-to-noise ratio, one threshold for all layers"),
        ({"scope": "layer"}, "4 weights by signal-to-noise ratio, the same share of each layer"),
        (
            {"protected": 1200, "total": 5000},
            "5,000 weights by signal-to-noise ratio, one threshold for all layers; 1,200 more are "
            "protected",
        ),
    ],
)
def test_the_title_says_what_was_counted(changes: dict[str, Any], title: str) -> None:
    text = curve_table(block([(0.0, 4, None, {"nll": 0.5})], **changes))
    assert text.splitlines()[0] == title


def test_the_first_row_has_no_difference_and_a_single_row_no_column_for_it() -> None:
    text = curve_table(block([(0.5, 2, 0.25, {"nll": 0.5, "ece": 0.25})]))
    assert text.splitlines()[1:] == [
        "removed  left  ratio up to     nll     ece",
        "   50 %     2         0.25  0.5000  0.2500",
    ]


def test_scores_that_are_missing_leave_their_places_empty() -> None:
    rows: Rows = [
        (0.0, 4, None, {"nll": 0.5, "ece": None}),
        (0.25, 3, 0.1, {"nll": None, "ece": 0.25}),
        (0.5, 2, float("inf"), {"nll": 0.75, "ece": 0.5}),
        (0.75, 1, 9.0, {"nll": 0.75}),
    ]
    assert [line.split() for line in curve_table(block(rows)).splitlines()[2:]] == [
        ["0", "%", "4", "–", "0.5000", "–"],
        ["25", "%", "3", "0.1", "–", "0.2500"],  # what is missing has no difference
        ["50", "%", "2", "–", "0.7500", "+0.2500", "0.5000"],  # nor does what has no first
        ["75", "%", "1", "9", "0.7500", "+0.2500", "–"],
    ]


@pytest.mark.parametrize(
    ("values", "printed"),
    [
        ((0.123456, -0.5), ["0.1235", "-0.5000"]),
        ((1.23456, 9.87654), ["1.2346", "9.8765"]),
        ((1.23456, 12.3456), ["1.235", "12.346"]),  # as many places in each row
        ((1.0, -1234.567), ["1.0", "-1234.6"]),
        ((1.0, 123456.7), ["1", "123457"]),
        ((0.5, 1234567.0), ["0.5", "1.235e+06"]),
        ((None, None), ["–", "–"]),
    ],
)
def test_about_five_digits_are_shown(
    values: tuple[float | None, float | None], printed: list[str]
) -> None:
    assert column(dict(zip((0.0, 0.5), values, strict=True))) == printed


def test_shares_are_written_in_full() -> None:
    rows: Rows = [(share, 1, None, {"nll": 0.0}) for share in (0.07, 0.29, 1 / 3, 0.9999)]
    shown = [line.split(" %")[0].strip() for line in curve_table(block(rows)).splitlines()[2:]]
    assert shown == ["7", "29", "33.3333", "99.99"]


def test_differences_are_left_out_where_the_table_would_be_too_wide() -> None:
    def table(scores: int) -> list[str]:
        rows: Rows = [
            (share, 1, None, {f"score {i}": share for i in range(scores)}) for share in (0.0, 0.5)
        ]
        return curve_table(block(rows)).splitlines()

    # three columns of 26 characters, then for each score 2 + 7 and for its difference 2 + 7
    narrow, wide = table(4), table(5)
    assert narrow[-1].count("+0.5000") == 4
    assert max(map(len, narrow[1:])) == 26 + 4 * (2 + 7 + 2 + 7) <= WIDTH
    assert "+" not in wide[-1]
    assert wide[-1].count("0.5000") == 5
    assert max(map(len, wide[1:])) == 26 + 5 * (2 + 7)
    assert len(max(table(12), key=len)) > WIDTH  # every score is shown, whatever the width


def test_no_line_ends_in_spaces() -> None:
    rows: Rows = [(0.0, 1, None, {"nll": None}), (0.5, 1, None, {"nll": None})]
    for line in curve_table(block(rows)).splitlines():
        assert line == line.rstrip()


def test_cells_lie_below_their_headings() -> None:
    rows = [("a.long.name", "5", "1.00%"), ("b", "1,234", "")]
    assert align(("layer", "left", "removed"), rows).splitlines() == [
        "layer         left  removed",
        "a.long.name      5    1.00%",
        "b            1,234",
    ]
    assert align(("layer", "left"), []) == "layer  left"


def test_a_row_without_a_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        align(("layer", "left"), [("a", "1"), ("b",)])
