"""What runs in Ray: a task for a unit on one device, Ray Train for one on several."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning_bnn.launch.cluster import can_grow, device_room, other_version, task_options
from lightning_bnn.launch.driver import Outcome, Submit, describe_error
from lightning_bnn.launch.member import Attempt, run_attempt
from lightning_bnn.launch.recipe import Recipe
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.storage.files import open_directory

__all__ = ["driver_options", "make_submit", "run_task"]


def make_submit(ray: Any, recipe: Any, resources: Mapping[str, float], devices: int) -> Submit:
    """A function that hands an attempt to Ray and gives the reference of its outcome.

    Args:
        ray: The module.
        recipe: The reference of the recipe, which travels once, not with each attempt.
        resources: What each device of a unit needs.
        devices: The number of devices of a unit.
    """
    options = task_options(resources)
    if devices > 1:
        from lightning_bnn.launch.distributed import run_distributed

        # the workers of Ray Train have the resources; what waits for them needs none
        task, options = ray.remote(run_distributed), {"num_cpus": 0}
        extra: tuple[Any, ...] = (devices, dict(resources))
    else:
        task, extra = ray.remote(run_task), ()
    options["max_retries"] = 0  # trying again is the driver's

    def submit(attempt: Attempt, avoid: str | None) -> Any:
        if avoid is not None and device_room(resources, avoid) < devices:
            avoid = None  # nothing else would do
        away = {} if avoid is None else {"label_selector": {"ray.io/node-id": f"!{avoid}"}}
        given = (*extra, avoid) if devices > 1 else extra
        sent = replace(attempt, recipe=None)  # type: ignore[arg-type]
        return task.options(**options, **away).remote(sent, recipe, *given)

    return submit


def driver_options(
    ray: Any, records: RunRecords, resources: Mapping[str, float], devices: int
) -> dict[str, Any]:
    """What the driver has to know of units on several devices.

    What waits for the devices of such a unit are processes of its own, so that only as many are
    handed out as there is room for, and a few more where that makes a cluster grow.
    """
    if devices == 1:
        return {}
    from lightning_bnn.launch.distributed import group_memory, sweep

    # it may be handed to the very worker that is being killed
    task = ray.remote(sweep).options(num_cpus=0, max_retries=-1)

    def outstanding() -> int:
        return device_room(resources) // devices + (8 if can_grow() else 1)

    def clear(unit: Unit, number: int) -> None:
        with suppress(Exception):  # Ray may be gone, and all groups with it
            task.remote(group_memory(records.storage, unit, number, resources))

    return {"outstanding": outstanding, "clear": clear}


def run_task(attempt: Attempt, recipe: Recipe) -> Outcome:
    """Train a unit on one device, in a worker of Ray."""
    return attempt_outcome(replace(attempt, recipe=recipe), place_facts())


def place_facts() -> dict[str, Any]:
    """What a worker of Ray tells of the place where it is."""
    import ray

    return {
        "node": ray.get_runtime_context().get_node_id(),
        "device": device_name(ray.get_gpu_ids()),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def device_name(gpus: list[Any]) -> str:
    """How a device is shown to a person.

    Example:
        >>> device_name([]), device_name([3])
        ('cpu', 'gpu 3')
    """
    return "gpu " + ",".join(map(str, gpus)) if gpus else "cpu"


def attempt_outcome(
    attempt: Attempt, facts: Mapping[str, Any], trainer_options: Mapping[str, Any] | None = None
) -> Outcome:
    """Run an attempt; what it raises becomes text, which every driver can read."""
    if (other := other_version(attempt.versions)) is not None:
        # of a node that came later than the check of all nodes; it may go better elsewhere
        return Outcome(error=f"{os.uname().nodename} has {other}", node=facts.get("node"))
    try:
        return Outcome(run_attempt(attempt, facts, trainer_options))
    except Exception as error:
        rank = (trainer_options or {}).get("rank") or 0
        records = RunRecords(attempt.storage)
        progress = records.progress(attempt.unit) or {}
        # the first rank has told its last step just now; how far others are nobody tells
        early = not rank and progress.get("attempt") == attempt.number and not progress.get("step")
        outcome = describe_error(error, early)
        try:
            folder = open_directory(records.folder(attempt.unit, attempt.number))
            folder.put(
                f"error-{rank}.txt" if rank else "error.txt", traceback.format_exc().encode()
            )
        except Exception:
            pass  # the storage may be what failed
        return outcome
