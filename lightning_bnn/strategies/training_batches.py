"""A look at the training data that the training does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import islice
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.random import isolated_random_state
from lightning_bnn.strategies.resume import ResumableLoader

__all__ = ["single_loader", "training_batches"]


@contextmanager
def training_batches(
    trainer: pl.Trainer,
    count: int | None,
    seed: int,
    loader: Any = None,
    own_share: bool = False,
) -> Iterator[Iterator[Any]]:
    """The first batches of a pass over the training data, on the training's device.

    Hooks of the module see the trainer as it is in training, so that augmentation takes place.

    The pass is one of its own, in this process, in an order that the seed decides. The loader that
    is in use, its samplers' generators and the global random state are left as they are. (A
    loader that is no ``DataLoader`` is iterated once more; data that change by being read cannot
    be left alone.) Where a sampler shares the data out to several processes, all of them see the
    share of the first.

    Args:
        trainer: A trainer that fits, or has fitted.
        count: The number of batches; fewer come where the data have fewer. None for all.
        seed: Decides the order, and what augmentation draws.
        loader: The training data; by default those that the trainer has. It drops them when it
            validates or tests.
        own_share: Whether each process sees its own share of the data instead.
    """
    loader = single_loader(trainer.train_dataloader if loader is None else loader)
    generators = _generators(loader)
    states = [generator.get_state() for generator in generators]
    stage = trainer.state.stage
    with isolated_random_state(seed):
        try:
            for generator in generators:
                generator.manual_seed(seed)
            trainer.training = True
            yield (_to_device(trainer, batch) for batch in islice(_anew(loader, own_share), count))
        finally:
            trainer.state.stage = stage
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def single_loader(loader: Any) -> Any:
    """The user's own loader, or a ConfigurationError where there are several.

    Example:
        >>> single_loader([DataLoader([1]), DataLoader([2])])
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: BatchNorm's statistics need one training data ...
    """
    while isinstance(loader, ResumableLoader):
        loader = loader.loader
    if isinstance(loader, (list, tuple, dict)) and any(
        isinstance(one, (DataLoader, ResumableLoader))
        for one in (loader.values() if isinstance(loader, dict) else loader)
    ):
        raise ConfigurationError(
            "BatchNorm's statistics need one training data loader, by itself; the trainer has a "
            f"{type(loader).__name__} with {len(loader)}."
        )
    return loader


def _anew(loader: Any, own_share: bool) -> Any:
    """A loader of the same batches, whose iterator is not that of the training."""
    if not isinstance(loader, DataLoader):
        return loader
    share = (lambda sampler: sampler) if own_share else _share_of_first_rank
    if type(loader).__iter__ is not DataLoader.__iter__:  # what it makes of batches must stay
        own = copy(loader)
        shares = {"sampler": share(loader.sampler), "_iterator": None}
        vars(own).update(shares, batch_sampler=_batches(loader.batch_sampler, share))
        return own
    options: dict[str, Any] = {"collate_fn": loader.collate_fn}
    if isinstance(loader.dataset, IterableDataset):
        options.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    elif loader.batch_sampler is None:
        options.update(batch_size=None, sampler=share(loader.sampler))
    else:
        options.update(batch_sampler=_batches(loader.batch_sampler, share))
    return DataLoader(loader.dataset, **options)


def _batches(batches: Any, share: Callable[[Any], Any]) -> Any:
    if isinstance(getattr(batches, "sampler", None), DistributedSampler):
        batches = copy(batches)
        batches.sampler = share(batches.sampler)
    return batches


def _share_of_first_rank(sampler: Any) -> Any:
    if not isinstance(sampler, DistributedSampler):
        return sampler
    first = copy(sampler)
    first.rank = 0
    return first


def _generators(loader: Any) -> list[torch.Generator]:
    batches = getattr(loader, "batch_sampler", None)
    owners = (getattr(loader, "sampler", None), getattr(batches, "sampler", None), batches)
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def _to_device(trainer: pl.Trainer, batch: Any) -> Any:
    """What Lightning does to a batch before the training step."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
