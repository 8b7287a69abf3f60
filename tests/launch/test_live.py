"""The display of a run: real runs on local Ray, and storage that somebody else writes to."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_bnn.launch import LaunchedRun, MemberResult, launch
from lightning_bnn.launch import live as live_module
from lightning_bnn.launch.live import RunDisplay, result_line, watch, with_results
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.rows import Row
from lightning_bnn.launch.units import Unit
from tests.launch.programs import Slowly, make_data, make_ensemble
from tests.launch.test_rows import NODE, begin, commit, tell


def start(storage: Path, members: int = 2, **options: Any) -> LaunchedRun:
    given = {"trainer": {"max_epochs": 2}, "allow_open_cluster": True, **options}
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


def test_on_a_terminal_there_is_one_table(local_ray: Any, tmp_path: Path) -> None:
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


def test_in_a_log_there_are_a_few_lines(local_ray: Any, tmp_path: Path) -> None:
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


def test_an_interrupt_ends_the_run_and_is_handed_on(local_ray: Any, tmp_path: Path) -> None:
    def options(members: list[int]) -> dict[str, Any]:
        return {"max_epochs": 1, "callbacks": [Slowly(600.0)] if members == [1] else []}

    run = start(tmp_path, trainer=options)
    with pytest.raises(KeyboardInterrupt):
        watch(run, Interrupted())
    assert run._driver is not None
    assert not run._driver.is_alive()
    assert [one.member for one in run.results()] == [0]
    run.records.files.claim()()  # another driver may have the storage


# ------------------------------------------------------------------------------- storage


@pytest.fixture
def records(tmp_path: Path) -> RunRecords:
    return begin(tmp_path / "run", [[0], [1]])


def test_a_display_follows_the_storage_until_all_has_ended(records: RunRecords) -> None:
    file, console = terminal()
    with RunDisplay(records, console, read_seconds=0.01) as display:
        until(lambda: len(display.rows()) == 2)
        assert [row.state for row in display.rows()] == ["queued", "queued"]
        records.grant(Unit((0,)), 1)
        tell(records, Unit((0,)), time=time.time() + 3600)  # by a clock that is ahead: never silent
        until(lambda: display.rows()[0].state == "training")
        commit(records, Unit((0,)))
        commit(records, Unit((1,)))
        display.wait()
    last = without_codes(file.getvalue()).rstrip().splitlines()[-4:]
    assert last[0].rstrip() == "2 of 2 members done"


def test_storage_that_is_away_does_not_end_the_display(
    records: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_module, "_LATE_SECONDS", 0.0)
    place = Path(records.storage)
    commit(records, Unit((0,)))
    file, console = terminal()
    with RunDisplay(records, console, read_seconds=0.01) as display:
        until(lambda: len(display.rows()) == 2)
        away = place.rename(place.parent / "away")
        until(lambda: "The storage was last read" in without_codes(file.getvalue()))
        assert "holds no run" in file.getvalue()
        assert [row.state for row in display.rows()] == ["done", "queued"]
        display.ended(MemberResult(1, "done", 1, node=NODE))  # the driver knows without it
        assert [row.state for row in display.rows()] == ["done", "done"]
        away.rename(place)
        commit(records, Unit((1,)))
        display.wait()
    assert without_codes(file.getvalue()).rstrip().splitlines()[-4].strip() == "2 of 2 members done"


def test_a_log_has_a_line_on_the_whole_only_now_and_then(records: RunRecords) -> None:
    file = io.StringIO()
    with RunDisplay(records, file, read_seconds=0.01, summary_seconds=3600.0) as display:
        until(lambda: len(display.rows()) == 2)
        time.sleep(0.2)
        assert file.getvalue() == ""
    assert re.fullmatch(r"after .*: 0 of 2 members done, 2 queued\n", file.getvalue())


def test_a_log_does_not_say_the_same_again(records: RunRecords) -> None:
    file = io.StringIO()
    with RunDisplay(records, file, read_seconds=0.01, summary_seconds=0.0):
        until(file.getvalue)
        time.sleep(0.2)
        assert file.getvalue().count("\n") == 1
        commit(records, Unit((0,)))
        until(lambda: "1 of 2 members done" in file.getvalue())


@pytest.mark.parametrize(("name", "value"), [("FORCE_COLOR", "1"), ("TTY_COMPATIBLE", "1")])
def test_a_log_stays_a_log_where_colours_are_forced(
    records: RunRecords, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    file = io.StringIO()
    with RunDisplay(records, file, read_seconds=0.01) as display:
        until(lambda: len(display.rows()) == 2)
    assert "\x1b" not in file.getvalue()


def test_a_stream_that_is_gone_does_not_end_a_run(records: RunRecords) -> None:
    for file in (io.StringIO(), Console(file=io.StringIO(), force_terminal=True)):
        with RunDisplay(records, file, read_seconds=0.01) as display:
            until(lambda display=display: len(display.rows()) == 2)  # type: ignore[misc]
            (file.file if isinstance(file, Console) else file).close()
            display.ended(MemberResult(0, "done", 1))
        assert [row.state for row in display.rows()] == ["done", "queued"]


def test_a_low_screen_shows_as_many_rows_as_it_has_room_for(tmp_path: Path) -> None:
    records = begin(tmp_path, [[number] for number in range(100)])
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=12)
    with RunDisplay(records, console, read_seconds=0.01) as display:
        until(lambda: "and 94 queued" in without_codes(file.getvalue()))
        assert len(display.rows()) == 100
    assert "and 60 queued" in without_codes(file.getvalue())  # what is left may be scrolled


# ------------------------------------------------------------------------------- lines and rows


@pytest.mark.parametrize(
    ("result", "host", "line"),
    [
        (
            MemberResult(3, "done", 1, {"train_loss": 2.0, "val_nll": 0.31}, NODE, seconds=42.4),
            "box.example",
            "member 3 done in 42 s on node box, attempt 1, val_nll 0.31",
        ),
        (
            MemberResult(3, "done", 2, {"val_nll": None, "other": 7.0}, NODE, seconds=0.4),
            None,
            "member 3 done in <1 s on node 3f2a91c0, attempt 2, other 7",
        ),
        (MemberResult(3, "done", 1), None, "member 3 done, attempt 1"),
        (
            MemberResult(3, "diverged", 1, seconds=5.0, error="its weights are not finite"),
            None,
            "member 3 diverged in 5 s, attempt 1: its weights are not finite",
        ),
        (
            MemberResult(3, "failed", 4, error="ValueError: bad\n  more", node=NODE),
            None,
            "member 3 failed on node 3f2a91c0, attempt 4: ValueError: bad",
        ),
        (MemberResult(3, "failed", 4), None, "member 3 failed, attempt 4: unknown"),
    ],
)
def test_a_line_says_how_a_member_ended(result: MemberResult, host: str | None, line: str) -> None:
    assert result_line(result, host) == line


def test_results_are_shown_before_the_storage_is_read_again() -> None:
    rows = [
        Row((0, 1), "training", "a", step=5, steps=9, eta=3.0, age=1.0, attempt=1),
        Row((2, 3), "training", "a", attempt=1),
        Row((4,), "training", "a", attempt=1),
        Row((5,), "done", loss=0.5),
        Row((6,), "failed", "a", age=1000.0),
    ]
    metrics = {"train_loss": 0.25}
    results = {
        0: MemberResult(0, "done", 2, metrics, seconds=7.0, steps=9),
        1: MemberResult(1, "diverged", 2, metrics, seconds=7.0, steps=9),
        2: MemberResult(2, "done", 1),  # its neighbour has not been taken in yet
        4: MemberResult(4, "failed", 3, error="OSError: full"),
        5: MemberResult(5, "done", 1, {"train_loss": 9.0}),
        6: MemberResult(6, "failed", 1, error="ValueError: bad"),
    }
    both, half, failed, done, earlier = with_results(rows, results)
    assert both == Row((0, 1), "done", "a", step=9, steps=9, loss=0.25, attempt=2, seconds=7.0,
                       diverged=(1,))  # fmt: skip
    assert half == rows[1]
    assert (failed.state, failed.error, failed.attempt) == ("failed", "OSError: full", 3)
    assert failed.ended
    assert done == rows[3]
    assert earlier.error == "ValueError: bad"  # the storage may not say why
