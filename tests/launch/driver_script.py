"""A driver that can be killed; run by test_driver_killed.py.

``main(storage)`` starts a Ray of its own and launches members that take some seconds each.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.launch import LaunchedRun, launch
from tests.launch.faults import Note, attempt_number
from tests.launch.programs import Slowly, make_chains, make_data

MEMBERS = 4
EPOCHS = 3  # of four steps


def make_marked(members: list[int], seed: int, folder: str) -> Any:
    """Chains that say in a file of the run that an attempt at them was begun."""
    marks = Path(folder).parents[2] / "marks"
    with open(marks, "a") as file:
        file.write(f"{members[0]} {attempt_number(folder)}\n")
    return make_chains(members, seed)


def trainer(folder: str, seconds: float = 0.0) -> dict[str, Any]:
    """Options of the trainer."""
    collector = SampleCollector(every=2, dirpath="draws")
    return {"max_epochs": EPOCHS, "callbacks": [collector, Note(folder), Slowly(seconds)]}


def slow_trainer(members: list[int], folder: str) -> dict[str, Any]:
    """Later members take so long that a driver can be killed meanwhile."""
    return trainer(folder, seconds=0.1 if members[0] < 2 else 5.0)


def start(storage: str | os.PathLike[str], options: Any) -> LaunchedRun:
    """Launch the run."""
    return launch(
        make_marked,
        make_data,
        MEMBERS,
        storage=storage,
        trainer=options,
        seed=0,
        checkpoint_seconds=0,
        allow_open_cluster=True,
    )


def main(storage: str) -> None:
    """Start Ray, launch the run and wait for it."""
    _start_ray()
    start(storage, slow_trainer).wait()


def stumble(storage: str) -> None:
    """Launch the run, and end by an error after the first result."""
    _start_ray()
    for result in start(storage, slow_trainer).as_completed():
        raise RuntimeError(f"a mistake in the program, after {result}")


def dawdle(storage: str) -> None:
    """Launch the run, and do something else until somebody presses Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    _start_ray()
    for _ in start(storage, slow_trainer).as_completed():
        time.sleep(3600)


def _start_ray() -> None:
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        log_to_driver=False,
    )
