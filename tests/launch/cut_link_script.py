"""The driver of a run on two hosts, which cuts the link between them; run by its test.

Usage: python -m tests.launch.cut_link_script DIRECTORY STORAGE FAR COMMAND... FAR is the address of
the other host, and COMMAND cuts the link to it. What happens is written to DIRECTORY/said.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import ray

from lightning_bnn.launch import launch
from lightning_bnn.launch.checkpoints import checkpoint_step
from lightning_bnn.storage.files import Files, open_directory
from tests.launch.cluster_script import trainer
from tests.launch.faults import left_behind, run_by_hand, wait_for
from tests.launch.programs import make_chains, make_data


def main(directory: Path, storage: str, far: str, cut: list[str]) -> None:
    """Launch two members, one on each host, cut the link, and wait for both."""
    files = open_directory(storage)
    assert type(files) is Files
    files.file_system.mkdir(files.root.split("/")[0])  # the bucket
    ray.init(log_to_driver=False)
    wait_for(lambda: len(ray.nodes()) == 2, "the other host")
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    run = launch(
        make_chains,
        make_data,
        2,
        storage=storage,
        trainer=partial(trainer, seconds=1.0),
        checkpoint_seconds=0,
        seed=0,
    )

    def member_afar() -> int | None:
        for unit in run.units():
            progress = run.records.progress(unit) or {}
            if (
                nodes.get(progress.get("node", "")) == far
                and checkpoint_step(run.records, unit) > 2
            ):
                return unit.members[0]
        return None

    wait_for(lambda: member_afar() is not None, "a member on the other host")
    lost = member_afar()
    subprocess.run(cut, check=True)
    begin = time.monotonic()
    results = run.wait()
    seconds = time.monotonic() - begin
    (directory / "said.json").write_text(
        json.dumps(
            {
                "lost": lost,
                "seconds": seconds,
                "results": [
                    (one.member, one.status, one.attempt, nodes[str(one.node)]) for one in results
                ],
                "left": [left_behind(run.records, unit) for unit in run.units()],
                "undisturbed": [
                    left_behind(
                        run_by_hand(directory / "by_hand", make_chains, trainer, unit), unit
                    )
                    for unit in run.units()
                ],
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])
