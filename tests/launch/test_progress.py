"""Rows, summary, table and live display of runs: made up one record at a time, and launched."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch import LaunchedRun, MemberResult, Outcome, launch
from lightning_bnn.launch import progress as progress_module
from lightning_bnn.launch.progress import (
    SILENT_AFTER,
    Row,
    RunDisplay,
    RunReader,
    RunTable,
    Summary,
    result_line,
    summarise,
    watch,
)
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from tests.launch.programs import make_data, make_ensemble
from tests.launch.simulated import Simulated, Threads, committed

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
    places = {str(one): {"place": f"attempt-0001/posterior-{one:05d}"} for one in left}
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
    (row,) = RunReader(records).rows(now)
    return row


PLACE = {"host": "box.example", "node": NODE, "device": "gpu 3"}
TOLD = {**PLACE, "step": 20, "steps": 50, "loss": 0.5, "attempt": 1}
FULL = "OSError: the disk is full"
RAISED = {"phase": "failed", "error": FULL}
FAILED = {**TOLD, "state": "failed", "error": FULL, "seconds": 15.0}


ROWS_WITHOUT_COMMIT: dict[str, tuple[Any, ...]] = {
    # what the lease says, what the attempt tells, so much later, whether that is the end, the row
    "no folder": (None, None, 0, False, {"state": "queued"}),
    "waits": ((1,), None, 0, False, {"state": "queued"}),
    "starting": ((1,), {"phase": "starting"}, 2, False, {**TOLD, "age": 2.0, "seconds": 17.0}),
    "training": ((1,), {}, 2, False, {**TOLD, "age": 2.0, "seconds": 17.0, "eta": 13.0}),
    "saving": ((1,), {"phase": "saving"}, 2, False, {**TOLD, "age": 2.0, "seconds": 17.0}),
    "silent": ((1,), {}, SILENT_AFTER + 1, False, {**TOLD, "age": 61.0, "seconds": 76.0}),
    "given up": ((2,), {}, 500, False, {"state": "queued", "attempt": 1}),
    "raised": ((1,), RAISED, 10, False, {**FAILED, "age": 10.0}),
    "raised, given up": ((2,), RAISED, 10, False, {**FAILED, "age": 10.0}),
    "raised long ago": ((1,), RAISED, 1000, True, {**FAILED, "age": 1000.0}),  # no other followed
    "failed": ((1, FULL), None, 0, True, {"state": "failed", "error": FULL, "final": True}),
    # a worker that was killed tells nothing of its end
    "killed": ((2, FULL), {}, 0, True, {**FAILED, "age": 0.0, "final": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", ROWS_WITHOUT_COMMIT)
def test_the_row_of_a_unit_without_a_commit(records: RunRecords, case: str) -> None:
    lease, told, later, ended, expected = ROWS_WITHOUT_COMMIT[case]
    if lease is not None:
        records.grant(UNIT, *lease)
    if told is not None:
        tell(records, UNIT, **told)
    row = only(records, NOW + later)
    assert row == Row(UNIT.members, **{"state": case, **expected})
    assert row.ended is ended


def test_an_attempt_after_a_failure_is_seen(records: RunRecords) -> None:
    records.grant(UNIT, 2, FULL)
    tell(records, UNIT, phase="failed", error=FULL)
    records.grant(UNIT, 3)  # launched again
    tell(records, UNIT, attempt=3)
    row = only(records)
    assert (row.state, row.attempt, row.error) == ("training", 3, None)


@pytest.mark.parametrize(
    ("left", "state", "diverged"),
    [([0, 1, 2], "done", ()), ([0, 2], "done", (1,)), ([], "diverged", (0, 1, 2))],
)
def test_the_row_of_a_unit_with_a_commit(
    records: RunRecords, left: list[int], state: Any, diverged: tuple[int, ...]
) -> None:
    tell(records, UNIT, attempt=2, phase="saving")
    commit(records, UNIT, left, attempt=2)
    row = only(records, NOW + 1000)
    assert row == Row(UNIT.members, state, "box.example", NODE, "gpu 3", 50, 50, 0.25, 2, 42.0,
                      diverged=diverged)  # fmt: skip
    assert row.ended


@pytest.mark.parametrize(
    ("told", "eta"),
    [
        ({}, 15.0),  # 20 steps in 10 s: 30 are left
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
    assert only(records, NOW).eta == eta
    later = only(records, NOW + 4).eta
    assert later == (None if eta is None else max(0.0, eta - 4))


def test_a_reader_goes_by_when_it_saw_the_sign_change(records: RunRecords) -> None:
    """A host whose clock is an hour late is taken for silent only until its next sign."""
    records.grant(UNIT, 1)
    reader = RunReader(records)
    tell(records, UNIT, time=NOW - 3600, first=[NOW - 3610, 0])
    assert reader.rows(NOW)[0].state == "silent"
    tell(records, UNIT, time=NOW - 3595, first=[NOW - 3610, 0])
    (row,) = reader.rows(NOW + 5)
    assert (row.state, row.age) == ("training", 0.0)
    (row,) = reader.rows(NOW + 5 + SILENT_AFTER + 1)
    assert (row.state, row.age) == ("silent", SILENT_AFTER + 1)


def test_a_zombie_that_tells_on_is_not_shown(records: RunRecords) -> None:
    records.grant(UNIT, 2)
    reader = RunReader(records)
    tell(records, UNIT, attempt=2, step=7)
    reader.rows(NOW)
    tell(records, UNIT, attempt=1, phase="failed", step=30)
    (row,) = reader.rows(NOW + 1)
    assert (row.state, row.attempt, row.step) == ("training", 2, 7)


def test_what_is_done_is_read_once(tmp_path: Path) -> None:
    records = begin(tmp_path, [[0], [1]])
    commit(records, Unit((0,)))
    reader = RunReader(records)
    assert [row.state for row in reader.rows(NOW)] == ["done", "queued"]
    (tmp_path / "units/00000/commit.json").write_text("damaged; nobody looks at it again")
    commit(records, Unit((1,)))
    assert [row.state for row in reader.rows(NOW)] == ["done", "done"]
    with pytest.raises(ConfigurationError, match=r"commit\.json"):
        RunReader(records).rows(NOW)


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
        Row((12,), "queued"),
    ]
    summary = summarise(rows)
    assert summary.members == 13
    assert summary.counts == {
        "done": 2, "diverged": 3, "running": 5, "failed": 1, "silent": 1, "queued": 1,
    }  # fmt: skip
    assert str(summary) == (
        "2 of 13 members done, 5 running, 1 queued, 1 silent, 1 failed, 3 diverged"
    )
    assert str(Summary(1200, {"running": 4, "queued": 1196}, eta=180.0)) == (
        "0 of 1,200 members done, 4 running, 1,196 queued, ETA 3 min"
    )


@pytest.mark.parametrize(
    ("rows", "eta"),
    [
        ([Row((0,), "training", eta=30.0), Row((1,), "training", eta=50.0)], 50.0),
        # a whole unit takes 5 + 30 s, and two of three wait for the one that runs
        ([Row((0,), "training", eta=30.0, seconds=5.0), *queued(2)], 100.0),
        # what was done before tells how long one takes; two places take three in turn
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
        ([Row((0,), "saving", seconds=10.0), Row((1,), "training", eta=2.0)], 2.0),
        ([Row((0,), "saving", seconds=10.0), *queued(1)], None),
        ([Row((0,), "done", seconds=60.0), *queued(1)], None),  # nothing runs
        ([], None),
    ],
)
def test_the_eta_of_a_run(rows: list[Row], eta: float | None) -> None:
    assert summarise(rows).eta == eta


# ------------------------------------------------------------------------------- the table


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
    Console(file=file, width=width).print(RunTable(rows, **options))
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


@pytest.mark.parametrize("width", [40, 60, 80, 140])
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
    assert table["10-14"]["node"] == "rayclu..worker-7sjqm"


def test_what_is_said_around_the_table() -> None:
    lines = printed(ROWS, 140, note="The storage is away.")
    assert lines[:2] == [
        "4 of 21 members done, 7 running, 1 queued, 5 silent, 2 failed, 2 diverged, ETA 60 min",
        "The storage is away.",
    ]
    assert "members 15 to 16 failed: ValueError: 3 columns were expected; got 5" in lines
    assert not any("and more" in line for line in lines)
    many = [Row((number,), "failed", error=f"error {number}") for number in range(9)]
    assert printed(many, 100)[-2:] == ["member 2 failed: error 2", "and 6 more errors"]
    long = printed([Row((0,), "failed", error="ValueError: " + "many words " * 40)], 60)
    assert len(long) == 3 + 2
    assert max(map(len, printed(ROWS, 10))) <= 10  # no screen is too narrow


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


def test_states_are_words_with_and_without_colours() -> None:
    file = io.StringIO()
    console = Console(file=file, width=140, force_terminal=True, color_system="standard")
    console.print(RunTable(ROWS))
    coloured = file.getvalue()
    assert "\x1b[" in coloured
    bare = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()]
    assert bare == printed(ROWS, 140)


# ------------------------------------------------------------------------------- the display


def start(storage: Path, members: int = 2, **options: Any) -> LaunchedRun:
    given = {"trainer": {"max_epochs": 2}, "backend": Threads(), **options}
    return launch(make_ensemble, make_data, members, storage=storage, seed=0, **given)


def terminal(width: int = 100) -> tuple[io.StringIO, Console]:
    file = io.StringIO()
    return file, Console(file=file, force_terminal=True, width=width, height=30)


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def until(condition: Callable[[], Any]) -> None:
    """Wait for about two minutes, counted in looks: a machine may stand still for a while."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen")


# ------------------------------------------------------------------------------- real runs


def test_on_a_terminal_there_is_one_table(tmp_path: Path) -> None:
    file, console = terminal()
    results = watch(start(tmp_path), console)
    assert [(one.member, one.status) for one in results] == [(0, "done"), (1, "done")]
    text = file.getvalue()
    assert "\x1b[?25l" in text  # the cursor is hidden while it is drawn anew,
    assert text.rstrip().endswith("\x1b[?25h")  # and comes back
    last = without_codes(text)[without_codes(text).rindex("2 of 2 members done") :]
    rows = [line.split() for line in last.splitlines()[2:4]]
    assert [row[:2] for row in rows] == [["0", "done"], ["1", "done"]]
    assert [row[4] for row in rows] == ["8", "8"]  # steps: 2 epochs of 4 batches
    assert "member 0 done" not in text


def test_in_a_log_there_are_a_few_lines(tmp_path: Path) -> None:
    file = io.StringIO()
    run = start(tmp_path, members=3, stack=2)
    results = watch(run, file)
    assert [one.member for one in results] == [0, 1, 2]
    *lines, last = file.getvalue().splitlines()
    assert "\x1b" not in file.getvalue()
    assert "\r" not in file.getvalue()
    found = [re.fullmatch(r"member (\d) done in .* on node (\S+), attempt 1, train_loss (\S+)", one)
             for one in lines]  # fmt: skip
    assert sorted(match[1] for match in found if match) == ["0", "1", "2"]
    assert re.fullmatch(r"after .*: 3 of 3 members done", last)
    again = io.StringIO()
    assert watch(start(tmp_path, members=3, stack=2), again) == results
    assert len(again.getvalue().splitlines()) == 4


class Interrupted(io.StringIO):
    """Somebody presses Ctrl-C while a line is written."""

    def write(self, text: str) -> int:
        raise KeyboardInterrupt


def test_an_interrupt_ends_the_run_and_is_handed_on(tmp_path: Path) -> None:
    def work(records: RunRecords, unit: Unit, number: int) -> tuple[float, Outcome | None]:
        return 0.0, committed(records, unit, number) if unit.members == (0,) else None

    backend = Simulated(work)
    run = start(tmp_path, backend=backend)
    with pytest.raises(KeyboardInterrupt):
        watch(run, Interrupted())
    assert backend.cancelled == [(Unit((1,)), 1)]
    assert [one.member for one in run.results()] == [0]
    run.records.files.claim()()  # another driver may have the storage


# ------------------------------------------------------------------------------- made-up storage


@pytest.fixture
def pair(tmp_path: Path) -> RunRecords:
    return begin(tmp_path / "run", [[0], [1]])


def test_storage_that_is_away_does_not_end_the_display(
    pair: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "_LATE_SECONDS", 0.0)
    place = Path(pair.storage)
    commit(pair, Unit((0,)))
    file, console = terminal()
    with RunDisplay(pair, console, read_seconds=0.01) as display:
        until(lambda: display.rows)
        away = place.rename(place.parent / "away")
        until(lambda: "The storage was last read" in without_codes(file.getvalue()))
        assert "holds no run" in file.getvalue()
        assert [row.state for row in display.rows] == ["done", "queued"]
        away.rename(place)
        commit(pair, Unit((1,)))
        display.wait()
    assert without_codes(file.getvalue()).rstrip().splitlines()[-4].strip() == "2 of 2 members done"


def test_a_log_stays_a_log_where_colours_are_forced(
    pair: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    file = io.StringIO()
    with RunDisplay(pair, file, read_seconds=0.01) as display:
        until(lambda: display.rows)
    assert "\x1b" not in file.getvalue()


def test_a_stream_that_is_gone_does_not_end_a_run(pair: RunRecords) -> None:
    file = io.StringIO()
    with RunDisplay(pair, file, read_seconds=0.01) as display:
        until(lambda: display.rows)
        file.close()
        display.ended(MemberResult(0, "done", 1))
    assert [row.state for row in display.rows] == ["queued", "queued"]


def test_a_low_screen_shows_as_many_rows_as_it_has_room_for(tmp_path: Path) -> None:
    records = begin(tmp_path, [[number] for number in range(100)])
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=12)
    with RunDisplay(records, console, read_seconds=0.01) as display:
        until(lambda: "and 94 queued" in without_codes(file.getvalue()))
        assert len(display.rows) == 100
    assert "and 60 queued" in without_codes(file.getvalue())  # what is left may be scrolled


# ------------------------------------------------------------------------------- lines and rows


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
