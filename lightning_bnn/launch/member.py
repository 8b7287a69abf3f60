"""One attempt at one unit, in the process that trains it: make, resume, fit, save, commit.

Nothing here knows of Ray: the same function runs in a Ray task, in each rank of a Ray Train worker
group, or by hand.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.cloud_io import get_filesystem
from pytorch_lightning.callbacks import ModelCheckpoint, ProgressBar
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.plugins.environments import ClusterEnvironment, LightningEnvironment

from lightning_bnn.callbacks import SampleCollector, SWAGMoments
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.checkpoints import (
    UnitCheckpoint,
    last_checkpoint,
    plain_types,
    remove_checkpoints,
)
from lightning_bnn.launch.draws import adopt_draws
from lightning_bnn.launch.modes import AgreedMode
from lightning_bnn.launch.progress import ProgressCallback, plain_metrics
from lightning_bnn.launch.recipe import Parts, Recipe
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.saving import save_members
from lightning_bnn.launch.units import Unit, unit_seed
from lightning_bnn.strategies.base import Strategy

__all__ = ["Attempt", "check_trainer_options", "run_attempt"]

# What the launcher decides, by its own options; what is no wish, and what to do instead.
_TAKEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "default_root_dir": ((None,), "everything goes to storage="),
    "devices": ((None, 1, "1", [0], "auto"), "use devices= of launch"),
    "num_nodes": ((None, 1), "use devices= of launch"),
    "fast_dev_run": ((None, False, 0), "fit one member by hand to try it"),
}


@dataclass(frozen=True)
class Attempt:
    """What a worker has to know.

    Attributes:
        recipe: Makes the strategy, the data and the trainer's options.
        storage: Where the run is stored.
        unit: What to train.
        number: The number of the attempt, from 1.
        seed: The root of all seeds.
        threads: Threads of torch; None leaves them alone.
        gpu: Whether the unit was given a GPU.
        checkpoint_seconds: The least time between two checkpoints.
        progress_seconds: The time between two signs of life.
        versions: Those of the driver, which the worker must share.
    """

    recipe: Recipe
    storage: str
    unit: Unit
    number: int
    seed: int
    threads: int | None = None
    gpu: bool = False
    checkpoint_seconds: float = 60.0
    progress_seconds: float = 5.0
    versions: Mapping[str, str] = field(default_factory=dict)


def run_attempt(
    attempt: Attempt,
    facts: Mapping[str, Any] | None = None,
    trainer_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a unit to its end and commit it; if it was committed before, give that.

    Args:
        attempt: What to do.
        facts: What to tell of the place, such as the node.
        trainer_options: Added to the trainer's options, for several devices: on each of them runs
            this function, told by ``rank`` which one it is. A ``strategy`` is a function of the
            one that the recipe asks for.

    Returns:
        The result as it was committed.

    Raises:
        FencedError: Another attempt has taken the place of this one.
    """
    records, unit = RunRecords(attempt.storage), attempt.unit
    rank = (trainer_options or {}).get("rank")
    # a rank must not turn back alone: the others would wait for it
    if rank is None and (done := records.committed(unit)) is not None:
        return dict(done["result"])
    first_rank = not rank
    if first_rank:
        records.check_granted(unit, attempt.number)
    if attempt.threads is not None:
        torch.set_num_threads(attempt.threads)  # a reused worker has those of its last task
    folder = records.folder(unit, attempt.number)
    begin = time.time()
    progress = None
    if first_rank:
        progress = ProgressCallback(records, unit, attempt.number, attempt.progress_seconds, facts)
    try:
        # after everything that could draw, before everything that may
        pl.seed_everything(unit_seed(attempt.seed, unit.members), workers=True, verbose=False)
        parts = attempt.recipe.build(unit.members, attempt.seed, folder)
        _check_numbers(parts.strategy, unit)
        checkpoint = UnitCheckpoint(
            folder,
            attempt.checkpoint_seconds,
            lambda: records.check_granted(unit, attempt.number),
        )
        own: list[Any] = [AgreedMode(records, unit, parts.strategy), checkpoint]
        own = own if progress is None else [progress, *own]
        trainer = _make_trainer(parts, folder, attempt.gpu, own, trainer_options or {})
        agree = None if rank is None else trainer.strategy.broadcast
        with last_checkpoint(records, unit, agree) as found:
            path, before = found or (None, None)
            adopt_draws(records, unit, trainer, folder, before)
            with plain_types():
                trainer.fit(parts.strategy, parts.data, ckpt_path=path, weights_only=True)
        result = _leave_behind(parts.strategy, trainer, records, attempt, folder)
        result["metrics"] = {**checkpoint.metrics, **result["metrics"]}
        result |= {"seconds": time.time() - begin, **(facts or {})}
        if trainer.is_global_zero:
            records.commit(unit, attempt.number, result)
            remove_checkpoints(records, unit)
        trainer.strategy.barrier()
        return result
    except BaseException:
        if progress is not None:
            progress.tell(phase="failed")
        raise
    finally:
        if progress is not None:
            progress.stop()


def _check_numbers(strategy: Strategy, unit: Unit) -> None:
    """The strategy has to train the members that it was told to."""
    for name in ("member_numbers", "chain_numbers"):
        numbers = getattr(strategy, name, None)
        if numbers is None:
            continue
        if len(unit.members) > 1 and tuple(numbers) != unit.members:
            raise ConfigurationError(
                f"make_bnn was asked for the members {list(unit.members)} and made a "
                f"{type(strategy).__name__} of {list(numbers)}. Hand its argument members on "
                "(members=members, or chains=members), and seed as well."
            )
        return
    if len(unit.members) > 1:
        raise ConfigurationError(
            f"{type(strategy).__name__} trains one network, so that {len(unit.members)} members "
            "cannot be stacked. Use stack=1."
        )


def check_trainer_options(options: Mapping[str, Any]) -> None:
    """Refuse options of the trainer that are the launcher's to set.

    Example:
        >>> check_trainer_options({"max_epochs": 3, "devices": 1})
        >>> check_trainer_options({"devices": 2})
        Traceback (most recent call last):
        ...
        lightning_bnn.errors.ConfigurationError: trainer= has devices=2, which ...
    """
    for name, (unset, instead) in _TAKEN.items():
        if options.get(name) not in unset:
            raise ConfigurationError(
                f"trainer= has {name}={options[name]!r}, which the launcher sets: {instead}."
            )


def keep_apart(folder: str, loggers: Iterable[Any], callbacks: Iterable[Any]) -> None:
    """Let loggers and checkpoints that all members share write to the folder of this attempt."""
    for logger in loggers:
        if isinstance(logger, (CSVLogger, TensorBoardLogger)):
            logger._root_dir, logger._fs = folder, get_filesystem(folder)
            if isinstance(logger, CSVLogger):
                logger._save_dir = folder
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            name = os.path.basename(str(callback.dirpath).rstrip("/")) or "best"
            callback.dirpath = f"{folder}/{name}"


def _listed(options: dict[str, Any], name: str) -> list[Any]:
    """What an option that may be one thing or several holds; it is taken out."""
    given = options.pop(name, None) or []
    return [*given] if isinstance(given, (list, tuple)) else [given]


def _make_trainer(
    parts: Parts, folder: str, gpu: bool, own: list[Any], added: Mapping[str, Any]
) -> pl.Trainer:
    check_trainer_options(parts.trainer)
    options = {name: value for name, value in parts.trainer.items() if name not in _TAKEN}
    # nobody sees the bars of many members
    callbacks = [one for one in _listed(options, "callbacks") if not isinstance(one, ProgressBar)]
    logger = options.pop("logger", True)
    if logger is True or logger is None:
        logger = CSVLogger(folder, name="logs", version="")
    if parts.shared:
        loggers = logger if isinstance(logger, (list, tuple)) else [logger]
        keep_apart(folder, loggers, callbacks)
    accelerator = options.pop("accelerator", "auto")
    if accelerator == "auto":
        # A task without a GPU is not kept from seeing those of the node.
        accelerator = "gpu" if gpu else "cpu"
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigurationError(
            "A GPU was asked for with resources= and torch finds none on "
            f"{os.uname().nodename}. Install torch with CUDA there, or train on the CPU with "
            "trainer={'accelerator': 'cpu'}."
        )
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    options.pop("enable_checkpointing", None)  # ours is needed, and keeps Lightning's own away
    defaults = {**quiet, "devices": 1}
    placed = {name: value for name, value in added.items() if name != "rank"}
    if "strategy" in placed:
        placed["strategy"] = placed["strategy"](options.pop("strategy", None))
    plugins = _listed(options, "plugins")
    if "plugins" in placed:
        placed["plugins"] = [*plugins, *placed["plugins"]]
    elif not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        placed["plugins"] = [*plugins, LightningEnvironment()]  # else a SLURM job would be found
    else:
        placed["plugins"] = plugins
    return pl.Trainer(
        **{
            **defaults,
            **options,
            "accelerator": accelerator,
            "default_root_dir": folder,
            "logger": logger,
            "callbacks": [*callbacks, *own],
            **placed,
        }
    )


def _leave_behind(
    strategy: Strategy, trainer: pl.Trainer, records: RunRecords, attempt: Attempt, folder: str
) -> dict[str, Any]:
    """Save what the members leave behind; on all ranks, as SWAG may read data on each."""
    found = {"posterior": save_members(strategy, trainer, attempt.unit, folder)}
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, SWAGMoments) and callback.snapshots >= 2:
            found["swag"] = save_members(callback, trainer, attempt.unit, folder)
    collected = [len(one.steps) for one in callbacks if isinstance(one, SampleCollector)]
    return {
        "members": found,
        "attempt": attempt.number,
        "metrics": plain_metrics(trainer.callback_metrics),
        "asked": {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps},
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        **({"draws": collected[0]} if collected else {}),
    }
