"""``lightning-bnn launch``: many members of a configuration on a cluster of Ray.

The configuration is that of ``lightning-bnn fit``, and options after it change single values::

    lightning-bnn launch --config configs/mnist_ensemble.yaml --members 20 --storage runs/ensemble
    lightning-bnn status --storage runs/ensemble

On a cluster, ``ray job submit --working-dir . -- lightning-bnn launch …`` does the same. Started
again with the same storage, it runs only what is missing. The storage is a posterior like any
other: ``lightning-bnn test --config … --posterior runs/ensemble``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.configuration import read_configuration
from lightning_bnn.launch.live import watch
from lightning_bnn.launch.run import LaunchedRun, launch_recipe

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Launch a run, show it until it ends, and say where its posterior is."""
    options, rest = _parser().parse_known_args(list(arguments))
    recipe, seed, named = read_configuration(rest)
    members = named if options.members is None else options.members
    if members is None:
        raise ConfigurationError(
            "launch needs the number of members: the configuration names none. Pass --members N."
        )
    if options.stack > 1 and not recipe.takes_members:
        raise ConfigurationError(
            f"--stack {options.stack}: the strategy of the configuration trains one network, so "
            "that members cannot be stacked. Leave --stack out."
        )
    resources = {"CPU": options.cpus, **({"GPU": options.gpus} if options.gpus else {})}
    run = launch_recipe(
        recipe,
        members,
        parts={"--config": recipe},
        storage=options.storage,
        stack=options.stack,
        resources=resources,
        devices=options.devices,
        seed=seed if options.seed is None else options.seed,
        on_failure=options.on_failure,
        min_members=options.min_members,
        retries=options.retries,
        checkpoint_seconds=options.checkpoint_seconds,
        lost_after=options.lost_after,
        address=options.address,
        allow_open_cluster=options.allow_open_cluster,
    )
    try:
        run.records.files.put("config.yaml", recipe.text.encode())
        watch(run)
    except BaseException:
        run.cancel()
        raise
    lines = [f"The posterior of {_done(run)} members is in {run.storage}"]
    if any("draws" in result for result in run.committed().values()):
        lines.insert(0, _diagnosis(run))
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # nobody reads on; the run is done all the same
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _diagnosis(run: LaunchedRun) -> str:
    """Whether the chains agree, or why that cannot be said."""
    try:
        return str(run.diagnose())
    except Exception as error:  # too few draws, no ArviZ, no data on this machine
        return f"No R-hat: {type(error).__name__}: {error}"


def _done(run: LaunchedRun) -> int:
    return sum(result.ok for result in run.results())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-bnn launch",
        description="Train many members or chains of a configuration with Ray, each by a fit of "
        "its own, and leave one posterior in the storage.",
        epilog="All other options change the configuration, as for fit: "
        "--trainer.max_epochs 5, --model.init_args.prior.init_args.scale 0.5.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--members", type=int, help="how many members or chains (default: the configuration's)")
    add("--storage", required=True, metavar="DIR|URL",
        help="a directory that all nodes share, or a URL such as s3://…")  # fmt: skip
    add("--stack", type=int, default=1, help="members that one task trains side by side")
    add("--cpus", type=float, default=1.0, help="CPUs of each device of a task")
    add("--gpus", type=float, default=0.0, help="GPUs of each device of a task, at most 1")
    add("--devices", type=int, default=1, help="devices of each member, by DDP")
    add("--seed", type=int, help="root of all seeds (default: the configuration's)")
    add("--on-failure", choices=("raise", "skip"), default="raise",
        help="what to do when a member failed for good, after all others are done")  # fmt: skip
    add("--min-members", type=int, default=1, help="with skip, the least number to go on with")
    add("--retries", type=int, default=3, help="tries in a row that get no further")
    add("--checkpoint-seconds", type=float, default=60.0, help="least time between checkpoints")
    add("--lost-after", type=float, default=120.0,
        help="seconds without a sign of life after which a member starts elsewhere")  # fmt: skip
    add("--address", help="cluster of Ray to join (default: $RAY_ADDRESS, or a new one here)")
    add("--allow-open-cluster", action="store_true",
        help="use a cluster without token authentication")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
