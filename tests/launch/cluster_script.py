"""A cluster of three nodes with GPUs that are only said to be there; run by its test.

Usage: python -m tests.launch.cluster_script DIRECTORY. It launches runs on the cluster, disturbs
one, and writes said.json there: what each unit says of itself, and what was done to it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import ray
from ray.cluster_utils import Cluster

from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.launch import LaunchedRun, launch
from lightning_bnn.launch.records import RunRecords
from tests.launch.faults import PATIENCE, left_behind, run_by_hand, wait_for
from tests.launch.programs import Slowly, make_chains, make_data

MEMBERS = 8
KILLS = 2
_STORE = {"object_store_memory": 80 * 2**20}
start = partial(launch, make_chains, make_data, seed=0, allow_open_cluster=True)


class Meet(pl.Callback):
    """Wait until so many members train at the same time."""

    def __init__(self, place: Path, number: int, count: int) -> None:
        self.place, self.number, self.count = place, number, count

    def on_train_start(self, *args: Any) -> None:
        self.place.mkdir(exist_ok=True)
        (self.place / str(self.number)).touch()
        wait_for(lambda: len(list(self.place.iterdir())) >= self.count, "the other member")


def trainer(folder: str, seconds: float = 0.0) -> dict[str, Any]:
    """Options of the trainer: twelve steps, a draw after every second."""
    collector = SampleCollector(every=2, dirpath="draws")
    return {"accelerator": "cpu", "max_epochs": 3, "callbacks": [collector, Slowly(seconds)]}


def meeting_trainer(members: list[int], folder: str) -> dict[str, Any]:
    """Options of a trainer whose members wait for each other."""
    options = trainer(folder)
    options["callbacks"].append(Meet(Path(folder).parents[2] / "met", members[0], 2))
    return options


def told(run: LaunchedRun, names: dict[str, str]) -> list[dict[str, Any]]:
    """What each unit of a run has committed, with the name of its node."""
    records, found = run.records, []
    for unit in run.units():
        commit = records.committed(unit)
        assert commit is not None, unit
        result, progress = commit["result"], records.progress(unit) or {}
        found.append(
            {
                "attempt": commit["attempt"],
                "node": names[result["node"]],
                "visible": result["cuda_visible_devices"],
                "begin": progress["started"],
                "end": progress["started"] + result["seconds"],
                "left": left_behind(records, unit),
            }
        )
    return found


def running(records: RunRecords) -> dict[int, dict[str, Any]]:
    """By number, the progress of the units whose attempt under way has left a checkpoint."""
    found = {}
    for unit in records.units():
        attempt = records.granted(unit)
        checkpoints = Path(records.folder(unit, attempt)) / "checkpoints"
        progress = records.progress(unit) or {}
        under_way = records.committed(unit) is None and progress.get("attempt") == attempt
        if under_way and checkpoints.is_dir() and any(checkpoints.glob("*.ckpt")):
            found[unit.members[0]] = progress
    return found


def disturb(run: LaunchedRun, cluster: Cluster, node: Any, identity: str) -> dict[str, Any]:
    """Take a node away from a run, and kill a worker every few seconds."""
    records, choose, kills = run.records, random.Random(0), []

    def on_node() -> list[int]:
        return [
            member
            for member, progress in running(records).items()
            if progress.get("node") == identity
        ]

    on_it = wait_for(on_node, "a member on the node")
    cluster.remove_node(node, allow_graceful=False)
    end = time.monotonic() + PATIENCE
    driver = run._driver
    assert driver is not None
    while driver.is_alive() and len(kills) < KILLS and time.monotonic() < end:
        time.sleep(1.5)
        others = {
            member: progress
            for member, progress in running(records).items()
            if progress.get("node") != identity
        }
        if others:
            member = choose.choice(sorted(others))
            try:
                os.kill(others[member]["process"], signal.SIGKILL)
            except ProcessLookupError:  # it has ended since
                continue
            kills.append(member)
    return {"on the removed node": on_it, "killed": kills}


def main(directory: Path) -> None:
    """Start the cluster and run all."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **_STORE,
            "num_cpus": 2,
            "num_gpus": 1,
            "resources": {"first": 2},
            "include_dashboard": False,
        },
    )
    second = cluster.add_node(**_STORE, num_cpus=2, num_gpus=2, resources={"second": 2})
    third = cluster.add_node(**_STORE, num_cpus=2, num_gpus=1, resources={"third": 2})
    ray.init(address=cluster.address, log_to_driver=False)
    assert second is not third
    cluster.wait_for_nodes()
    names = {
        node["NodeID"]: name
        for node in ray.nodes()
        for name in ("first", "second", "third")
        if name in node["Resources"]
    }
    said: dict[str, Any] = {}
    half = {"GPU": 0.5, "CPU": 1, "first": 1}
    run = start(2, storage=directory / "half", trainer=meeting_trainer, resources=half)
    run.wait()
    said["half"] = told(run, names)

    run = start(
        MEMBERS,
        storage=directory / "disturbed",
        trainer=partial(trainer, seconds=0.3),
        resources={"GPU": 1, "CPU": 1},
        checkpoint_seconds=0,
        lost_after=60.0,
    )
    identity = next(node for node, name in names.items() if name == "third")
    said["done to it"] = disturb(run, cluster, third, identity)
    said["results"] = [(one.member, one.status, one.attempt) for one in run.wait()]
    said["components"] = len(run.posterior().components)
    said["disturbed"] = told(run, names)
    said["undisturbed"] = [
        left_behind(run_by_hand(directory / "undisturbed", make_chains, trainer, unit), unit)
        for unit in run.units()
    ]
    (directory / "said.json").write_text(json.dumps(said))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
