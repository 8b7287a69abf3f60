"""The benchmark of the launcher runs, small, and says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.launch_scale import judge, main

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_it_runs_and_keeps_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "figures.json"
    main(["--members", "20", "--epochs", "1", "--rounds", "1", "--json", str(place)])
    said, found = capsys.readouterr().out, json.loads(place.read_text())
    assert "driver milliseconds per member" in said
    assert (found["members"], found["rounds"], len(found["bare_speed_ups"])) == (20, 1, 1)
    assert min(found["time_ratio"], found["driver_milliseconds_per_member"]) > 0
    assert found["versions"]["ray"]


def test_the_kept_result_is_of_the_whole_benchmark() -> None:
    kept = json.loads((RESULTS / "launch_scale.json").read_text())
    assert kept["members"] == 1000
    assert kept["bars_hold"] == judge(kept)
    assert all(judge(kept).values())


def test_too_few_members(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--members", "5"])
    assert "--members is at least 20" in capsys.readouterr().err
