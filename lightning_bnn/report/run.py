"""The models of a run, asked about the run's own data and about out-of-distribution data.

The strategy predicts with the snapshot of the running evaluation, the others with all their draws.
Batches pass through the trainer's hooks and precision as those of a step do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_bnn.lightning import pl
from lightning_bnn.posteriors import Posterior
from lightning_bnn.predictive import Predictive
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report.gather import (
    Batches,
    add,
    check_models,
    gather,
    numbered_batches,
    undisturbed,
)
from lightning_bnn.report.sections import Section
from lightning_bnn.report.statistics import Collection, Statistics
from lightning_bnn.strategies.base import Strategy

__all__ = ["RunModels", "evaluating"]


class RunModels:
    """A strategy in its trainer, and the posteriors that it is compared with.

    Args:
        trainer: The trainer.
        strategy: The strategy that runs in it.
        posteriors: The compared ones, by name.
        loaders: Loaders of out-of-distribution data, by name.
        class_names: Names of the classes.
        sections: Further parts of the pages.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        strategy: Strategy,
        posteriors: Mapping[str, Posterior],
        loaders: Mapping[str, Any],
        class_names: Sequence[str] | None = None,
        sections: Sequence[Section] = (),
    ) -> None:
        self.trainer, self.strategy = trainer, strategy
        self.posteriors, self.loaders = posteriors, loaders
        self.class_names, self.sections = class_names, sections
        self.own = type(strategy).__name__
        self._checked = False

    @property
    def names(self) -> list[str]:
        """The name of the strategy's class, and those of the others."""
        return [self.own, *self.posteriors]

    def check(self, batch: Any) -> None:
        """Predict the first batch with every model, and one of every out-of-distribution loader.

        Raises:
            DataError: A loader is empty, or its inputs do not go through the network.
            ConfigurationError: A compared model predicts something else, there are more or fewer
                names than classes, or a section cannot be made.
        """
        if self._checked:
            return
        self._checked = True
        asking = [section for section in self.sections if section.needs_posterior]
        if not (asking or self.posteriors or self.loaders or self.class_names):
            return
        own = self.strategy.posterior()  # no snapshot: how it runs draws is measured on several
        for section in asking:
            section.check({self.own: own})
        models: dict[str, Callable[[Any], Predictive]] = {
            self.own: lambda x: own.predict(x, draws=1)
        }
        for name, posterior in self.posteriors.items():
            posterior.to(self.strategy.device)
            models[name] = lambda x, p=posterior: p.predict(x, draws=1)  # type: ignore[misc]
        inputs = self.strategy.split(batch)[0]
        with isolated_random_state(), self.trainer.precision_plugin.forward_context():
            check_models(models, inputs, self.loaders, self._inputs, self.class_names)

    def add(
        self, into: Mapping[str, Statistics], predictive: Predictive, batch: Any, numbers: Tensor
    ) -> None:
        """Add a batch that the strategy has predicted, and what the others say of it."""
        inputs, targets = self.strategy.split(batch)
        for name, each in self._predict(inputs, predictive).items():
            add(into[name], each, numbers, targets, inputs)

    def gather(
        self,
        loader: Any,
        into: Mapping[str, Statistics],
        limit: float = float("inf"),
        prepared: bool = False,
    ) -> None:
        """Predict a whole loader, or at most so many of its batches, with all models.

        Args:
            loader: The loader.
            into: The statistics by model.
            limit: At most how many batches of the loader are looked at.
            prepared: Whether Lightning has prepared it for this process.
        """
        share = self._share | {"limit": limit, "prepared": prepared}
        gather(loader, into, self._split, self._predict, None, **share)

    def measure(self, statistics: Statistics, loader: Any, limit: float = float("inf")) -> None:
        """Let the sections that need it ask the strategy's posterior, on a prepared loader.

        With several processes each predicts its share, repeats left out, and the metrics add up
        what all of them saw: every process has to ask, and gets the same.

        Args:
            statistics: Of the strategy.
            loader: The loader.
            limit: At most how many of its batches are looked at.
        """

        def read() -> Iterator[tuple[Any, Tensor]]:
            options = self._share | {"limit": limit, "prepared": True}
            with undisturbed(loader), torch.no_grad():
                for batch, number in numbered_batches(loader, **options):
                    inputs, targets = self._split(batch)
                    kept = (number(len(targets)) >= 0).to(targets.device)
                    if bool(kept.any()):
                        yield apply_to_collection((inputs, targets), Tensor, lambda t, k=kept: t[k])

        forward = self.trainer.precision_plugin.forward_context
        for section in statistics.sections:
            if section.needs_posterior:
                with self.strategy.snapshot() as posterior, forward():
                    draws = self.strategy.draws_of(posterior)
                    section.measure(self.own, posterior, Batches(read), draws)

    def gather_ood(self, collection: Collection) -> None:
        """Predict all out-of-distribution loaders with all models."""
        for place, loader in self.loaders.items():
            gather(
                loader, collection.models, lambda batch: (self._inputs(batch), None),
                self._predict, place, **self._share,
            )  # fmt: skip

    @property
    def _share(self) -> dict[str, Any]:
        return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}

    def _split(self, batch: Any) -> tuple[Any, Tensor]:
        return self.strategy.split(self._on_device(batch))

    def _inputs(self, batch: Any) -> Any:
        return self.strategy.inputs(self._on_device(batch))

    def _predict(self, inputs: Any, own: Predictive | None = None) -> dict[str, Predictive]:
        with self.trainer.precision_plugin.forward_context():
            own = self.strategy.predictive(inputs) if own is None else own
            others = {name: p.predict(inputs) for name, p in self.posteriors.items()}
        return {self.own: own, **others}

    def _on_device(self, batch: Any) -> Any:
        """A batch as Lightning hands it to a step."""
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.strategy._on_before_batch_transfer(batch)
        return self.trainer.strategy.batch_to_device(batch)


@contextmanager
def evaluating(module: pl.LightningModule) -> Iterator[None]:
    """A module in evaluation mode; each part gets its own mode back."""
    before = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in before:
            each.training = training
