from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from lightning_bnn.launch.rows import Row
from lightning_bnn.launch.table import node_name, rich_table

NODE = "3f2a91c0" * 7
POD = "raycluster-kuberay-workergroup-worker-"
ROWS = [
    Row((0, 1, 2, 3, 4), "done", "gpu-1.example", NODE, "gpu 0", 12000, 12000, 0.31234, 1, 3600.0,
        diverged=(2,)),
    Row((5, 6, 7, 8, 9), "training", "gpu-1.example", NODE, "gpu 1", 11234, 12000, 0.4123, 1,
        3500.0, 230.0, 2.1),
    Row((10, 11, 12, 13, 14), "silent", POD + "7sjqm", "aa" * 28, "gpu 3", 512, 12000, 1.2345e5, 2,
        800.0, None, 185.0),
    Row((15, 16), "failed", POD + "9xkqz", "bb" * 28, "gpu 3", 512, 12000, None, 4, 800.0, None,
        185.0, error="ValueError: 3 columns were expected; got 5\nand more"),
    Row((17,), "starting", "ip-10-0-12-34", "cc" * 28, "cpu", attempt=1, seconds=3.0, age=1.0),
    Row((18,), "queued"),
    Row((19,), "saving", "10.0.0.1", "dd" * 28, "cpu", 900, None, 0.5, 1, 33.0, None, 3.0),
    Row((20,), "diverged", "10.0.0.1", "dd" * 28, "cpu", 900, 900, None, 1, 33.0, diverged=(20,)),
]  # fmt: skip


def printed(rows: list[Row], width: int, **options: Any) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(rich_table(rows, **options))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def cells(lines: list[str]) -> dict[str, dict[str, str]]:
    """The cells of a table by member and heading, which are two spaces apart."""
    start = next(number for number, line in enumerate(lines) if line.startswith("member "))
    names = re.split(r"\s{2,}", lines[start])
    found = {}
    for line in lines[start + 1 :]:
        texts = re.split(r"\s{2,}", line)
        if len(texts) == len(names):
            found[texts[0]] = dict(zip(names, texts, strict=True))
    return found


MEMBERS = ["0-4", "5-9", "10-14", "15-16", "17", "18", "19", "20"]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
def test_a_row_is_one_line_and_its_numbers_are_whole(width: int) -> None:
    lines = printed(ROWS, width)
    assert max(map(len, lines)) <= width
    table = cells(lines)
    assert list(table) == MEMBERS
    assert table["5-9"]["state"] == "training"
    assert table["5-9"]["step"] == "11,234/12,000"
    assert table["10-14"]["state"] == "silent 3 min"
    assert table["0-4"]["state"] == "done, 1 diverged"
    assert table["15-16"]["state"] == "failed"
    if width >= 60:
        assert [table[member]["loss"] for member in MEMBERS[:4]] == [
            "0.3123", "0.4123", "1.234e+05", "-",
        ]  # fmt: skip
        assert table["5-9"]["ETA"] == "4 min"


@pytest.mark.parametrize("width", [1, 2, 10, 25])
def test_no_screen_is_too_narrow(width: int) -> None:
    assert max(map(len, printed(ROWS, width))) <= width


def test_a_wide_screen_shows_everything() -> None:
    table = cells(printed(ROWS, 140))
    assert table["5-9"] == {
        "member": "5-9", "state": "training", "node": "gpu-1", "device": "gpu 1",
        "step": "11,234/12,000", "loss": "0.4123", "attempt": "1", "time": "58 min",
        "ETA": "4 min", "last sign": "2 s ago",
    }  # fmt: skip
    assert table["18"] == {
        "member": "18", "state": "queued", "node": "-", "device": "-", "step": "-", "loss": "-",
        "attempt": "-", "time": "-", "ETA": "-", "last sign": "-",
    }  # fmt: skip
    assert table["19"]["step"] == "900"
    assert table["10-14"]["node"] == POD + "7sjqm"


def test_ordinary_rows_have_all_that_was_promised_on_80_columns() -> None:
    rows = [Row((0,), "training", "gpu-node-12", NODE, "gpu 7", 123456, 200000, 0.4123, 1, 3500.0,
                2300.0, 2.1)]  # fmt: skip
    promised = {"member", "state", "node", "device", "step", "loss", "attempt", "ETA"}
    assert promised <= set(cells(printed(rows, 80))["0"])


def test_a_long_node_name_keeps_its_ends_before_columns_go() -> None:
    rows = [Row((0,), "training", POD + "7sjqm", NODE, "cpu", 5, 10, 0.5, 1, 5.0, 5.0, 1.0)]
    row = cells(printed(rows, 90))["0"]
    assert row["last sign"] == "1 s ago"
    assert row["node"].startswith("ray")
    assert row["node"].endswith("-7sjqm")
    assert ".." in row["node"]


def test_a_failure_is_explained_below_in_its_first_line() -> None:
    lines = printed(ROWS, 100)
    assert "members 15-16 failed: ValueError: 3 columns were expected; got 5" in lines
    assert not any("and more" in line for line in lines)
    many = [Row((number,), "failed", error=f"error {number}") for number in range(9)]
    assert printed(many, 100)[-2:] == ["member 2 failed: error 2", "and 6 more errors"]


def test_a_long_error_takes_two_lines_at_most() -> None:
    lines = printed([Row((0,), "failed", error="ValueError: " + "many words " * 40)], 60)
    assert len(lines) == 3 + 2
    assert lines[3].startswith("member 0 failed: ValueError: many words")


def test_the_summary_and_the_note_come_first() -> None:
    lines = printed(ROWS, 140, note="The storage is away.")
    assert lines[0] == (
        "4 of 21 members done, 7 running, 1 queued, 5 silent, 2 failed, 2 diverged, ETA 60 min"
    )
    assert lines[1] == "The storage is away."


def test_of_many_units_those_that_run_or_failed_are_shown_and_the_rest_is_counted() -> None:
    rows = [Row((number,), "done", "a") for number in range(960)]
    rows += [Row((number,), "queued") for number in range(960, 990)]
    rows += [Row((number,), "training", "a") for number in range(990, 998)]
    rows += [Row((998,), "failed", "a"), Row((999,), "silent", "a")]
    lines = printed(rows, 80)
    table = cells(lines)
    assert len(table) == 40
    assert list(table)[:10] == ["998", "999", *map(str, range(990, 998))]
    assert {row["state"] for row in list(table.values())[10:]} == {"done"}
    assert lines[-1] == "and 930 done, 30 queued"


def test_few_units_stay_in_their_order() -> None:
    rows = [Row((0,), "done"), Row((1,), "training"), Row((2,), "done")]
    assert list(cells(printed(rows, 80, most=3))) == ["0", "1", "2"]
    lines = printed(rows, 80, most=2)
    assert list(cells(lines)) == ["1", "0"]
    assert lines[-1] == "and 1 done"


def test_the_rest_is_counted_in_members() -> None:
    rows = [Row((0, 1, 2, 3), "training"), Row((4, 5, 6, 7), "queued")]
    assert printed(rows, 80, most=1)[-1] == "and 4 queued"


def test_two_nodes_of_one_machine_are_told_apart() -> None:
    rows = [Row((0,), "done", "a", "3f2a91"), Row((1,), "done", "a", "77cc91"),
            Row((2,), "done", "b", "001122"), Row((3,), "done", None, "99aabbccdd")]  # fmt: skip
    table = cells(printed(rows, 120))
    assert [row["node"] for row in table.values()] == ["a/3f2a", "a/77cc", "b", "99aabbcc"]


def test_an_address_is_not_cut_at_its_dots() -> None:
    assert node_name("10.0.0.1", None) == "10.0.0.1"


def test_states_are_words_with_and_without_colours() -> None:
    file = io.StringIO()
    console = Console(file=file, width=140, force_terminal=True, color_system="standard")
    console.print(rich_table(ROWS))
    coloured = file.getvalue()
    assert "\x1b[" in coloured
    bare = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()]
    assert bare == printed(ROWS, 140)


def test_a_stream_of_ascii_can_be_written_to() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    rows = [*ROWS, Row((21,), "failed", error="ValueError: σ has to be positive [bold]")]
    Console(file=file, width=80).print(rich_table(rows))
    file.flush()
    assert b"member 21 failed: ValueError: ? has to be positive [bold]" in raw.getvalue()


def test_a_run_without_units_left_to_show() -> None:
    assert printed([], 80) == ["0 of 0 members done"]
