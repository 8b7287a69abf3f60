"""Rows, summary, table and live display of runs: made up one record at a time, and launched."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_bnn.commands.status import rows_as_json
from lightning_bnn.launch import LaunchedRun, MemberResult, StoredRun, launch
from lightning_bnn.launch.progress import (
    SILENT_AFTER,
    Row,
    RunDisplay,
    result_line,
    run_eta,
    run_rows,
    run_table,
    summary_line,
)
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from tests.launch.faults import wait_for
from tests.launch.programs import make_data, make_ensemble
from tests.launch.simulated import Threads

NOW = 1_000_000.0
NODE = "3f2a91c0" * 7


def begin(storage: Any, units: list[list[int]]) -> RunRecords:
    records = RunRecords(storage)
    records.begin({"units": units, "seed": 0})
    return records


def tell(records: RunRecords, unit: Unit, **facts: Any) -> None:
    """What an attempt would tell after 10 s and 20 steps of training."""
    told = {
        "attempt": 1, "phase": "training", "host": "box.example", "node": NODE, "device": "gpu 3",
        "started": NOW - 15, "first": [NOW - 10, 0], "time": NOW, "step": 20, "steps": 50,
        "loss": 0.5,
    }  # fmt: skip
    records.put_progress(unit, {**told, **facts})


def commit(
    records: RunRecords, unit: Unit, left: list[int] | None = None, attempt: int = 1
) -> None:
    """What an attempt would commit, with posteriors of those members that are left."""
    left = list(unit.members) if left is None else left
    places = {str(id): {"place": f"attempt-0001/posterior-{id:05d}"} for id in left}
    records.grant(unit, attempt)
    result = {
        "members": {"posterior": places}, "attempt": attempt, "steps": 50, "seconds": 42.0,
        "metrics": {"train_loss": 0.25, "val_nll": 0.125}, "node": NODE, "device": "gpu 3",
        "host": "box.example",
    }  # fmt: skip
    records.commit(unit, attempt, result)


UNIT = Unit((0, 1, 2))


@pytest.fixture
def records(tmp_path: Path) -> RunRecords:
    return begin(tmp_path, [[0, 1, 2]])


def only(records: RunRecords, now: float = NOW) -> Row:
    (row,) = run_rows(StoredRun(records.storage), now)
    return row


TOLD = {
    "host": "box.example", "node": NODE, "device": "gpu 3", "step": 20, "steps": 50, "loss": 0.5,
    "attempt": 1, "seconds": 15.0,
}  # fmt: skip
FULL = "OSError: the disk is full"
RAISED = {"phase": "failed", "error": FULL}
FAILED = {**TOLD, "state": "failed", "error": FULL}


ROWS_WITHOUT_COMMIT: dict[str, tuple[Any, ...]] = {
    # what the lease says, what the attempt tells, so much later, the row
    "no folder": (None, None, 0, {"state": "queued"}),
    "waits": ((1,), None, 0, {"state": "queued"}),
    "starting": ((1,), {"phase": "starting"}, 2, TOLD),
    "training": ((1,), {}, 2, {**TOLD, "eta": 15.0}),
    "saving": ((1,), {"phase": "saving"}, 2, TOLD),
    "silent": ((1,), {}, SILENT_AFTER + 1, TOLD),
    "given up": ((2,), {}, 500, {**TOLD, "state": "queued"}),
    "raised": ((1,), RAISED, 10, FAILED),
    "failed": ((1, FULL), None, 0, {"state": "failed", "error": FULL, "ended": True}),
    # a worker that was killed tells nothing of its end
    "killed": ((2, FULL), {}, 0, {**FAILED, "ended": True}),
    "launched again": ((3,), {"attempt": 3}, 0, {**TOLD, "state": "training", "attempt": 3,
                                                 "eta": 15.0}),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS_WITHOUT_COMMIT)
def test_the_row_of_a_unit_without_a_commit(records: RunRecords, case: str) -> None:
    lease, told, later, expected = ROWS_WITHOUT_COMMIT[case]
    if lease is not None:
        records.grant(UNIT, *lease)
    if told is not None:
        tell(records, UNIT, **told)
    age = None if told is None else later
    assert only(records, NOW + later) == Row(
        UNIT.members, **{"state": case, "age": age, **expected}
    )


ESCAPES = "\x1b]0;owned\x07\x1b[2J\u202e\n"
GARBAGE: dict[str, bytes] = {
    "no JSON": b"\xff{",
    "nothing": b"",
    "a list": b"[1]",
    "deep": b"[" * 60_000,
    "huge": b'{"attempt": 1' + b" " * (1 << 20) + b"}",
    "little": b"{}",
    "a text for a number": b'{"attempt": "1", "phase": "training", "time": 1, "started": 0}',
    "no finite number": b'{"attempt": 1, "phase": "training", "time": NaN, "started": 1e999}',
    "a list for a text": b'{"attempt": 1, "phase": "saving", "time": 1, "started": 0, "host": []}',
    "a phase of nobody": b'{"attempt": 1, "phase": "asleep", "time": 999999, "started": 0}',
}


@pytest.mark.parametrize("case", [*GARBAGE, "a pipe"])
def test_one_unit_that_cannot_be_read_hides_no_other(tmp_path: Path, case: str) -> None:
    records = begin(tmp_path, [[0], [1], [2]])
    for unit in records.units():
        records.grant(unit, 1)
        tell(records, unit)
    if case == "a pipe":
        (tmp_path / "units/00001/progress.json").unlink()
        os.mkfifo(tmp_path / "units/00001/progress.json")
    else:
        records.files.put("units/00001/progress.json", GARBAGE[case])
    run = StoredRun(tmp_path)
    rows = run_rows(run, NOW)
    assert [row.state for row in rows] == ["training", "unreadable", "training"]
    shown = "\n".join(printed(rows, 140))
    assert "2 running, 1 unreadable" in shown
    assert "member 1 is unreadable: " in shown
    json.dumps(rows_as_json("here", rows), allow_nan=False)
    records.grant(Unit((1,)), 2, "it has failed for good")  # what the driver says counts
    assert [row.ended for row in run_rows(run, NOW)] == [False, True, False]


def test_one_commit_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    records = begin(tmp_path, [[0], [1], [2]])
    for unit in records.units():
        records.grant(unit, 1)
        tell(records, unit)
    records.files.put("units/00001/commit.json", b"{}")
    rows = run_rows(StoredRun(tmp_path), NOW)
    assert [row.state for row in rows] == ["training", "unreadable", "training"]
    assert "commit.json" in str(rows[1].error)


def test_what_files_hold_does_not_steer_a_terminal(tmp_path: Path) -> None:
    records = begin(tmp_path, [[0], [1]])
    texts = dict.fromkeys(("host", "node", "device"), ESCAPES)
    tell(records, Unit((0,)), **texts)
    tell(records, Unit((1,)), **texts, error=f"Error: {ESCAPES}")
    records.grant(Unit((1,)), 1)
    shown = "\n".join(printed(run_rows(StoredRun(tmp_path), NOW), 140))
    result = MemberResult(0, "done", 1, {ESCAPES: 1.0}, node=ESCAPES, host=ESCAPES)
    failed = MemberResult(0, "failed", 1, node=ESCAPES, error=ESCAPES)
    for text in (shown, result_line(result), result_line(failed)):
        assert all(sign.isprintable() for line in text.splitlines() for sign in line)
        assert r"\x1b" in text


@pytest.mark.parametrize(
    ("left", "state", "diverged"),
    [([0, 1, 2], "done", ()), ([0, 2], "done", (1,)), ([], "diverged", (0, 1, 2))],
)
def test_the_row_of_a_unit_with_a_commit(
    records: RunRecords, left: list[int], state: Any, diverged: tuple[int, ...]
) -> None:
    tell(records, UNIT, attempt=2, phase="saving")
    commit(records, UNIT, left, attempt=2)
    assert only(records) == Row(UNIT.members, state, "box.example", NODE, "gpu 3", 50, 50, 0.25, 2,
                                42.0, diverged=diverged, ended=True)  # fmt: skip


@pytest.mark.parametrize(
    ("told", "eta"),
    [
        ({"first": [NOW - 20, 15]}, 120.0),  # 5 steps in 20 s, whatever was before
        ({"first": [NOW - 20, 20]}, None),  # no step yet in this attempt
        ({"steps": None}, None),
        ({"step": 55}, 0.0),  # more than was thought
    ],
)
def test_the_eta_follows_from_the_steps_of_this_attempt(
    records: RunRecords, told: dict[str, Any], eta: float | None
) -> None:
    records.grant(UNIT, 1)
    tell(records, UNIT, **told)
    assert only(records).eta == eta


# ------------------------------------------------------------------------------- one line


def queued(count: int) -> list[Row]:
    return [Row((number,)) for number in range(100, 100 + count)]


def test_members_are_counted_not_units() -> None:
    rows = [
        Row((0, 1, 2), "done", diverged=(1,)),
        Row((3, 4), "training"),
        Row((5, 6), "saving"),
        Row((7,), "starting"),
        Row((8, 9), "diverged", diverged=(8, 9)),
        Row((10,), "failed"),
        Row((11,), "silent"),
        *queued(1196),
    ]
    assert summary_line(rows) == (
        "2 of 1,208 members done, 5 running, 1,196 queued, 1 silent, 1 failed, 3 diverged"
    )


@pytest.mark.parametrize(
    ("rows", "eta"),
    [
        # a whole unit takes 5 + 30 s, and two of three wait for the one that runs
        ([Row((0,), "training", eta=30.0, seconds=5.0), *queued(2)], 100.0),
        (
            [
                Row((0,), "done", seconds=60.0),
                Row((1,), "training", eta=10.0, seconds=50.0),
                Row((2,), "training", eta=20.0, seconds=40.0),
                *queued(3),
            ],
            105.0,  # two places have 10 + 20 + 3 * 60 s of work left
        ),
        ([Row((0,), "done", seconds=60.0), Row((1,), "starting", seconds=10.0)], 50.0),
        ([Row((0,), "starting", seconds=10.0)], None),
        ([Row((0,), "saving", seconds=9.0), Row((1,), "training", seconds=8.0, eta=2.0)], 2.0),
        ([Row((0,), "done", seconds=60.0), *queued(1)], None),  # nothing runs
        ([], None),
    ],
)
def test_the_eta_of_a_run(rows: list[Row], eta: float | None) -> None:
    assert run_eta(rows) == eta


# ------------------------------------------------------------------------------- the table


ROWS = [
    Row((0, 1, 2, 3, 4), "done", "gpu-1.example", NODE, "gpu 0", 12000, 12000, 0.31234, 1, 3600.0,
        diverged=(2,)),
    Row((5, 6, 7, 8, 9), "training", "gpu-1.example", NODE, "gpu 1", 11234, 12000, 0.4123, 1,
        3500.0, 230.0, 2.1),
    Row((10, 11, 12, 13, 14), "silent", "raycluster-kuberay-workergroup-worker-7sjqm", "aa" * 28,
        "gpu 3", 512, 12000, 1.2345e5, 2, 800.0, None, 185.0),
    Row((15, 16), "failed", "10.0.0.1", "bb" * 28, "gpu 3", 512, 12000, None, 4, 800.0, None,
        185.0, error="ValueError: 3 columns were expected; got 5\nand more"),
    Row((18,), "queued"),
]  # fmt: skip


def printed(rows: list[Row], width: int, **options: Any) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(run_table(rows, width, **options))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def cells(lines: list[str]) -> dict[str, dict[str, str]]:
    """The cells of a table by member and heading, which are two spaces apart."""
    start = next(number for number, line in enumerate(lines) if line.startswith("member "))
    names = re.split(r"\s{2,}", lines[start])
    table = {}
    for line in lines[start + 1 :]:
        texts = re.split(r"\s{2,}", line)
        if len(texts) == len(names):
            table[texts[0]] = dict(zip(names, texts, strict=True))
    return table


WIDE = {"device": "gpu 1", "time": "58 min", "last sign": "2 s"}


@pytest.mark.parametrize(("width", "more"), [(80, {}), (140, WIDE)])
def test_a_row_is_one_line_and_its_numbers_are_whole(width: int, more: dict[str, str]) -> None:
    lines = printed(ROWS, width, note="The storage is away.")
    assert max(map(len, lines)) <= width
    assert lines[:2] == [
        "4 of 18 members done, 5 running, 1 queued, 5 silent, 2 failed, 1 diverged, ETA 64 min",
        "The storage is away.",
    ] or width < 90  # fmt: skip
    table = cells(lines)
    assert list(table) == ["0-4", "5-9", "10-14", "15-16", "18"]
    assert table["5-9"] == {
        "member": "5-9", "state": "training", "node": "gpu-1", "step": "11,234/12,000",
        "loss": "0.4123", "attempt": "1", "ETA": "4 min", **more,
    }  # fmt: skip
    assert table["0-4"]["state"] == "done, 1 diverged"
    assert table["0-4"]["step"] == "12,000"
    assert (table["10-14"]["state"], table["10-14"]["loss"]) == ("silent 3 min", "1.234e+05")
    assert table["15-16"]["node"] == "10.0.0.1"
    assert set(table["18"].values()) == {"18", "queued", "-"}
    assert lines[-1] == "members 15 to 16 failed: ValueError: 3 columns were expected; got 5"


def test_of_many_units_those_that_run_or_failed_are_shown_and_the_rest_is_counted() -> None:
    rows = [Row((number,), "done", "a") for number in range(960)]
    rows += [Row((number,), "queued") for number in range(960, 986)]
    rows += [Row((number,), "training", "a") for number in range(986, 994)]
    rows += [Row((number,), "failed", "a", error=f"error {number}") for number in range(994, 999)]
    rows += [Row((999,), "silent", "a")]
    lines = printed(rows, 80)
    table = cells(lines)
    assert len(table) == 40
    assert list(table)[:14] == [*map(str, range(994, 1000)), *map(str, range(986, 994))]
    assert {row["state"] for row in list(table.values())[14:]} == {"done"}
    *_, counted, _, _, third, more = lines
    assert counted == "and 934 done, 26 queued"
    assert (third, more) == ("member 996 failed: error 996", "and 2 more errors")


# ------------------------------------------------------------------------------- the display


def start(storage: Path, members: int = 2, **options: Any) -> LaunchedRun:
    given = {"trainer": {"max_epochs": 2}, "backend": Threads(), **options}
    return launch(make_ensemble, make_data, members, storage=storage, seed=0, **given)


def show(run: LaunchedRun, console: Console) -> None:
    with RunDisplay(run, console) as display:
        for result in run.as_completed():
            display.ended(result)


def terminal() -> tuple[io.StringIO, Console]:
    file = io.StringIO()
    return file, Console(file=file, force_terminal=True, width=100, height=20)


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_on_a_terminal_there_is_one_table(tmp_path: Path) -> None:
    file, console = terminal()
    show(start(tmp_path), console)
    text = file.getvalue()
    assert "\x1b[?25l" in text  # the cursor is hidden while it is drawn anew,
    assert text.rstrip().endswith("\x1b[?25h")  # and comes back
    last = without_codes(text)[without_codes(text).rindex("2 of 2 members done") :]
    rows = [line.split() for line in last.splitlines()[2:4]]
    assert [row[:2] for row in rows] == [["0", "done"], ["1", "done"]]
    assert [row[3] for row in rows] == ["8", "8"]  # steps: 2 epochs of 4 batches
    assert "member 0 done" not in text


def test_in_a_log_there_are_a_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # it stays a log
    run = start(tmp_path, members=3, stack=2)
    with RunDisplay(run) as display:
        for result in run.as_completed():
            display.ended(result)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    *lines, last = text.splitlines()
    form = r"member (\d) done in .* on node \S+, attempt 1, train_(loss|nll) \S+"
    said = [re.fullmatch(form, line) for line in lines]
    assert sorted(match[1] for match in said if match) == ["0", "1", "2"]
    assert re.fullmatch(r"after .*: 3 of 3 members done", last)


def test_storage_that_is_away_does_not_end_the_display(tmp_path: Path) -> None:
    place = tmp_path / "run"
    records = begin(place, [[number] for number in range(100)])
    commit(records, Unit((0,)))
    file, console = terminal()
    with RunDisplay(StoredRun(place), console, read_seconds=0.01) as display:
        wait_for(lambda: "and 92 queued" in without_codes(file.getvalue()))  # of a low screen
        away = place.rename(tmp_path / "away")
        wait_for(lambda: "The storage cannot be read" in without_codes(file.getvalue()))
        assert [row.state for row in display.rows[:2]] == ["done", "queued"]
        away.rename(place)
        for number in range(1, 100):
            commit(records, Unit((number,)))
        display.wait()
    assert "100 of 100 members done" in without_codes(file.getvalue())


def test_a_stream_that_is_gone_does_not_end_a_run(tmp_path: Path) -> None:
    begin(tmp_path, [[0]])
    file = io.StringIO()
    with RunDisplay(StoredRun(tmp_path), Console(file=file)) as display:
        file.close()
        display.ended(MemberResult(0, "done", 1))


@pytest.mark.parametrize(
    ("result", "line"),
    [
        (
            MemberResult(
                3, "done", 1, {"train_loss": 2.0, "val_nll": 0.31}, NODE, seconds=42.4,
                host="box.example",
            ),
            "member 3 done in 42 s on node box, attempt 1, val_nll 0.31",
        ),
        (
            MemberResult(3, "done", 2, {"val_nll": None, "other": 7.0}, NODE, seconds=0.4),
            "member 3 done in <1 s on node 3f2a91c0, attempt 2, other 7",
        ),
        (
            MemberResult(3, "failed", 4, error="ValueError: bad\n  more"),
            "member 3 failed, attempt 4: ValueError: bad",
        ),
    ],
)  # fmt: skip
def test_a_line_says_how_a_member_ended(result: MemberResult, line: str) -> None:
    assert result_line(result) == line


def test_members_of_a_stack_are_shown_with_their_own_metrics(tmp_path: Path) -> None:
    run = launch(
        make_ensemble, make_data, 3, stack=2, storage=tmp_path, trainer={"max_epochs": 2},
        backend=Threads(),
    )  # fmt: skip
    first, second, alone = run.wait()
    assert first.metrics == second.metrics  # of both together
    own = [result.own_metrics["train_nll"] for result in (first, second)]
    assert own[0] != own[1]
    assert sum(own) / 2 == pytest.approx(first.metrics["train_nll"], rel=1e-5)
    assert not alone.own_metrics
    for result in (first, second):
        assert result_line(result).endswith(f"train_nll {result.own_metrics['train_nll']:.4g}")
    assert "train_loss" in result_line(alone)
