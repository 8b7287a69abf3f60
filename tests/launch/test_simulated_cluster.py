"""Three nodes with GPUs, simulated: who gets which, and what becomes of a run that loses some."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.launch.cluster_script import MEMBERS
from tests.launch.faults import PATIENCE

ROOT = Path(__file__).parents[2]
DEVICES = {"first": {"0"}, "second": {"0", "1"}, "third": {"0"}}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the cluster's own driver says: it has a Ray of its own, which ends with it."""
    mark = f"LIGHTNING_BNN_TEST_{secrets.token_hex(8)}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", mark: "1"}
    environment.pop("RAY_ADDRESS", None)
    directory = tmp_path_factory.mktemp("cluster")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.launch.cluster_script", str(directory)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=3 * PATIENCE,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        yield json.loads(done.stdout.splitlines()[-1])
    finally:
        for folder in Path("/proc").glob("[0-9]*"):  # what is left, if it failed
            with suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["begin"] < other["end"] and other["begin"] < one["end"]


def test_each_member_has_a_device_of_its_own_and_more_than_there_are_wait(
    said: dict[str, Any],
) -> None:
    calm = said["calm"]
    assert len(calm) == MEMBERS
    assert [one["attempt"] for one in calm] == [1] * MEMBERS
    assert all(one["visible"] in DEVICES[one["node"]] for one in calm)
    places = {(one["node"], one["visible"]) for one in calm}
    assert 1 < len(places) <= 4 < MEMBERS
    for one, other in combinations(calm, 2):
        if (one["node"], one["visible"]) == (other["node"], other["visible"]):
            assert not overlap(one, other)


def test_two_halves_share_a_device_at_the_same_time(said: dict[str, Any]) -> None:
    one, other = said["half"]
    assert (one["node"], one["visible"]) == (other["node"], other["visible"]) == ("first", "0")
    assert overlap(one, other)


def test_a_lost_node_and_killed_workers_change_nothing(said: dict[str, Any]) -> None:
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
    calm = [one["left"] for one in said["calm"]]
    assert [one["left"] for one in said["disturbed"]] == calm
    assert len({json.dumps(one) for one in calm}) == MEMBERS
