"""The base of every strategy: the Lightning work, done once.

A strategy is a ``LightningModule`` that approximates the posterior of a network. This class
holds the network, the likelihood and the target; runs training, validation, test and
prediction steps; finds N; keeps metrics; checks the data; stops on a loss that is not finite;
and makes checkpoints from which a fit goes on exactly. A strategy adds ``loss`` (what to
minimise on a batch) and ``posterior`` (what it leaves behind). Classification or regression is
the likelihood's business, so there is no strategy per task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import sized_len
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import MetricCollection

from lightning_bnn.errors import ConfigurationError, NonFiniteError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import copy_network, network_tensors
from lightning_bnn.posteriors import Posterior, WeightPosterior
from lightning_bnn.predictive import Predictive
from lightning_bnn.random import random_state, restore_random_state
from lightning_bnn.stacked import Mode
from lightning_bnn.strategies.resume import ResumableLoader
from lightning_bnn.target import Target, count_examples, split_batch

__all__ = ["OptimizerFactory", "SchedulerFactory", "Strategy", "batch_size"]

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


class Strategy(pl.LightningModule, ABC):
    """A Lightning module that approximates the posterior of a network's weights.

    Args:
        net: Any module. The strategy works on a copy; yours stays as it is.
        likelihood: How outputs of the network give targets.
        num_data: The number of training examples, where the training data have no length.
        optimizer: Makes the optimizer from parameters, such as ``partial(Adam, lr=1e-3)``.
        scheduler: Makes a learning-rate scheduler from the optimizer.
        scheduler_interval: Whether the scheduler steps each ``"epoch"`` or each ``"step"``.
        predict_draws: Draws of the posterior in validation, test and prediction.
    """

    target: Target

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        num_data: int | None = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        predict_draws: int = 16,
    ) -> None:
        super().__init__()
        _check_network(net)
        if not isinstance(likelihood, Likelihood):
            raise ConfigurationError(
                "likelihood= is an object of lightning_bnn.likelihoods, such as Categorical(); "
                f"got {likelihood!r}."
            )
        if scheduler_interval not in ("epoch", "step"):
            raise ConfigurationError(
                f"scheduler_interval= is 'epoch' or 'step'; got {scheduler_interval!r}."
            )
        if predict_draws < 1:
            raise ConfigurationError(f"predict_draws= is at least 1; got {predict_draws}.")
        self.net = copy_network(net)
        self.likelihood = deepcopy(likelihood)
        self.predict_draws = predict_draws
        self._given_num_data = num_data
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._scheduler_interval = scheduler_interval
        self._metrics: dict[str, list[MetricCollection]] = {}
        self._snapshot: Posterior | None = None
        self._mode: Mode = "auto"
        self._checked: set[str] = set()
        self._random_state: list[dict[str, Any]] | None = None
        self._random_before_validation: dict[str, Any] | None = None
        self._order: int | None = None
        self._restored_order: int | None = None
        self._unwrap: Callable[[], None] | None = None

    # ---------------------------------------------------------------- what a strategy adds

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """What to minimise on a batch: an estimate of a mean energy or of a bound on it."""

    @abstractmethod
    def posterior(self) -> Posterior:
        """The posterior as it stands now; later training does not change it."""

    def member_posteriors(self) -> Mapping[int, Posterior]:
        """By number, the posterior of each member or chain; their mixture is :meth:`posterior`.

        A strategy of a single network has number 0.
        """
        return {0: self.posterior()}

    def current_draws(self) -> dict[str, Tensor]:
        """The network's weights and buffers as they stand, with a leading axis of chains.

        This is what a :class:`~lightning_bnn.callbacks.SampleCollector` takes. They may be views:
        copy what must outlive the next step.
        """
        return {name: t.detach()[None] for name, t in network_tensors(self.net).items()}

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a batch; override it for batches of another form."""
        return split_batch(batch)

    # ---------------------------------------------------------------- training

    def configure_optimizers(self) -> Any:
        """One optimizer over all trainable parameters, and its scheduler."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        make = self._optimizer or self._default_optimizer
        optimizer = make(parameters)
        self._refuse_weight_decay(optimizer)
        if self._scheduler is None:
            return optimizer
        scheduler = {"scheduler": self._scheduler(optimizer), "interval": self._scheduler_interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    @staticmethod
    def _refuse_weight_decay(optimizer: Optimizer) -> None:
        if any(group.get("weight_decay") for group in optimizer.param_groups):
            decay = optimizer.defaults["weight_decay"]
            raise ConfigurationError(
                f"{type(optimizer).__name__} decays weights by {decay}, "
                "which counts the prior twice and biases the posterior's scales. Set "
                "weight_decay=0 and say what you want with prior=."
            )

    def _default_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Adam, in one fused pass on a CPU, where that is several times faster on large networks.

        Not under mixed precision: Lightning does not clip gradients of a fused optimizer there.
        """
        mixed = self._trainer is not None and "mixed" in str(self.trainer.precision)
        on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
        return Adam(parameters, lr=1e-3, fused=on_cpu and not mixed)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch, checked and logged."""
        loss = self.loss(batch)
        self._stop_if_not_finite(loss, batch, batch_idx)
        self.log("train_loss", loss, prog_bar=True, batch_size=batch_size(batch))
        return loss

    def check(self, stage: str, outputs: Tensor, targets: Any) -> None:
        """Check that data and outputs fit the likelihood.

        Shapes and values are looked at in every batch on a CPU; elsewhere only in the first of
        a stage, because reading values makes the device wait.
        """
        if outputs.device.type == "cpu" or stage not in self._checked:
            self.likelihood.check(outputs.detach(), targets)
            self._checked.add(stage)

    def _stop_if_not_finite(self, loss: Tensor, batch: Any, batch_idx: int) -> None:
        if torch.isfinite(loss):
            return
        if not all(bool(p.isfinite().all()) for p in self.parameters()):
            raise NonFiniteError(
                f"The loss is {loss.item()} at step {self.global_step} (epoch "
                f"{self.current_epoch}, batch {batch_idx}), because weights are not finite: the "
                "gradient of an earlier step was not. Go on from an earlier checkpoint with a "
                "lower learning rate or with gradient clipping."
            )
        culprit = self._blame(
            batch, "Inputs and targets are finite: lower the learning rate or clip gradients."
        )
        raise NonFiniteError(
            f"The loss is {loss.item()} at step {self.global_step} (epoch {self.current_epoch}, "
            f"batch {batch_idx}). {culprit} The weights are those of the last finite step; "
            "the checkpoints before it are good."
        )

    def _blame(self, batch: Any, otherwise: str) -> str:
        """Which part of a batch is not finite; if none is, what else to say."""
        inputs, targets = self.split(batch)
        for kind, value in (("inputs", inputs), ("targets", targets)):
            if isinstance(value, Tensor) and not torch.isfinite(value).all():
                return f"The batch's {kind} hold NaN or infinity."
        return otherwise

    # ---------------------------------------------------------------- evaluation

    def on_validation_start(self) -> None:
        """Take a snapshot, and keep validation from touching the training's random numbers."""
        self._random_before_validation = random_state()
        self._start_evaluation("val", self.trainer.val_dataloaders)

    def on_test_start(self) -> None:
        """Take a snapshot of the posterior for the whole test."""
        self._start_evaluation("test", self.trainer.test_dataloaders)

    def on_predict_start(self) -> None:
        """Take a snapshot of the posterior for the whole prediction."""
        self._take_snapshot()

    def validation_step(  # type: ignore[override]
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> Predictive:
        """Update the validation metrics; what was predicted goes to the callbacks."""
        return self._evaluate("val", batch, dataloader_idx)

    def test_step(  # type: ignore[override]
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> Predictive:
        """Update the test metrics; what was predicted goes to the callbacks."""
        return self._evaluate("test", batch, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Predictive:
        """The predictive mixture of a batch: of (inputs, targets), or of inputs alone."""
        return self._predict(self.inputs(batch))

    def inputs(self, batch: Any) -> Any:
        """The inputs of a batch of (inputs, targets), or of inputs alone."""
        if isinstance(batch, Mapping) and type(self).split is not Strategy.split:
            try:
                return self.split(batch)[0]
            except KeyError:
                return batch  # no targets in it
        if isinstance(batch, (Tensor, Mapping)):
            return batch
        if isinstance(batch, (tuple, list)) and len(batch) == 1:
            return batch[0]  # as DataLoader(TensorDataset(x)) gives it
        return self.split(batch)[0]

    def predictive(self, inputs: Any) -> Predictive:
        """What validation, test or prediction says of more inputs while it runs.

        Outside of them use it in :meth:`snapshot`.
        """
        with self.snapshot():
            return self._predict(inputs)

    @contextmanager
    def snapshot(self) -> Iterator[Posterior]:
        """The posterior that the running evaluation predicts with; outside of one, as it stands."""
        running = self._snapshot is not None
        if not running:
            self._take_snapshot()
        try:
            assert self._snapshot is not None
            yield self._snapshot
        finally:
            if not running:
                self._drop_snapshot()

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics."""
        self._log_metrics("val")

    def on_test_epoch_end(self) -> None:
        """Log the test metrics."""
        self._log_metrics("test")

    def on_validation_end(self) -> None:
        """Put the random state back and let the snapshot go."""
        if self._random_before_validation is not None:
            restore_random_state(self._random_before_validation)
            self._random_before_validation = None
        self._drop_snapshot()

    def on_test_end(self) -> None:
        """Let the snapshot go."""
        self._drop_snapshot()

    def on_predict_end(self) -> None:
        """Let the snapshot go."""
        self._drop_snapshot()

    def _take_snapshot(self) -> None:
        self._snapshot = self.posterior()
        if isinstance(self._snapshot, WeightPosterior) and self._snapshot.mode == "auto":
            self._snapshot.mode = self._mode  # measured once, not in every epoch

    def _drop_snapshot(self) -> None:
        if isinstance(self._snapshot, WeightPosterior):
            self._mode = self._snapshot.mode
        self._snapshot = None

    def _start_evaluation(self, stage: str, loaders: Any) -> None:
        self._take_snapshot()
        count = len(loaders) if isinstance(loaders, (list, tuple, dict)) else 1
        # Made anew each time: nothing can be carried from one epoch into the next.
        metrics = self.likelihood.metrics()
        self._metrics[stage] = [metrics.clone().to(self.device) for _ in range(count)]

    def _evaluate(self, stage: str, batch: Any, dataloader_idx: int) -> Predictive:
        inputs, targets = self.split(batch)
        predictive = self._predict(inputs)
        self.check(stage, predictive.outputs[0], targets)
        self._metrics[stage][dataloader_idx].update(predictive, targets)
        return predictive

    def _predict(self, inputs: Any) -> Predictive:
        assert self._snapshot is not None
        return self._snapshot.predict(inputs, draws=self.predict_draws)

    def _log_metrics(self, stage: str) -> None:
        several = len(self._metrics[stage]) > 1
        for index, metrics in enumerate(self._metrics[stage]):
            suffix = f"/dataloader_idx_{index}" if several else ""
            values = {f"{stage}_{k}{suffix}": v for k, v in metrics.compute().items()}
            self.log_dict(values, prog_bar=stage == "val", sync_dist=True, add_dataloader_idx=False)

    # ---------------------------------------------------------------- data and resume

    def on_fit_start(self) -> None:
        """Make every loader resumable, with one seed for all ranks."""
        # A validation that died in an earlier fit has left them: Lightning calls no teardown then.
        self._random_before_validation = None
        self._drop_snapshot()
        strategy = self.trainer.strategy
        drawn = strategy.broadcast(int(torch.randint(2**31, ()).item()))
        # Lightning forgets the state of loaders in a checkpoint made at the end of an epoch.
        seed = drawn if self._restored_order is None else self._restored_order
        self._order, self._restored_order = seed, None
        process = strategy.process_dataloader
        process = getattr(process, "original", process)  # an earlier fit may have died with its own

        def make_resumable(loader: Any) -> Any:
            return self._resumable(process(loader), seed)

        make_resumable.original = process  # type: ignore[attr-defined]
        # Lightning passes every loader through this method before it takes an iterator.
        strategy.process_dataloader = make_resumable  # type: ignore[method-assign,assignment]
        self._unwrap = lambda: setattr(strategy, "process_dataloader", process)

    def _resumable(self, loader: Any, seed: int) -> Any:
        trainer = self.trainer
        if isinstance(loader, ResumableLoader) or hasattr(loader, "load_state_dict"):
            return loader  # it knows how to resume by itself
        if not trainer.training:
            step = lambda: trainer.global_step  # noqa: E731
            return ResumableLoader(loader, seed, trainer.global_rank, epoch=step)
        limit = trainer.limit_train_batches
        if isinstance(limit, float):
            length = sized_len(loader)
            limit = int(length * limit) if limit < 1.0 and length is not None else float("inf")
        epochs, by_epochs = trainer.fit_loop.epoch_progress, trainer.max_steps == -1
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress
        return ResumableLoader(
            loader,
            seed,
            trainer.global_rank,
            # Of a fit that goes on after the end of an epoch Lightning corrects what is completed,
            # but not before it has fetched a first batch; where steps decide, not at all.
            epoch=lambda: getattr(epochs.current, "processed" if by_epochs else "completed"),
            limit=limit,
            progress=lambda: batches.current.processed,
        )

    def on_train_start(self) -> None:
        """Find N, and set the random state of a resumed fit."""
        self._checked.clear()
        self.target.num_data = self._count_examples()
        if self._random_state is not None:
            ranks = len(self._random_state)
            restore_random_state(self._random_state[self.global_rank % ranks])
            self._random_state = None

    def on_train_epoch_start(self) -> None:
        """Find N again: a trainer may load other data for an epoch."""
        self.target.num_data = self._count_examples()

    def _count_examples(self) -> int:
        loader = self.trainer.train_dataloader
        return count_examples(loader, self._given_num_data, self.trainer.world_size)

    def teardown(self, stage: str) -> None:
        """Give the trainer its own methods back, and let a snapshot go."""
        self._drop_snapshot()
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the random state of every rank."""
        # A checkpoint made while validating holds what training goes on with, not what
        # validation left.
        state = self._random_before_validation or random_state()
        states: list[Any] = [state]
        if self._trainer is not None and self.trainer.world_size > 1:
            states = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(states, state)
        checkpoint["lightning_bnn"] = {
            "random_state": states,
            "order": self._order,
            "mode": getattr(self._snapshot, "mode", self._mode),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the random state of a fit that goes on, for the moment before its next batch."""
        # Lightning loads weights before it converts the module to the trainer's precision, which
        # would round those of a float64 run to the float32 of the network that was given.
        saved = checkpoint["state_dict"]
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if name in saved and tensor.is_floating_point():
                tensor.data = tensor.data.to(saved[name].dtype)
        if self._trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return  # a test or a loaded module must not turn back a later fit
        own = checkpoint.get("lightning_bnn", {})
        self._random_state = own.get("random_state")
        self._restored_order = own.get("order")
        self._mode = own.get("mode", "auto")


def batch_size(batch: Any) -> int | None:
    """The length of the first tensor in a batch, for weighting logged means."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    values = batch.values() if isinstance(batch, dict) else batch
    if isinstance(values, Iterable) and not isinstance(values, str):
        return next((size for item in values if (size := batch_size(item))), None)
    return None


def _check_network(net: Any) -> None:
    if not isinstance(net, nn.Module):
        raise ConfigurationError(f"net= is a torch.nn.Module; got {type(net).__name__}.")
    if isinstance(net, torch.jit.ScriptModule):
        raise ConfigurationError(
            "net= is a ScriptModule, whose weights cannot be exchanged. Pass the module that it "
            "was scripted from."
        )
    for name, parameter in net.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigurationError(
                f"The parameter {name!r} of a lazy module has no shape yet. Run one batch through "
                "the network first."
            )
