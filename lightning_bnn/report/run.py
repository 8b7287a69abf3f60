"""The models of a run, asked about the run's own data and about out-of-distribution data.

The strategy predicts with the snapshot of the running evaluation, the others with all their draws.
Batches pass through the trainer's hooks and precision as those of a step do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning.trainer.states import RunningStage
from torch import Tensor

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.posteriors import Posterior
from lightning_bnn.predictive import Predictive
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report.gather import (
    Batches,
    add,
    check_predicts,
    gather,
    gather_ood,
    inputs_for,
    numbered_batches,
    undisturbed,
)
from lightning_bnn.report.sections import Section
from lightning_bnn.report.statistics import Collection, Statistics
from lightning_bnn.strategies.base import Strategy

__all__ = ["RunModels", "evaluating", "load_validation_data"]


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
        for section in self.sections:
            if section.needs_posterior:
                section.check({self.own: self.strategy.posterior()})
        if not self.posteriors and not self.loaders and self.class_names is None:
            return
        inputs = self.strategy.split(batch)[0]
        fix = "A compared model takes the inputs of this run."
        own = self.strategy.posterior()  # no snapshot: how it runs draws is measured on several
        asked: dict[str, Callable[[Any], Predictive]] = {
            self.own: lambda x: own.predict(x, draws=1)
        }
        with isolated_random_state(), self.trainer.precision_plugin.forward_context():
            kind = check_predicts(asked[self.own], inputs, self.own, fix)
            self._check_names(own.predict(inputs, draws=1))
            for name, posterior in self.posteriors.items():
                posterior.to(self.strategy.device)
                asked[name] = lambda x, p=posterior: p.predict(inputs_for(p, x), draws=1)  # type: ignore[misc]
                what = f"compare[{name!r}], tried on the data of this run,"
                other = check_predicts(asked[name], inputs, what, fix)
                if other != kind:
                    raise ConfigurationError(
                        f"compare[{name!r}] predicts a {other} and {self.own} a {kind}: only "
                        "models of one task can be compared. Leave it out, or give it a report of "
                        "its own."
                    )
        shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else "of this run"
        fix = f"Inputs of the shape {shape} per example are expected."
        for place, loader in self.loaders.items():
            with undisturbed(loader), self.trainer.precision_plugin.forward_context():
                first = next(iter(loader), None)
                if first is None:
                    raise DataError(f"ood[{place!r}] is empty: its loader gives no batch.")
                inputs = self._inputs(first)
                for name, predict in asked.items():
                    tried = "" if name == self.own else f", tried on compare[{name!r}],"
                    check_predicts(predict, inputs, f"ood[{place!r}]{tried}", fix)

    def _check_names(self, predictive: Any) -> None:
        if self.class_names is None:
            return
        if predictive.task != "classification":
            raise ConfigurationError(
                f"class_names= is for a classification, and {self.own} is a regression. Leave "
                "it out."
            )
        classes = predictive.log_probabilities.shape[1]
        if len(self.class_names) != classes:
            raise ConfigurationError(
                f"class_names= is expected to name each of the {classes} classes; got "
                f"{len(self.class_names)} names."
            )

    def add(
        self, into: Mapping[str, Statistics], predictive: Predictive, batch: Any, numbers: Tensor
    ) -> None:
        """Add a batch that the strategy has predicted, and what the others say of it."""
        inputs, targets = self.strategy.split(batch)
        add(into[self.own], predictive, targets, numbers, inputs)
        for name, posterior in self.posteriors.items():
            add(into[name], self._ask(posterior, inputs), targets, numbers, inputs)

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
        options = {"limit": limit, "prepared": prepared, **self._share}
        gather(loader, into, self._split, self._predict_all, **options)

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
            options: dict[str, Any] = {"limit": limit, "prepared": True, **self._share}
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
                    draws = self.strategy.predict_draws
                    section.measure(self.own, posterior, Batches(read), draws)

    def gather_ood(self, collection: Collection) -> None:
        """Predict all out-of-distribution loaders with all models."""
        models, predict = collection.models, self._predict_all
        gather_ood(self.loaders, models, self._inputs, predict, **self._share)

    @property
    def _share(self) -> dict[str, int]:
        return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}

    def _split(self, batch: Any) -> tuple[Any, Tensor]:
        return self.strategy.split(self._on_device(batch))

    def _inputs(self, batch: Any) -> Any:
        return self.strategy.inputs(self._on_device(batch))

    def _predict_all(self, inputs: Any) -> dict[str, Predictive]:
        others = {name: self._ask(posterior, inputs) for name, posterior in self.posteriors.items()}
        return {self.own: self._predict(inputs), **others}

    def _predict(self, inputs: Any) -> Predictive:
        with self.trainer.precision_plugin.forward_context():
            return self.strategy.predictive(inputs)

    def _ask(self, posterior: Posterior, inputs: Any) -> Predictive:
        with self.trainer.precision_plugin.forward_context():
            return posterior.predict(inputs_for(posterior, inputs))

    def _on_device(self, batch: Any) -> Any:
        """A batch as Lightning hands it to a step."""
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.strategy._on_before_batch_transfer(batch)
        return self.trainer.strategy.batch_to_device(batch)


def load_validation_data(trainer: Any) -> None:
    """Set the validation data up as a validation would; none has come by the end of the fit."""
    stage, trainer.state.stage = trainer.state.stage, RunningStage.VALIDATING
    try:
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
    finally:
        trainer.state.stage = stage


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
