"""One more pass over the data of a trainer, which the training does not notice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import RunningStage, pl
from lightning_bnn.random import isolated_random_state
from lightning_bnn.strategies.resume import ResumableLoader, loader_generators

__all__ = ["load_validation_data", "single_loader", "training_batches", "validation_batches"]


@contextmanager
def training_batches(
    trainer: pl.Trainer,
    limit: int | None = None,
    seed: int = 0,
    loader: Any = None,
    own_share: bool = False,
) -> Iterator[Iterator[Any]]:
    """The batches of a pass over the training data, on the training's device.

    Hooks of the module see the trainer as it is in training, so that augmentation takes place. The
    pass runs in this process, in an order that the seed decides. The loader that is in use, its
    samplers' generators and the global random state are left as they are. (A loader that is no
    ``DataLoader`` is iterated once more; data that change by being read cannot be left alone.)
    Where a sampler shares the data out to several ranks, all of them see the share of the first.

    Args:
        trainer: A trainer that fits, or has fitted.
        limit: The most batches; None for all.
        seed: Decides the order, and what augmentation draws.
        loader: The training data; by default those that the trainer has. It drops them when it
            validates or tests.
        own_share: Whether each rank sees its own share instead, and no example is seen twice.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> from lightning_bnn import VariationalBNN
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> loader = DataLoader(TensorDataset(torch.randn(8, 2), torch.randn(8, 1)), batch_size=4)
        >>> trainer = pl.Trainer(max_steps=1, accelerator="cpu", logger=False,
        ...                      enable_checkpointing=False, enable_progress_bar=False,
        ...                      enable_model_summary=False)
        >>> trainer.fit(VariationalBNN(nn.Linear(2, 1), Gaussian(0.1)), loader)
        >>> with training_batches(trainer, seed=1) as batches:
        ...     [len(inputs) for inputs, targets in batches]
        [4, 4]
    """
    loader = single_loader(trainer.train_dataloader if loader is None else loader)
    generators = loader_generators(loader)
    states = [generator.get_state() for generator in generators]
    stage = trainer.state.stage
    with isolated_random_state(seed):
        try:
            for generator in generators:
                generator.manual_seed(seed)
            trainer.training = True
            yield (_prepared(trainer, batch) for batch in islice(_copied(loader, own_share), limit))
        finally:
            trainer.state.stage = stage
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def load_validation_data(trainer: Any) -> None:
    """Set the validation data up as a validation would; none has come by the end of the fit."""
    stage, trainer.state.stage = trainer.state.stage, RunningStage.VALIDATING
    try:
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
    finally:
        trainer.state.stage = stage


@contextmanager
def validation_batches(trainer: Any, seed: int = 0) -> Iterator[Iterator[Any]]:
    """The batches of a pass over the first of the trainer's validation data, of this process.

    Args:
        trainer: A trainer that fits with validation data.
        seed: Decides what is random in the data.
    """
    if trainer.val_dataloaders is None:
        load_validation_data(trainer)
    loaders, stage = trainer.val_dataloaders, trainer.state.stage
    several = isinstance(loaders, (list, tuple, dict))
    loader = (
        next(iter(loaders.values() if isinstance(loaders, dict) else loaders))
        if several
        else loaders
    )
    while isinstance(loader, ResumableLoader):
        loader = loader.loader
    most = trainer.num_val_batches[0]
    limit = None if math.isinf(most) else int(most)
    with isolated_random_state(seed):
        try:
            trainer.validating = True
            yield (_prepared(trainer, batch) for batch in islice(_copied(loader, True), limit))
        finally:
            trainer.state.stage = stage


def single_loader(loader: Any) -> Any:
    """The user's loader, or a ConfigurationError where there are several.

    Example:
        >>> single_loader([DataLoader([1]), DataLoader([2])])
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: A pass over the training data, as for a ...
    """
    while isinstance(loader, ResumableLoader):
        loader = loader.loader
    members = loader.values() if isinstance(loader, dict) else loader
    if isinstance(loader, (list, tuple, dict)) and any(
        isinstance(member, (DataLoader, ResumableLoader)) for member in members
    ):
        raise ConfigurationError(
            "A pass over the training data, as for a curvature, a closed form or BatchNorm's "
            f"statistics, needs one data loader, by itself; the trainer has a "
            f"{type(loader).__name__} with {len(loader)}. Pass one that gives all of it."
        )
    return loader


def _copied(loader: Any, own_share: bool) -> Any:
    """A loader of the same batches without worker processes, and so with an iterator of its own."""
    if not isinstance(loader, DataLoader):
        return loader
    share = _without_repeats if own_share else _of_first_rank
    copied = copy(loader)  # of any subclass: what it makes of batches must stay
    vars(copied).update(
        sampler=_with(share, loader.sampler),
        batch_sampler=_with(share, loader.batch_sampler),
        num_workers=0, timeout=0, persistent_workers=False, generator=None,
    )  # fmt: skip
    return copied


def _with(share: Callable[[Any], Any], sampler: Any) -> Any:
    """A sampler, or a batch sampler around one, with another share of the data where it has one."""
    inner = getattr(sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        return share(sampler)
    if isinstance(inner, DistributedSampler):
        sampler = copy(sampler)
        sampler.sampler = share(inner)
    return sampler


def _of_first_rank(sampler: Any) -> Any:
    sampler = copy(sampler)
    sampler.rank = 0
    return sampler


def _without_repeats(sampler: Any) -> Any:
    """The share of this rank, without the examples that are repeated so that all have as many."""
    if type(sampler) is not DistributedSampler or sampler.drop_last:
        return sampler
    data: Any = sampler.dataset
    return range(sampler.rank, len(data), sampler.num_replicas)


def _prepared(trainer: pl.Trainer, batch: Any) -> Any:
    """What Lightning does to a batch before the training step."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
