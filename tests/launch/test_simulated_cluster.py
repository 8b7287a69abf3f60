"""Three nodes with GPUs, simulated: who gets which, and what becomes of a run that loses some."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.launch.cluster_script import MEMBERS
from tests.launch.faults import PATIENCE, ROOT, processes_end

DEVICES = {"first": {"0"}, "second": {"0", "1"}, "third": {"0"}}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_three_nodes_of_which_one_is_lost(tmp_path: Path) -> None:
    said = run_cluster(tmp_path)
    check_that_two_halves_share_a_device(*said["half"])
    check_that_each_member_has_a_device_of_its_own(said["disturbed"])
    check_that_losses_change_nothing(said)


def run_cluster(directory: Path) -> dict[str, Any]:
    """What the cluster's own driver says: it has a Ray of its own, which ends with it."""
    with processes_end() as environment:
        done = subprocess.run(
            [sys.executable, "-m", "tests.launch.cluster_script", str(directory)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return dict(json.loads((directory / "said.json").read_text()))


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["begin"] < other["end"] and other["begin"] < one["end"]


def check_that_each_member_has_a_device_of_its_own(units: list[dict[str, Any]]) -> None:
    """Members wait for a device that is free."""
    assert len(units) == MEMBERS
    assert all(one["visible"] in DEVICES[one["node"]] for one in units)
    places = {(one["node"], one["visible"]) for one in units}
    assert 1 < len(places) <= 4 < MEMBERS
    for one, other in combinations(units, 2):
        if (one["node"], one["visible"]) == (other["node"], other["visible"]):
            assert not overlap(one, other)


def check_that_two_halves_share_a_device(one: dict[str, Any], other: dict[str, Any]) -> None:
    """At the same time."""
    assert (one["node"], one["visible"]) == (other["node"], other["visible"]) == ("first", "0")
    assert overlap(one, other)


def check_that_losses_change_nothing(said: dict[str, Any]) -> None:
    """A node was taken away and workers were killed."""
    done_to_it = said["done to it"]
    assert done_to_it["on the removed node"]
    assert len(done_to_it["killed"]) >= 2
    members = [member for member, _, _ in said["results"]]
    assert members == list(range(MEMBERS))  # each once
    assert {status for _, status, _ in said["results"]} == {"done"}
    attempts = {member: attempt for member, _, attempt in said["results"]}
    for member in {*done_to_it["on the removed node"], *done_to_it["killed"]}:
        assert attempts[member] > 1
    assert said["components"] == MEMBERS
    undisturbed = said["undisturbed"]
    assert [one["left"] for one in said["disturbed"]] == undisturbed
    assert len({json.dumps(one) for one in undisturbed}) == MEMBERS
