"""One attempt at one unit, in the process that trains it: make, resume, fit, save, commit.

Nothing here knows of Ray: the same function runs in a Ray task, in each rank of a Ray Train worker
group, in a worker of another backend, or by hand.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_bnn.callbacks import SampleCollector, SWAGMoments
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.backend import Attempt, Outcome
from lightning_bnn.launch.checkpoints import (
    UnitCheckpoint,
    last_checkpoint,
    plain_types,
    remove_checkpoints,
)
from lightning_bnn.launch.patience import patiently
from lightning_bnn.launch.progress import ProgressCallback, plain_metrics
from lightning_bnn.launch.recipe import Parts, Recipe
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.saving import adopt_draws, member_ids, save_members
from lightning_bnn.launch.units import Unit, unit_seed
from lightning_bnn.lightning import (
    ClusterEnvironment,
    LightningEnvironment,
    ModelCheckpoint,
    ProgressBar,
    get_filesystem,
    pl,
)
from lightning_bnn.native.library import noise_source
from lightning_bnn.storage.files import open_directory
from lightning_bnn.strategies.bank_strategy import BankStrategy
from lightning_bnn.strategies.base import Strategy

__all__ = ["Place", "attempt_outcome", "check_trainer_options", "run_attempt"]

# What the launcher decides, by its own options; what is no wish, and what to do instead.
_TAKEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "default_root_dir": ((None,), "everything goes to storage="),
    "devices": ((None, 1, "1", [0], "auto"), "use devices= of launch"),
    "num_nodes": ((None, 1), "use devices= of launch"),
    "fast_dev_run": ((None, False, 0), "fit one member by hand to try it"),
}


@dataclass(frozen=True)
class Place:
    """Where an attempt runs.

    Attributes:
        facts: What to tell of it, such as the ``node`` and the ``device``.
        threads: Threads of torch; None leaves them alone.
        gpu: Whether the attempt was given a GPU.
        rank: Which rank this process is, of a unit on several devices; None on one.
        strategy: On several devices: gives Lightning's strategy for the one that was asked for.
        plugins: On several devices: Lightning's plugins.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    gpu: bool = False
    rank: int | None = None
    strategy: Callable[[Any], Any] | None = None
    plugins: tuple[Any, ...] = ()


def attempt_outcome(recipe: Recipe, attempt: Attempt, place: Place | None = None) -> Outcome:
    """Run an attempt, as a worker of a backend does; what it raises becomes text."""
    place = place or Place()
    try:
        return Outcome(run_attempt(recipe, attempt, place))
    except Exception as error:
        records = RunRecords(attempt.storage)
        told = records.progress(attempt.unit) or {}
        # the first rank has told its last step just now; how far others are nobody tells
        early = not place.rank and told.get("attempt") == attempt.number and not told.get("step")
        name = f"error-{place.rank}.txt" if place.rank else "error.txt"
        with suppress(Exception):  # the storage may be what failed
            folder = open_directory(records.folder(attempt.unit, attempt.number))
            folder.put(name, traceback.format_exc().encode())
        return Outcome.of_error(error, early)


def run_attempt(recipe: Recipe, attempt: Attempt, place: Place | None = None) -> dict[str, Any]:
    """Train a unit to its end and commit it; if it was committed before, give that.

    Args:
        recipe: Makes the strategy, the data and the trainer's options.
        attempt: What to do.
        place: Where; by default on the CPU of this process.

    Returns:
        The result as it was committed.

    Raises:
        FencedError: Another attempt has taken the place of this one.
    """
    place = place or Place()
    records, unit = RunRecords(attempt.storage), attempt.unit
    # a rank must not turn back alone: the others would wait for it
    if place.rank is None and (done := records.committed(unit)) is not None:
        return dict(done["result"])
    if place.threads is not None:
        torch.set_num_threads(place.threads)  # a reused worker has those of its last task
    if place.rank:
        return _fit(recipe, attempt, place, records, [])
    records.check_granted(unit, attempt.number)
    progress = ProgressCallback(
        records, unit, attempt.number, attempt.progress_seconds, place.facts
    )
    try:
        return _fit(recipe, attempt, place, records, [progress])
    except BaseException as error:
        progress.tell(phase="failed", error=Outcome.of_error(error).error)
        raise
    finally:
        progress.stop()


def _fit(
    recipe: Recipe, attempt: Attempt, place: Place, records: RunRecords, callbacks: list[Any]
) -> dict[str, Any]:
    begin, unit = time.time(), attempt.unit
    folder = records.folder(unit, attempt.number)
    # after everything that could draw, before everything that may
    pl.seed_everything(unit_seed(attempt.seed, unit.members), workers=True, verbose=False)
    parts = recipe.build(unit.members, attempt.seed, folder)
    _check_members(parts.strategy, unit)
    checkpoint = UnitCheckpoint(
        folder, attempt.checkpoint_seconds, lambda: records.check_granted(unit, attempt.number)
    )
    callbacks = [*callbacks, AgreedMode(records, unit, parts.strategy), checkpoint]
    trainer = _make_trainer(parts, folder, place, callbacks)
    agree = None if place.rank is None else trainer.strategy.broadcast
    with last_checkpoint(records, unit, agree) as last, plain_types():
        path, before = last or (None, None)
        adopt_draws(records, unit, trainer, folder, before)
        trainer.fit(parts.strategy, parts.data, ckpt_path=path, weights_only=True)
    result = _leave_behind(parts.strategy, trainer, attempt, folder)
    result["metrics"] = {**checkpoint.metrics, **result["metrics"]}
    result |= {"seconds": time.time() - begin, "host": socket.gethostname(), **place.facts}
    result["noise"] = noise_source()
    if trainer.is_global_zero:
        records.commit(unit, attempt.number, result)
        remove_checkpoints(records, unit)
    trainer.strategy.barrier()
    return result


def _check_members(strategy: Strategy, unit: Unit) -> None:
    """The strategy has to train the members that it was told to."""
    ids = member_ids(strategy)
    if len(unit.members) > 1 and ids != unit.members:
        raise ConfigurationError(
            f"make_bnn was asked for the members {list(unit.members)} and made a "
            f"{type(strategy).__name__} of {'one network' if ids is None else list(ids)}. Hand its "
            "argument members on (members=members, or chains=members) and seed, or use stack=1."
        )


class AgreedMode(pl.Callback):
    """Run a stack as an earlier attempt did; the first one writes down what it has measured.

    Stacked or as a loop: a strategy measures which is faster, and the two differ in the last bits.
    A later attempt at the same unit runs as the first one did, so that it ends with the same
    weights.

    Args:
        records: The records of the run.
        unit: What is trained.
        strategy: Its mode is set where one was agreed on.
    """

    def __init__(self, records: RunRecords, unit: Unit, strategy: Strategy) -> None:
        self._files, self._name = records.files, f"units/{unit.name}/mode"
        self._stack: Any = strategy.bank.stack if isinstance(strategy, BankStrategy) else None
        self._open = len(unit.members) > 1 and getattr(self._stack, "mode", None) == "auto"
        if self._open:
            self._adopt()

    def _adopt(self) -> None:
        mode = patiently(lambda: self._files.get(self._name))
        if mode is not None:
            self._stack.mode, self._open = mode.decode(), False

    def on_before_optimizer_step(self, trainer: pl.Trainer, *args: Any) -> None:
        """Write down how the first batch was run, before anything comes of it."""
        if self._open and trainer.is_global_zero:
            mode = self._stack.mode.encode()
            if not patiently(lambda: self._files.create(self._name, mode)):
                self._adopt()  # a zombie was first, and other attempts go by it
        self._open = False


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


def _as_list(option: Any) -> list[Any]:
    """What an option of the trainer holds that may be one thing or several."""
    return [*option] if isinstance(option, (list, tuple)) else [option] if option else []


def _make_trainer(parts: Parts, folder: str, place: Place, ours: list[Any]) -> pl.Trainer:
    check_trainer_options(parts.trainer)
    options = {name: value for name, value in parts.trainer.items() if name not in _TAKEN}
    # nobody sees the bars of many members
    given = _as_list(options.get("callbacks"))
    callbacks = [callback for callback in given if not isinstance(callback, ProgressBar)]
    if options.get("logger") in (None, True):
        options["logger"] = pl.loggers.CSVLogger(folder, name="logs", version="")
    if parts.shared:
        _keep_apart(folder, _as_list(options["logger"]), callbacks)
    if options.get("accelerator", "auto") == "auto":
        # a task without a GPU is not kept from seeing those of the node
        options["accelerator"] = "gpu" if place.gpu else "cpu"
    if options["accelerator"] == "gpu" and not torch.cuda.is_available():
        raise ConfigurationError(
            "A GPU was asked for with resources= and torch finds none on "
            f"{os.uname().nodename}. Install torch with CUDA there, or train on the CPU with "
            "trainer={'accelerator': 'cpu'}."
        )
    plugins = [*_as_list(options.get("plugins")), *place.plugins]
    if not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        plugins.append(LightningEnvironment())  # else a SLURM job would be found
    if place.strategy is not None:
        options["strategy"] = place.strategy(options.get("strategy"))
    options.pop("enable_checkpointing", None)  # ours is needed, and keeps Lightning's own away
    return pl.Trainer(
        **{
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
            "devices": 1 if place.rank is None else "auto",
            "default_root_dir": folder,
            "callbacks": [*callbacks, *ours],
            "plugins": plugins,
        }
    )


def _keep_apart(folder: str, loggers: Iterable[Any], callbacks: Iterable[Any]) -> None:
    """Let loggers and checkpoints that all members share write to the folder of this attempt."""
    for logger in loggers:
        if isinstance(logger, (pl.loggers.CSVLogger, pl.loggers.TensorBoardLogger)):
            logger._root_dir, logger._fs = folder, get_filesystem(folder)
            if isinstance(logger, pl.loggers.CSVLogger):
                logger._save_dir = folder
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            name = os.path.basename(str(callback.dirpath).rstrip("/")) or "best"
            callback.dirpath = f"{folder}/{name}"


def _leave_behind(
    strategy: Strategy, trainer: pl.Trainer, attempt: Attempt, folder: str
) -> dict[str, Any]:
    """Save what the members leave behind; on all ranks, as SWAG may read data on each."""
    members = {"posterior": save_members(strategy, trainer, attempt.unit, folder)}
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, SWAGMoments) and callback.snapshots >= 2:
            members["swag"] = save_members(callback, trainer, attempt.unit, folder)
    draws = [len(each.steps) for each in callbacks if isinstance(each, SampleCollector)]
    return {
        "members": members,
        "attempt": attempt.number,
        "metrics": plain_metrics(trainer.callback_metrics),
        "own_metrics": _own_metrics(strategy, attempt.unit),
        "asked": {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps},
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        **({"draws": draws[0]} if draws else {}),
    }


def _own_metrics(strategy: Strategy, unit: Unit) -> dict[str, dict[str, float | None]]:
    """By the number of the member, its own metrics where what was logged is of a whole stack."""
    if len(unit.members) == 1 or not isinstance(strategy, BankStrategy):
        return {}
    energies = strategy.bank.data_energies.tolist()  # on the last batch; none if there was none
    return {
        str(member): plain_metrics({"train_nll": energy})
        for member, energy in zip(unit.members, energies, strict=False)
    }
