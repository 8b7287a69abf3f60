"""A unit on several devices: DDP of Lightning in the workers of Ray Train, one for each device.

A task of Ray that needs nothing itself runs Ray Train for one attempt and waits for it. Every rank
runs :func:`~lightning_bnn.launch.member.run_attempt`; the first one tells of the progress, saves
and commits. Ray Train itself neither retries nor keeps checkpoints: both belong to the launcher.

Ray Train reserves its workers with a placement group, and if its own processes are killed, these
workers end but the group may stay, with all that it has reserved, as long as the driver lives. So
each attempt marks its group, and whoever gives an attempt up calls for a task that removes the
group with that mark.
"""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.driver import Outcome, describe_error
from lightning_bnn.launch.member import Attempt
from lightning_bnn.launch.recipe import Recipe
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.tasks import attempt_outcome, place_facts
from lightning_bnn.launch.units import Unit

__all__ = ["RankError", "group_memory", "judge", "remove_groups", "run_distributed", "sweep"]

_SETTINGS = {
    "RAY_TRAIN_V2_ENABLED": "1",
    # a relative path in a factory means the same as on one device
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # a rank whose host is gone without a word: by default it would be waited for ten minutes
    "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "120",
    # a process more for each unit, for warnings that nobody here would heed
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
_STRATEGIES: dict[Any, dict[str, Any]] = {
    None: {},
    "auto": {},
    "ddp": {},
    "ddp_find_unused_parameters_true": {"find_unused_parameters": True},
}


class RankError(Exception):
    """How an attempt has ended in one rank; the exception itself may not survive the way back."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome

    def __str__(self) -> str:
        return str(self.outcome.error)


def run_distributed(
    attempt: Attempt,
    recipe: Recipe,
    devices: int,
    resources: Mapping[str, float],
    avoid: str | None = None,
) -> Outcome:
    """Train a unit on several devices, in a worker of Ray that has none of them itself.

    Args:
        attempt: What to do.
        recipe: Makes the strategy, the data and the trainer's options.
        devices: The number of ranks.
        resources: What each of them needs.
        avoid: A node that no rank should be on.
    """
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer

    train: Any = ray.train  # what a type checker sees there are the classes of its first version
    records, unit = RunRecords(attempt.storage), attempt.unit
    if (done := records.committed(unit)) is not None:
        return Outcome(dict(done["result"]))
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    gpu = resources.get("GPU", 0)
    *earlier, memory = (
        group_memory(attempt.storage, unit, number, resources)
        for number in range(1, attempt.number + 1)
    )
    remove_groups(earlier)  # of a driver that could not
    # the first try of Ray Train to start its workers waits a minute; with a node to avoid there
    # may be no other left by then, and the next attempt avoids none
    failures = {"max_failures": 0, "controller_failure_limit": -1 if avoid is None else 0}
    if "max_preemption_failures" in {one.name for one in fields(train.FailureConfig)}:
        failures["max_preemption_failures"] = 0
    with tempfile.TemporaryDirectory() as folder, _signals_kept():
        trainer = TorchTrainer(
            partial(_run_rank, replace(attempt, recipe=recipe)),
            torch_config=TorchConfig(backend="nccl" if gpu else "gloo"),
            scaling_config=train.ScalingConfig(
                num_workers=devices,
                use_gpu=gpu > 0,
                resources_per_worker={"CPU": 1, **resources, "memory": memory},
                label_selector=None if avoid is None else {"ray.io/node-id": f"!{avoid}"},
            ),
            run_config=train.RunConfig(
                name=f"{unit.name}-{attempt.number:04d}-{os.urandom(4).hex()}",
                storage_path=folder,  # of this node alone: all that matters goes to our storage
                failure_config=train.FailureConfig(**failures),
            ),
        )
        try:
            trainer.fit()
        except Exception as error:
            return judge(error)
    if (done := records.committed(unit)) is None:
        return Outcome(error="all ranks have ended, and there is no result")
    return Outcome(dict(done["result"]))


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray Train leaves a handler behind, in a process that other tasks will use."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        with suppress(ValueError):  # not in the main thread, where none was set either
            signal.signal(signal.SIGINT, handler)


def _run_rank(attempt: Attempt) -> None:
    """Run an attempt in one rank."""
    from ray import train
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment

    context = train.get_context()
    facts = place_facts()
    facts["device"] = f"{context.get_world_size()} x {facts['device'].split()[0]}"

    def make_strategy(asked: Any) -> Any:
        if not isinstance(asked, (str, type(None))) or asked not in _STRATEGIES:
            raise ConfigurationError(
                f"trainer= has strategy={asked!r}; a member on several devices is trained by DDP. "
                f"Leave it out, or use one of {', '.join(filter(None, _STRATEGIES))}."
            )
        return RayDDPStrategy(**_STRATEGIES[asked])

    options = {
        "rank": context.get_world_rank(),
        "devices": "auto",
        "strategy": make_strategy,
        "plugins": [RayLightningEnvironment()],
    }
    outcome = attempt_outcome(attempt, facts, options)
    if outcome.result is None:
        raise RankError(outcome)


def judge(error: Exception) -> Outcome:
    """The outcome of an attempt whose ranks did not all come to the end.

    A rank that was killed is the cause of whatever the others say of their connections, and it
    may go better next time. Otherwise the first mistake counts, wherever it was made.

    Example:
        >>> from ray.train import WorkerGroupError
        >>> lost = RankError(Outcome(error="RuntimeError: connection closed by peer"))
        >>> nan = RankError(Outcome(error="NonFiniteError: the loss is nan", final=True))
        >>> outcome = judge(WorkerGroupError("", {0: lost, 1: nan}))
        >>> outcome.error, outcome.final
        ('rank 1: NonFiniteError: the loss is nan', True)
        >>> judge(WorkerGroupError("", {0: nan, 1: OSError("killed")})).final
        False
    """
    failures: Mapping[int, Any] = getattr(error, "worker_failures", None) or {}
    if not failures:
        inner = getattr(error, "controller_failure", None)
        return describe_error(error if inner is None else inner)
    for rank, failure in failures.items():
        if not isinstance(failure, RankError):
            text = f"rank {rank}: {str(failure).strip() or repr(failure)}"
            return Outcome(error=text.split("\n")[0])
    said = {rank: failure.outcome for rank, failure in failures.items()}
    # what others raise because the first rank did tells nothing of the kind of error
    own = {rank: one for rank, one in said.items() if "On the first rank: " not in str(one.error)}
    for rank, one in own.items():
        if one.final:
            return replace(one, error=f"rank {rank}: {one.error}")
    rank, one = next(iter((own or said).items()))
    return replace(one, error=f"rank {rank}: {one.error}", final=False)


# ---------------------------------------------------------------- placement groups


def group_memory(storage: str, unit: Unit, number: int, resources: Mapping[str, float]) -> int:
    """The bytes of memory that each rank of an attempt asks for: the mark of its group.

    Ray Train gives its groups no name, and Ray tells of a group only what it has reserved. A few
    megabytes more or less, another number for every attempt, are no matter.

    Example:
        >>> first, second = (group_memory("s3://runs/a", Unit((0,)), n, {}) for n in (1, 2))
        >>> first != second, max(first, second) <= 2**24
        (True, True)
    """
    digest = hashlib.sha256(f"{storage} {unit.name} {number}".encode()).digest()
    return int(resources.get("memory", 0)) + 1 + int.from_bytes(digest[:3], "big")


def remove_groups(memory: Collection[int]) -> int:
    """Remove the placement groups that reserve one of these amounts of memory for each rank.

    Returns:
        How many there were.
    """
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group_table

    found = 0
    for name, group in placement_group_table().items():
        marks = {int(bundle.get("memory", 0)) for bundle in group["bundles"].values()}
        if group["state"] != "REMOVED" and marks & set(memory):
            identity = ray.PlacementGroupID(bytes.fromhex(name))
            ray.util.remove_placement_group(PlacementGroup(identity))
            found += 1
    return found


def sweep(memory: int, seconds: float = 30.0) -> None:
    """Remove what an attempt that was given up has reserved, and what it reserves while it dies."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        remove_groups([memory])
        time.sleep(1.0)
