"""Exact resume: the order of the data, and the loops of Lightning.

A Lightning checkpoint holds weights, optimizers and counters, but not where a shuffled
data loader was.
Here a training loader is wrapped so that the order of its epoch k is a function of one seed
and k alone. Its place is saved with the loop; on resume the same order is made again and the
batches that were seen are passed over. So the next batch is the one that would have come.

Lightning resumes well in the middle of an epoch. From a checkpoint of an epoch's last batch it
leaves out the end of the epoch and then counts one epoch too few, so that a second resume goes
wrong; from one of an epoch's end, where steps decide the length of the fit, it ends the epoch
twice. It also leaves out the step of ``ReduceLROnPlateau`` at the end of the epoch in which it
resumes. :class:`Restart` puts that right. Three things are as with any module of Lightning: a
validation that was due at a checkpoint of a step within an epoch is not made up for, a fit that
``max_steps`` has ended within an epoch and that is continued with more steps counts that epoch as
one of its own, and from the last checkpoint of a fit that ``EarlyStopping`` has ended it trains on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import chain, islice
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DistributedSampler

from lightning_bnn.lightning import TrainerFn, TrainerStatus, pl, rank_zero_warn
from lightning_bnn.random import isolated_random_state, mix_seeds

__all__ = ["Restart", "ResumableLoader", "loader_generators", "note_fit"]

_FITS: WeakKeyDictionary[pl.Trainer, threading.Thread] = WeakKeyDictionary()


def note_fit(trainer: pl.Trainer) -> None:
    """Warn if another thread of this process is fitting: torch's random numbers are of them all."""
    running = TrainerStatus.RUNNING, TrainerFn.FITTING
    here = threading.current_thread()
    if any(
        thread is not here and thread.is_alive() and (fit.state.status, fit.state.fn) == running
        for fit, thread in list(_FITS.items())
    ):
        rank_zero_warn(
            "Another thread of this process is fitting, too. Both take random numbers from torch's "
            "one generator, so that neither gives the same result again. Use a process for each."
        )
    _FITS[trainer] = here


class ResumableLoader:
    """A data loader whose order is a function of (seed, epoch), and whose place can be saved.

    Lightning saves ``state_dict()`` with the fit loop and calls ``load_state_dict()`` before
    the first batch. Every other attribute is the wrapped loader's. One thing is not repeated:
    random numbers that persistent workers draw by themselves, for they are seeded once.

    Args:
        loader: Any iterable of batches, such as a ``DataLoader``.
        seed: Decides, with ``rank``, the order of every epoch.
        rank: The rank of this process.
        epoch: Gives the current epoch; by default each pass over the data is one.
        limit: The number of batches after which an epoch ends, if not the loader's length.
        progress: Gives the number of batches of this epoch that were used so far, where that
            may differ from the number that was handed out (Lightning fetches one ahead when a
            loader has no length).
        opener: Makes the iterator of an epoch from its number and the rank, in place of
            ``iter(loader)``; its order must be a function of these and of the global generators.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = ResumableLoader(DataLoader(range(6), shuffle=True), seed=1)
        >>> batches = iter(loader)
        >>> first = next(batches)
        >>> state = loader.state_dict()
        >>> rest = [int(batch) for batch in batches]
        >>> loader = ResumableLoader(DataLoader(range(6), shuffle=True), seed=2)
        >>> loader.load_state_dict(state)
        >>> rest == [int(batch) for batch in loader]
        True
    """

    def __init__(
        self,
        loader: Any,
        seed: int,
        rank: int = 0,
        epoch: Callable[[], int] | None = None,
        limit: float = float("inf"),
        progress: Callable[[], int] | None = None,
        opener: Callable[[int, int], Iterator[Any]] | None = None,
    ) -> None:
        self.loader = loader
        self.opener = opener
        self._seed, self._rank, self._limit = seed, rank, limit
        self._current_epoch = epoch
        self._epoch = -1
        self._seen = 0
        self._resuming = False
        self._progress = progress

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if not self._resuming:
            self._epoch = self._current_epoch() if self._current_epoch else self._epoch + 1
            self._seen = 0
        self._resuming = False
        seed = mix_seeds(self._seed, self._epoch, self._rank)
        with isolated_random_state(seed):
            for generator in loader_generators(self.loader):
                generator.manual_seed(seed)
            for owner in _order_makers(self.loader):
                if isinstance(owner, DistributedSampler):  # Lightning's has the process's own seed
                    owner.seed = self._seed
            opener = self.opener
            if opener is None and getattr(self.loader, "_iterator", None) is not None:
                # A loader with persistent workers draws a seed for them before its first order
                # only: with one drawn here, the order does not depend on how often it was asked.
                torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            batches = iter(self.loader) if opener is None else opener(self._epoch, self._rank)
            # Fetching what was seen is the price of being exact: samplers, workers and their
            # augmentation all stand where they stood. The first fetch of an epoch belongs in
            # here too, because a sampler draws its order then.
            first = [] if self._seen else list(islice(batches, 1))
            for _ in range(self._seen):
                next(batches, None)
        for batch in chain(first, batches):
            self._seen += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The seed, the epoch and the number of its batches that were used."""
        seen = self._seen if self._progress is None else self._progress()
        return {"seed": self._seed, "epoch": self._epoch, "seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch that was used."""
        self._seed, self._epoch, self._seen = state["seed"], state["epoch"], state["seen"]
        self._resuming = self._epoch >= 0 and 0 < self._seen < min(self._length(), self._limit)

    def _length(self) -> float:
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return float("inf")


def loader_generators(loader: Any) -> list[torch.Generator]:
    """The generators that the user gave to a loader or its samplers, which decide its order."""
    generators = [getattr(owner, "generator", None) for owner in _order_makers(loader)]
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())


def _order_makers(loader: Any) -> list[Any]:
    batches = getattr(loader, "batch_sampler", None)
    return [loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]


class Restart:
    """Where a checkpoint was made, and how Lightning's loops resume from there.

    It uses names that are private to Lightning, which has no other way to say where a fit stands.

    Args:
        loops: The state of the fit loop in a checkpoint.
        monitored: The metric that a scheduler waits for, if it was known; None in old checkpoints.
    """

    def __init__(
        self, loops: Mapping[str, Any], monitored: Mapping[str, Any] | None = None
    ) -> None:
        self._monitored = monitored
        self._epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
        total, counts = self._epochs["total"], batches["total"]
        self._between_epochs = 0 < total["ready"] == total["processed"]
        self._within_epoch_end = total["completed"] < total["processed"]
        saved_in_batch = counts["completed"] == counts["processed"] - 1
        self._after_last_batch = (
            not self._between_epochs and batches["is_last_batch"] and saved_in_batch
        )
        self._batches = batches["current"]["ready"]

    def check(self, trainer: pl.Trainer) -> None:
        """Warn where gradients had been accumulated when the checkpoint was made, and are lost."""
        window = trainer.accumulate_grad_batches
        whole = self._between_epochs or self._after_last_batch
        if not whole and self._batches % window:
            rank_zero_warn(
                f"The checkpoint was made after {self._batches} batches of an epoch, in the middle "
                f"of the {window} batches whose gradients are accumulated, and holds none of them: "
                "the resumed fit will differ a little. Validate, and save, after a multiple of "
                f"{window} batches."
            )

    def begin(self, trainer: pl.Trainer) -> None:
        """Correct the loops, when they have restored themselves and before the first batch."""
        loop = trainer.fit_loop
        inner: Any = loop.epoch_loop
        trainer._logger_connector._callback_metrics.update(self._monitored or {})
        if self._between_epochs:
            if self._within_epoch_end and self._monitored:
                inner.update_lr_schedulers("epoch", update_plateau_schedulers=True)
            counters: Any = (loop.epoch_progress.total, loop.epoch_progress.current)
            for progress in counters:
                progress.ready = progress.started = progress.completed = progress.processed
            loop._restarting = inner.restarting = False
            loop.reset_restart_stage()
            self._reset(inner)
            assert loop._data_fetcher is not None
            iter(loop._data_fetcher)  # a batch of the epoch before may have been fetched
        elif self._after_last_batch:
            loop.epoch_progress.load_state_dict(dict(self._epochs))
            inner.batch_progress.increment_completed()
            self._reset(inner)
            inner.val_loop.restarting = False
            if inner._should_check_val_fx(loop._data_fetcher):
                stages = import_module(type(inner).__module__).RestartStage
                # it validates before it looks for a next batch, and counts the step then
                inner._restart_stage = stages.RESTARTED_ON_LAST
                stages = import_module(type(inner.val_loop).__module__).RestartStage
                inner.val_loop._restart_stage = stages.RESTARTED_MID_EVALUATION
            else:
                inner.val_loop._has_run = True  # there is nothing to do but the end of the epoch
        else:
            self._note_saved(trainer)

    def begin_epoch(self, trainer: pl.Trainer) -> None:
        """Let an epoch start anew: the one before, of which nothing was left, has reset nothing."""
        if self._after_last_batch:
            trainer.fit_loop.epoch_loop.restarting = False
            self._reset(trainer.fit_loop.epoch_loop)
        self._note_saved(trainer)

    def end_epoch(self, trainer: pl.Trainer) -> None:
        """Let the schedulers that wait for a metric step at the end of the epoch resumed in."""
        if self._monitored is not None:
            trainer.fit_loop._restarting = False

    @staticmethod
    def _note_saved(trainer: pl.Trainer) -> None:
        """Keep callbacks from saving this step again among the batches that are accumulated next.

        Such a checkpoint would take the place of the good one, and hold none of their gradients.
        """
        for callback in trainer.checkpoint_callbacks:
            if hasattr(callback, "_last_global_step_saved"):
                callback._last_global_step_saved = trainer.global_step

    @staticmethod
    def _reset(inner: Any) -> None:
        inner.reset_restart_stage()
        inner.val_loop.reset_restart_stage()
