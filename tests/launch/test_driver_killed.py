"""A driver that is killed in the midst of a run: started again, only what is missing runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.checkpoints import checkpoint_step
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import plan_units
from tests.launch import driver_script
from tests.launch.faults import ROOT, left_behind, noted_steps, processes_end, run_by_hand, wait_for
from tests.launch.programs import make_net

UNITS = plan_units(driver_script.MEMBERS)

pytestmark = [
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
]


@pytest.fixture
def driver(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A driver in a process of its own; whatever it has started ends with the test."""
    name = getattr(request, "param", "main")
    code = f"import sys; from tests.launch.driver_script import {name}; {name}(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with open(tmp_path / "said", "wb") as said, processes_end() as environment:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def marks(storage: Path) -> list[tuple[int, int]]:
    """Member and number of each attempt whose factory was called."""
    lines = (storage / "marks").read_text().splitlines()
    return sorted((int(member), int(attempt)) for member, attempt in map(str.split, lines))


@pytest.mark.slow
def test_a_driver_killed_and_started_again(driver: subprocess.Popen[bytes], tmp_path: Path) -> None:
    storage = tmp_path / "run"
    records = RunRecords(storage)

    def in_the_midst() -> bool:
        assert driver.poll() is None, (tmp_path / "said").read_text()[-4000:]
        done = [unit for unit in UNITS if records.committed(unit) is not None]
        under_way = [unit for unit in UNITS[2:] if checkpoint_step(records, unit)]
        return done == UNITS[:2] and under_way == UNITS[2:]

    wait_for(in_the_midst, "the first driver")
    # as long as it lives nobody else may drive the run, and nothing is changed
    before = records.files.get("run.json")
    with pytest.raises(ConfigurationError, match="is under way: another process on this storage"):
        driver_script.start(storage, driver_script.trainer)
    assert driver.poll() is None
    assert records.files.get("run.json") == before
    assert [records.granted(unit) for unit in UNITS] == [1, 1, 1, 1]

    driver.kill()
    driver.wait()
    again = driver_script.start(storage, driver_script.trainer)  # at once
    assert again.missing() == UNITS[2:]
    results = again.wait()
    assert [(one.member, one.status, one.attempt) for one in results] == [
        (0, "done", 1),
        (1, "done", 1),
        (2, "done", 2),
        (3, "done", 2),
    ]
    assert marks(storage) == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 1), (3, 2)]
    assert [records.attempts(unit) for unit in UNITS] == [[1], [1], [1, 2], [1, 2]]

    # what was done before counts: it resumes from the last checkpoint, and each bit is the same
    def calm(folder: str) -> dict[str, Any]:
        return driver_script.trainer(folder)

    (tmp_path / "calm").mkdir()
    for unit in UNITS:
        undisturbed = run_by_hand(tmp_path / "calm", driver_script.make_marked, calm, unit)
        assert left_behind(records, unit) == left_behind(undisturbed, unit)
    for unit in UNITS[2:]:
        assert noted_steps(records, unit, 2)[0] > 0
    assert len(again.posterior(make_net()).components) == driver_script.MEMBERS


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["stumble", "dawdle"], indirect=True)
def test_a_program_that_ends_by_an_error_cancels_its_run(
    driver: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    records = RunRecords(tmp_path / "run")
    wait_for(lambda: records.committed(UNITS[0]) is not None, "the first member")
    if driver.args[-2].endswith("dawdle(sys.argv[1])"):  # type: ignore[index]
        time.sleep(1.0)
        driver.send_signal(signal.SIGINT)
    begin = time.monotonic()
    assert driver.wait(60) != 0  # what is left would take a minute
    assert time.monotonic() - begin < 45
    assert records.committed(UNITS[3]) is None
    records.files.claim()()  # another driver may have it
