"""What the launcher costs: many trivial members, and eight that have something to do.

``python -m benchmarks.launch_scale`` runs on a local Ray with two CPUs:

* 1,000 members that train four weights for one step. The launcher is compared with bare tasks of
  Ray that do the same fit and save the same posterior, half of them before it and half after it;
  the driver's own processor time and memory are measured beside.
* 8 members that keep one thread busy for some seconds: in two workers, by the launcher and by bare
  tasks in turns, against one after another in one process.

Bars: 20 ms of the driver's processor time a member, 50 MB of growth of its memory, at most twice
the time of bare tasks, and eight members 1.7 times faster than serially, or as near to it as bare
tasks come.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.options import versions, write
from lightning_bnn import DeepEnsemble
from lightning_bnn.launch import launch, unit_seed
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import Normal

__all__ = ["main"]

MILLISECONDS_BAR = 20.0
MEGABYTES_BAR = 50.0
TIME_BAR = 2.0
SPEED_BAR = 1.7


def make_bnn(members: list[int], seed: int) -> DeepEnsemble:
    """A network of four weights."""
    return DeepEnsemble(
        lambda: nn.Linear(3, 1), Gaussian(0.1), Normal(0.0, 1.0), members=members, seed=seed
    )


def make_data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(4, 3), torch.zeros(4, 1)), batch_size=4)


def make_busy_bnn(members: list[int], seed: int) -> DeepEnsemble:
    """A network whose steps take some milliseconds of one thread."""
    return DeepEnsemble(
        lambda: nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                              nn.Linear(512, 1)),
        Gaussian(0.1), Normal(0.0, 1.0), members=members, seed=seed,
    )  # fmt: skip


def make_busy_data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2048, 64, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=256, shuffle=True)


def trainer_options(epochs: int) -> dict[str, Any]:
    return {"max_epochs": epochs, "logger": False}


def fit(make: Any, data: Any, epochs: int, member: int, folder: str) -> None:
    """What a member is without the launcher: seeds, a fit, a saved posterior."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pl.seed_everything(unit_seed(0, [member]), workers=True, verbose=False)
    strategy = make([member], 0)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder, **trainer_options(epochs),
    )  # fmt: skip
    trainer.fit(strategy, data())
    strategy.posterior().save(f"{folder}/posterior-{member:05d}")


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def megabytes() -> float:
    """The memory of this process, as Linux tells it."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run_bare(ray: Any, make: Any, data: Any, epochs: int, members: Sequence[int]) -> None:
    task = ray.remote(fit).options(max_retries=0)
    with tempfile.TemporaryDirectory() as folder:
        ray.get([task.remote(make, data, epochs, member, folder) for member in members])


def run_launched(make: Any, data: Any, epochs: int, members: int) -> list[float]:
    """Launch and wait; the driver's memory in megabytes after each result."""
    memory = []
    with tempfile.TemporaryDirectory() as folder:
        run = launch(
            make, data, members, storage=folder, trainer=trainer_options(epochs),
            allow_open_cluster=True,
        )  # fmt: skip
        for _ in run.as_completed():
            memory.append(megabytes())
    return memory


def measure_many(ray: Any, members: int) -> dict[str, Any]:
    half = members // 2
    before = seconds(lambda: run_bare(ray, make_bnn, make_data, 1, range(half)))
    memory: list[float] = []
    processor = time.process_time()
    launched = seconds(lambda: memory.extend(run_launched(make_bnn, make_data, 1, members)))
    processor = time.process_time() - processor
    after = seconds(lambda: run_bare(ray, make_bnn, make_data, 1, range(half, members)))
    # what the driver imports and opens for the first members is no growth with their number
    settled = memory[len(memory) // 10]
    return {
        "members": members,
        "bare_seconds": before + after,
        "launched_seconds": launched,
        "time_ratio": launched / (before + after),
        "driver_milliseconds_per_member": 1e3 * processor / members,
        "driver_megabytes_growth": max(memory) - settled,
    }


def measure_busy(ray: Any, members: int, epochs: int, rounds: int) -> dict[str, Any]:
    def serially() -> None:
        with tempfile.TemporaryDirectory() as folder:
            for member in range(members):
                fit(make_busy_bnn, make_busy_data, epochs, member, folder)

    def by_bare_tasks() -> None:
        run_bare(ray, make_busy_bnn, make_busy_data, epochs, range(members))

    bare, launched = [], []
    for _ in range(rounds):
        serial = seconds(serially)
        bare.append(serial / seconds(by_bare_tasks))
        launched.append(
            serial / seconds(lambda: run_launched(make_busy_bnn, make_busy_data, epochs, members))
        )
    return {
        "busy_members": members,
        "rounds": rounds,
        "bare_speed_up": statistics.median(bare),
        "launched_speed_up": statistics.median(launched),
        "bare_speed_ups": bare,
        "launched_speed_ups": launched,
    }


def judge(result: dict[str, Any]) -> dict[str, bool]:
    """Which bars hold.

    >>> judge({"driver_milliseconds_per_member": 5.0, "driver_megabytes_growth": 60.0,
    ...        "time_ratio": 1.2, "launched_speed_up": 1.5, "bare_speed_up": 1.52})
    {'driver time': True, 'driver memory': False, 'time of bare tasks': True, 'speed-up': True}
    """
    enough = min(SPEED_BAR, 0.95 * result["bare_speed_up"])
    return {
        "driver time": result["driver_milliseconds_per_member"] <= MILLISECONDS_BAR,
        "driver memory": result["driver_megabytes_growth"] <= MEGABYTES_BAR,
        "time of bare tasks": result["time_ratio"] <= TIME_BAR,
        "speed-up": result["launched_speed_up"] >= enough,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the JSON file if one is asked for."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launch_scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--members", type=int, default=1000, help="trivial members")
    parser.add_argument("--epochs", type=int, default=60, help="epochs of the busy members")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the busy members")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    options = parser.parse_args(arguments)
    if min(options.members // 20, options.epochs, options.rounds) < 1:
        parser.error("--members is at least 20, --epochs and --rounds are at least 1")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)  # before the work, not after it
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    load = os.getloadavg()[0]
    if not ray.is_initialized():
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False,
            object_store_memory=80 * 2**20,
        )  # fmt: skip
    run_launched(make_bnn, make_data, 1, 8)  # workers that have imported everything
    result = measure_many(ray, options.members)
    result |= measure_busy(ray, 8, options.epochs, options.rounds)
    verdicts = judge(result)
    for name, value in result.items():
        shown = round(value, 2) if isinstance(value, float) else value
        print(f"{name.replace('_', ' '):32} {shown}")
    for bar, held in verdicts.items():
        print(f"{'pass' if held else 'FAIL'}  {bar}")
    result = {
        "cores": os.cpu_count(),
        "load": round(load, 2),
        "versions": versions(["ray", "lightning-bnn"]),
        **result,
        "bars_hold": verdicts,
    }
    write(options.json, "launch_scale", arguments, result)


if __name__ == "__main__":
    main()
