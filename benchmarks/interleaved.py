"""Timing contenders against a plain step in one interleaved run.

In every round each contender takes a turn of a few steps, and the order rotates from round to
round. A ratio is formed within a round, so that a machine that slows down for a while slows both
its sides. The first rounds, and the first step of each turn, are not counted.
"""

from __future__ import annotations

import gc
import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.peers.contender import Contender, Fit, Problem
from benchmarks.peers.plain import PLAIN, PLAIN_LIGHTNING

__all__ = ["BARE", "TRAINER", "Entry", "build", "fewer_steps", "interleave", "prepare", "ratios"]

BARE, TRAINER = "bare loop", "Trainer.fit"
SETTLING_STEPS = 1  # at the start of a turn: the caches still hold another contender's weights


Run = Callable[[int], float]  # a turn of so many steps, giving the seconds of one


@dataclass
class Entry:
    """One contender in one mode: the time of a step in each counted round, or why there is none.

    Attributes:
        contender: The library.
        mode: ``BARE`` or ``TRAINER``.
        baseline: The plain step it is compared with, by name.
        run: Takes a turn of so many timed steps and gives the seconds per step.
        reason: Why there is no figure; empty where there is one to give.
        seconds: Seconds per step, one figure a round.
    """

    contender: Contender
    mode: str
    baseline: str = PLAIN.name
    run: Run | None = None
    reason: str = ""
    seconds: list[float] = field(default_factory=list)


def time_bare(step: Callable[[], Any], steps: int) -> float:
    """Seconds per step of a bare loop; raises ArithmeticError if the loss is not finite."""
    for _ in range(SETTLING_STEPS):
        loss = float(step())
        if not math.isfinite(loss):
            raise ArithmeticError(f"the loss is {loss}")
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def time_fit(fit: Fit, steps: int) -> float:
    """Seconds per step inside ``Trainer.fit``, from the end of one batch to the end of a later one.

    Starting and ending the fit is not counted; fetching the next batch, the hooks and what the
    module logs are.
    """
    lightning = importlib.import_module(fit.lightning)
    ends: list[float] = []

    class Clock(lightning.Callback):  # type: ignore[name-defined]
        def on_train_batch_end(self, *_: Any) -> None:
            ends.append(time.perf_counter())

    trainer = (fit.trainer_class or lightning.Trainer)(
        max_steps=SETTLING_STEPS + steps,
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        callbacks=[Clock()],
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if isinstance(fit.data, lightning.LightningDataModule):
        trainer.fit(fit.module, datamodule=fit.data)
    else:
        trainer.fit(fit.module, train_dataloaders=fit.data)
    if len(ends) != SETTLING_STEPS + steps:
        raise RuntimeError(f"the fit took {len(ends)} steps, not {SETTLING_STEPS + steps}")
    return (ends[-1] - ends[SETTLING_STEPS - 1]) / steps


def explain(error: Exception) -> str:
    """One line that fits into the table."""
    word = "not available" if isinstance(error, ImportError) else "failed"
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{word}: {first_line.split(' (/')[0]}"[:90]


def build(contender: Contender, mode: str, problem: Problem) -> Entry:
    """Prepare a contender; whatever its library raises becomes the reason why it has no figure."""
    entry = Entry(contender, mode)
    try:
        torch.manual_seed(0)
        if mode == BARE:
            step = contender.make_step(problem)
            entry.run = lambda steps: time_bare(step, steps)
        elif contender.make_fit is None:
            entry.reason = "-"  # not a LightningModule
        else:
            fit = contender.make_fit(problem)
            if fit.lightning != "pytorch_lightning":
                entry.baseline = PLAIN_LIGHTNING.name
            entry.run = lambda steps: time_fit(fit, steps)
    except Exception as error:
        entry.reason = explain(error)
    return entry


def prepare(problem: Problem, contenders: Sequence[Contender]) -> list[Entry]:
    """All contenders in both modes on one network, the plain step, which is added, first."""
    entries = [
        build(contender, mode, problem)
        for contender in (PLAIN, *contenders)
        for mode in (BARE, TRAINER)
    ]
    if any(entry.run and entry.baseline == PLAIN_LIGHTNING.name for entry in entries):
        entries.append(build(PLAIN_LIGHTNING, TRAINER, problem))
    return entries


def interleave(entries: Sequence[Entry], steps: int, rounds: int, warm_up: int) -> None:
    """Let all take turns, round by round, the order rotating.

    Args:
        entries: Who takes turns, the plain ones first.
        steps: Timed steps in a turn.
        rounds: Counted rounds.
        warm_up: Rounds before them, not counted.
    """
    running = [entry for entry in entries if entry.run]
    gc.collect()
    gc.freeze()  # the collection before each turn then looks only at what the turns left behind
    try:
        for number in range(-warm_up, rounds):
            shift = number % len(running)
            for entry in running[shift:] + running[:shift]:
                take_turn(entry, steps, counted=number >= 0)
    finally:
        gc.unfreeze()


def fewer_steps(run: Run | None, members: int) -> Run | None:
    """A turn of several networks at once: a step is that of all of them, so there are fewer."""
    return run and (lambda steps: run(max(1, steps // members)))


def take_turn(entry: Entry, steps: int, counted: bool) -> None:
    """Run one turn; a contender that fails drops out, the plain step may not."""
    if entry.run is None:
        return
    gc.collect()  # no contender pays for another's garbage
    try:
        seconds = entry.run(steps)
    except Exception as error:
        if entry.contender in (PLAIN, PLAIN_LIGHTNING):
            raise
        entry.run, entry.reason, entry.seconds = None, explain(error), []
        return
    if counted:
        entry.seconds.append(seconds)


def ratios(entry: Entry, entries: Sequence[Entry]) -> list[float]:
    """Per round: this contender's step over the plain step of the same round and mode."""
    for plain in entries:
        if (plain.contender.name, plain.mode) == (entry.baseline, entry.mode):
            return [mine / base for mine, base in zip(entry.seconds, plain.seconds, strict=True)]
    raise LookupError(f"no baseline {entry.baseline!r} was measured in the mode {entry.mode!r}")
