"""The command, in process, on a run that was launched and on storage that is made up."""

from __future__ import annotations

import json
import os
import pty
import re
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_bnn.commands.status import main
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch import launch
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from tests.launch.programs import make_data, make_ensemble
from tests.launch.simulated import Threads
from tests.launch.test_progress import begin, commit, tell


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The storage of a run of three members, two of them stacked."""
    storage = tmp_path_factory.mktemp("status")
    launch(
        make_ensemble, make_data, 3, stack=2, storage=storage, trainer={"max_epochs": 2},
        backend=Threads(),
    ).wait()  # fmt: skip
    return str(storage)


@pytest.fixture
def running(tmp_path: Path) -> RunRecords:
    """A run of which one unit is done, one runs and one waits."""
    records = begin(tmp_path, [[0], [1], [2]])
    commit(records, Unit((0,)))
    records.grant(Unit((1,)), 1)
    now = time.time() + 3600  # by a clock that is ahead, so that it is not silent after a pause
    tell(records, Unit((1,)), started=now - 15, first=[now - 10, 0], time=now)
    return records


def test_a_finished_run(finished: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--storage", finished]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == "3 of 3 members done"
    assert lines[1].split()[:4] == ["member", "state", "node", "device"]
    assert [line.split()[:2] for line in lines[2:]] == [["0-1", "done"], ["2", "done"]]
    assert [line.split()[3:5] for line in lines[2:]] == [["cpu", "8"], ["cpu", "8"]]
    assert "\x1b" not in text


def test_a_finished_run_is_not_watched_for_ever(
    finished: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--storage", finished, "--watch"]) == 0
    assert re.fullmatch(r"after .*: 3 of 3 members done\n", capsys.readouterr().out)


def test_a_run_that_runs_as_json(running: RunRecords, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--storage", running.storage, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [unit["state"] for unit in found["units"]] == ["done", "training", "queued"]
    assert [unit["ended"] for unit in found["units"]] == [True, False, False]
    assert found["storage"] == running.storage
    assert found["summary"]["counts"] == {"done": 1, "running": 1, "queued": 1}
    assert found["units"][0]["host"] == "box.example"
    assert found["units"][1]["step"] == 20
    assert 0 <= found["units"][1]["eta"] <= 15
    assert found["units"][2]["loss"] is None


def test_a_run_is_watched_on_a_terminal_until_it_ends(
    running: RunRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    text = ""

    def look() -> None:
        """What a person would do: wait until the running member is seen, then let it end."""
        nonlocal text
        while "training" not in text:
            text += os.read(master, 4096).decode()
        commit(running, Unit((1,)))
        commit(running, Unit((2,)))
        while "\x1b[?25h" not in text:
            text += os.read(master, 4096).decode()

    person = threading.Thread(target=look, daemon=True)
    person.start()
    with open(slave, "w", encoding="utf-8") as screen:
        monkeypatch.setattr("sys.stdout", screen)
        assert main(["--storage", running.storage, "--watch"]) == 0
        person.join(60)
        monkeypatch.undo()
    os.close(master)
    assert "\x1b[?25l" in text
    assert "3 of 3 members done" in text[text.rindex("members done") - 10 :]


def test_a_storage_without_a_run_is_refused(tmp_path: Path) -> None:
    for options in ([], ["--watch"], ["--json"]):
        with pytest.raises(ConfigurationError, match="holds no run"):
            main(["--storage", str(tmp_path / "nowhere"), *options])
    assert list(tmp_path.iterdir()) == []


class Refusing(MemoryFileSystem):
    """Storage whose client has an error of its own kind."""

    protocol = "refusing"

    def cat_file(self, *arguments: Any, **options: Any) -> bytes:
        raise RuntimeError("no such token")


def test_storage_that_cannot_be_read_is_named() -> None:
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    with pytest.raises(ConfigurationError, match=r"refusing://run cannot be read.*no such token"):
        main(["--storage", "refusing://run"])
