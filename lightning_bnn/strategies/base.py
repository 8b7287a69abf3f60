"""The base of every strategy: the Lightning work, done once.

A strategy is a ``LightningModule`` that approximates the posterior of a network. This class
holds the network, the likelihood and the target; runs training, validation, test and
prediction steps; finds N; keeps metrics; checks the data; stops on a loss that is not finite;
and makes checkpoints from which a fit goes on exactly. A strategy adds ``loss`` (what to
minimise on a batch) and ``posterior`` (what it leaves behind). Classification or regression is
the likelihood's business, so there is no strategy per task.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import MetricCollection
from typing_extensions import Self

from lightning_bnn import likelihoods, priors, samplers
from lightning_bnn.checks import check_factory, check_option, check_whole
from lightning_bnn.errors import ConfigurationError, DataError, NonFiniteError
from lightning_bnn.initialise import is_untrained
from lightning_bnn.lightning import (
    TrainerFn,
    pl,
    pl_load,
    rank_zero_info,
    rank_zero_warn,
    sized_len,
)
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.likelihoods.base import check_likelihood
from lightning_bnn.metrics import MonteCarloStandardError
from lightning_bnn.network import copy_network, network_tensors, plain_network, warn_if_compiled
from lightning_bnn.posteriors import Posterior, WeightPosterior
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import fan_in
from lightning_bnn.random import random_state, restore_random_state
from lightning_bnn.recipes import allow, make, network_recipe, recipe
from lightning_bnn.samplers import Cyclical
from lightning_bnn.stacked import Mode, with_output
from lightning_bnn.strategies.bar import InBar, show_phase
from lightning_bnn.strategies.checkpoints import check_checkpoint, protect_checkpoints
from lightning_bnn.strategies.logits import LogitsCheck
from lightning_bnn.strategies.resume import Restart, ResumableLoader, note_fit
from lightning_bnn.strategies.schedule import (
    CONSTANT_RATE,
    NamedSchedule,
    SchedulerFactory,
    WarmUpCosine,
    check_scheduler,
    default_schedules,
    fit_schedules,
    make_scheduler,
    peak_rate,
    warm_up_steps,
)
from lightning_bnn.strategies.training_batches import single_loader, training_batches
from lightning_bnn.target import (
    Keys,
    KeySplit,
    Split,
    Target,
    count_examples,
    count_overfit,
    make_split,
    split_batch,
)

__all__ = [
    "DataOptions",
    "OptimizerFactory",
    "SchedulerFactory",
    "Strategy",
    "batch_size",
    "cyclical_schedule",
]

# what options of strategies may be made of, when they are read from a checkpoint
allow(torch.optim, Optimizer)
allow(torch.optim.lr_scheduler, LRScheduler)
allow(likelihoods, Likelihood)
allow(priors, priors.Prior | priors.Learned)
allow(samplers, Optimizer | LRScheduler)

_NO_BATCHES = (
    "There is nothing to train on: the training data gave no batch. The data set is empty, or it "
    "has fewer examples than a batch and drop_last=True."
)

_MANY_SCALES = 32  # learned scales of a prior that are logged one by one

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
_ADAM = "Adam"
_MCSE = "nll_mcse"
_MOST_DRAWS = 128  # of those that a posterior has, if no number is given


class DataOptions(TypedDict, total=False):
    """How every strategy reads batches and outputs, and what its scheduler watches.

    Attributes:
        split: How a batch gives inputs and targets, where it is no pair of them: the key of the
            targets (all others are keyword arguments of the network), a pair of the keys or places
            of inputs and targets, or a function.
        output: Which part of what the network returns the likelihood gets, where that is not one
            tensor: a place, a key or an attribute, or a function. ``logits`` of the models of
            transformers are found without it.
        monitor: The metric that a scheduler waits for, such as ``"val_nll"`` for
            ``ReduceLROnPlateau``.
    """

    split: Split | Keys | None
    output: Callable[[Any], Tensor] | str | int | None
    monitor: str | None


class Strategy(pl.LightningModule, InBar, ABC):
    """A Lightning module that approximates the posterior of a network's weights.

    Args:
        net: Any module. The strategy works on a copy; yours stays as it is.
        likelihood: How outputs of the network give targets.
        num_data: N, the number of training examples. By default the length of the training data;
            with ``overfit_batches`` what is in these batches. ``limit_train_batches`` does not
            change it: an epoch is shorter then, and shuffled data are all seen in the end.
        optimizer: Makes the optimizer from parameters, such as ``partial(Adam, lr=1e-3)``; by
            default Adam, at the rate of :func:`lightning_bnn.strategies.schedule.peak_rate`.
        scheduler: Makes a learning-rate scheduler from the optimizer. ``"cosine"``: a warm-up and
            a cosine to 0 over the length of the fit (:mod:`lightning_bnn.strategies.schedule`);
            ``"auto"``: the same where the optimizer is the default one, else none; None: none.
        scheduler_interval: Whether a scheduler of your own steps each ``"epoch"`` or ``"step"``.
        predict_draws: Draws of the posterior in validation, test and prediction. None: as many as
            suit its kind, 32 of a Gaussian, and all of those that were collected, up to 128.
        split: See :class:`DataOptions`, as for the next two.
        output: Which part of what the network returns is meant.
        monitor: The metric that the scheduler waits for.

    Attributes:
        lr: The learning rate of the first steps, which ``Tuner.lr_find`` sets; None leaves it to
            the optimizer or the sampler.
    """

    target: Target
    # what options stand for that are left out, for loggers
    defaults: ClassVar[Mapping[str, str]] = {"optimizer": _ADAM, "prior": "Normal()"}

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Note the arguments, whatever the constructor of a subclass makes of them."""
        made = super().__new__(cls)
        vars(made)["_given"] = (arguments, options)
        return made

    def __init_subclass__(cls, **options: Any) -> None:
        """Show the constructor's own arguments to who asks; Python 3.10 would show __new__'s."""
        super().__init_subclass__(**options)
        _, *others = inspect.signature(cls.__init__).parameters.values()
        cls.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        num_data: int | None = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: NamedSchedule | SchedulerFactory | None = "auto",
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        predict_draws: int | None = None,
        split: Split | Keys | None = None,
        output: Callable[[Any], Tensor] | str | int | None = None,
        monitor: str | None = None,
    ) -> None:
        super().__init__()
        _check_network(net)
        self._note_options()
        if optimizer is not None:
            check_factory("optimizer", optimizer)
        check_scheduler(scheduler)
        check_likelihood(likelihood)
        check_option("scheduler_interval", scheduler_interval, ("epoch", "step"))
        self.net = copy_network(net) if output is None else with_output(copy_network(net), output)
        # looked at now: training changes it, and what is frozen is not looked at
        self._untrained = optimizer is None and is_untrained(self.net)
        self.likelihood = deepcopy(likelihood)
        self.lr: float | None = None
        self._split, self._monitor = make_split(split), monitor
        self.predict_draws = (
            None if predict_draws is None else check_whole("predict_draws", predict_draws, 1)
        )
        self._given_num_data = num_data
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._scheduler_interval = scheduler_interval
        self._metrics: dict[str, list[MetricCollection]] = {}
        self._snapshot: Posterior | None = None
        self._mode: Mode = "auto"
        self._checked: set[str] = set()
        self._logits = LogitsCheck()
        self._random_state: list[dict[str, Any]] | None = None
        self._random_before_validation: dict[str, Any] | None = None
        self._order: int | None = None
        self._restored_order: int | None = None
        self._restart: Restart | None = None
        self._unwrap: Callable[[], None] | None = None
        self._diverged_at: Tensor | None = None  # by row, the step of the first energy not finite
        self.finished: dict[str, Tensor] = {}  # what finish() has found, by name
        self._finished_at: int | None = None  # after which step
        self._resumes_unscheduled = False
        self.target = Target(self.likelihood, num_data=num_data)

    def _note_options(self) -> None:
        """Keep the constructor's arguments: as text for loggers, as recipes in checkpoints."""
        arguments, options = vars(self).pop("_given")
        owners = [cls for cls in type(self).__mro__ if "__init__" in vars(cls)]
        flat = _named_arguments(owners, arguments, options)
        texts = {name: _text(value) for name, value in flat.items()}
        texts |= {k: text for k, text in self.defaults.items() if k in flat and flat[k] is None}
        recipes = {name: _option_recipe(value) for name, value in flat.items()}
        lost = {
            name: {"text": str(texts[name])}
            for name, made in recipes.items()
            if made is None and flat[name] is not None
        }
        self._options = {**recipes, **lost}
        self._set_hparams(texts)
        # data modules have options of these names, and Lightning wants equal names to be equal
        shown = {k: v for k, v in texts.items() if k not in ("seed", "split", "num_data")}
        self._hparams_initial = self._to_hparams_dict(shown)
        self._log_hyperparams = True

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **options: Any,
    ) -> Self:
        """A strategy as it was saved; what has a recipe need not be given again.

        Args:
            checkpoint_path: A file that a trainer wrote.
            map_location: As for any LightningModule, like the next three.
            hparams_file: A file with other options.
            strict: Whether all names must match.
            weights_only: Whether nothing but tensors and plain values is read.
            **options: Arguments of the constructor: those of your own classes and functions, and
                what is to be different.
        """
        check_checkpoint(checkpoint_path)
        safe = True if weights_only is None else weights_only
        try:
            saved = pl_load(checkpoint_path, map_location="cpu", weights_only=safe)
        except Exception as error:
            if type(error).__name__ != "UnpicklingError":
                raise
            saved = {}  # objects of the user's: whoever passes all arguments may load them
        noted = saved.get("lightning_bnn", {}).get("options", {})
        lost = {k: v["text"] for k, v in noted.items() if isinstance(v, dict) and "text" in v}
        if missing := {name: text for name, text in lost.items() if name not in options}:
            raise ConfigurationError(
                f"The checkpoint cannot say how these were made: {missing}. Pass them to "
                f"load_from_checkpoint, as in {next(iter(missing))}=..., or None to leave one out."
            )
        made = {k: make(v) for k, v in noted.items() if k not in options and k not in lost}
        try:
            return super().load_from_checkpoint(
                checkpoint_path,
                map_location,
                hparams_file,
                strict,
                weights_only,
                **made,
                **options,
            )
        except TypeError as error:
            strategy = saved.get("lightning_bnn", {}).get("strategy", cls.__name__)
            fix = f"Load it with {strategy}.load_from_checkpoint."
            if strategy == cls.__name__:
                fix = "Make it yourself, and pass the checkpoint as ckpt_path= to the trainer."
            raise ConfigurationError(
                f"The checkpoint is of {strategy}, and {cls.__name__} cannot be made of its "
                f"options ({error}). {fix}"
            ) from error

    # ---------------------------------------------------------------- what a strategy adds

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """What to minimise on a batch: an estimate of a mean energy or of a bound on it."""

    @abstractmethod
    def posterior(self) -> Posterior:
        """The posterior as it stands now; later training does not change it."""

    def finish(self, batches: Iterable[Any]) -> Mapping[str, Tensor]:
        """Override it for one pass over the training data after a fit.

        It is called once, when the last step was taken, on every rank with its own share of the
        data. What it returns is kept in :attr:`finished` and in checkpoints.

        Args:
            batches: The training batches, on the training's device.
        """
        return {}

    # ---------------------------------------------------------------- what callbacks ask
    # Each has a default for a strategy of a single network. A row is a place on the leading axis.

    predicts_with_samples: bool = True
    """Whether predictions mix a sample of the posterior's draws, and not all there is of it.

    Then ``val_nll_mcse`` and ``test_nll_mcse``, the Monte Carlo standard error of the NLL, are
    logged (see :mod:`lightning_bnn.metrics.monte_carlo`)."""

    drops_diverged: ClassVar[bool] = False
    """Whether a member that diverges is dropped, and not the whole fit stopped."""

    @property
    def ids(self) -> list[int]:
        """The numbers of the members or chains."""
        return [0]

    @property
    def alive(self) -> Tensor:
        """Which members have not been dropped, boolean, (K,)."""
        return torch.ones(len(self.ids), dtype=torch.bool, device=self.device)

    @property
    def trained(self) -> list[str]:
        """The names of the network's parameters that training changes, in its order."""
        return [name for name, _ in self.net.named_parameters()]

    @property
    def inferred(self) -> list[str]:
        """The names of the network's parameters that have a posterior."""
        return self.trained

    @property
    def point_estimates(self) -> list[str]:
        """The names of the network's parameters that are trained, but have no posterior."""
        return []

    holder: ClassVar[str | None] = None
    """The submodule whose parameters stand in for the inferred ones of the network."""

    @property
    def settling_steps(self) -> int:
        """The steps of a fit before the first whose weights can be a draw."""
        return 0

    @property
    def sampling_steps(self) -> float | None:
        """The steps of a fit that are planned to sample chains; None where there are none."""
        return None

    @property
    def in_cycles(self) -> bool:
        """Whether a fit goes through its phases several times."""
        return False

    @property
    def sampling(self) -> bool:
        """Whether the last step was one of sampling, not of exploration."""
        schedule = cyclical_schedule(self.trainer)  # it stands at the next step already
        return schedule is None or schedule.samples_at(schedule.last_epoch - 1)

    @property
    def ended_cycle(self) -> bool:
        """Whether the last step was the last of a cycle of a cyclical schedule."""
        schedule = cyclical_schedule(self.trainer)
        return schedule is not None and schedule.ends_cycle(schedule.last_epoch - 1)

    def likelihood_of(self, row: int) -> Likelihood:
        """The likelihood with what a member has learned."""
        return self.likelihood

    def inputs_of(self, batch: Any, row: int) -> Any:
        """The inputs that a member sees of a training batch."""
        return self.split(batch)[0]

    def batch_size(self, batch: Any) -> int | None:
        """The number of examples in a batch, for weighting logged means."""
        return batch_size(batch)

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

    def prior_scales(self) -> dict[str, Tensor]:
        """By name, the learned scales of the prior as they fit now, of each member, (K,).

        They are 1/√E[τ], τ the precision. Empty where the prior has no
        :class:`~lightning_bnn.priors.Learned` scale.
        """
        return {}

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Inputs and targets of a batch, as ``split=`` says."""
        return self._split(batch)

    # ---------------------------------------------------------------- training

    def configure_optimizers(self) -> Any:
        """One optimizer over all trainable parameters, and its scheduler."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        schedule = self._chosen_schedule(self._scheduler, self._optimizer)
        optimizer = (self._optimizer or self._adam(schedule))(parameters)
        self._refuse_weight_decay(optimizer)
        return self._with_schedule(optimizer, schedule, self._interval(schedule))

    def _interval(self, schedule: Any) -> str:
        return "step" if schedule is WarmUpCosine else self._scheduler_interval

    def _chosen_schedule(self, scheduler: Any, optimizer: Any) -> Any:
        """What makes the schedule of this fit, from the options; None where it has none."""
        chosen = make_scheduler(scheduler, optimizer)
        if scheduler == "auto" and chosen is not None and self._resumes_unscheduled:
            rank_zero_info(
                "The checkpoint was made without a learning-rate schedule, and the fit resumes "
                "without one. Pass scheduler='cosine' for a schedule over the steps that are left."
            )
            return None
        return chosen

    def _with_schedule(self, optimizer: Optimizer, make: Any, interval: str) -> Any:
        """What ``configure_optimizers`` returns, at the learning rate that a tuner has set."""
        if self.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = self.lr
        if make is None:
            return optimizer
        check_factory("scheduler", make)  # a sampler takes no named schedule
        scheduler = make(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            interval = "epoch"
            if self._monitor is None:
                raise ConfigurationError(
                    "scheduler= makes ReduceLROnPlateau, which waits for a metric to stop "
                    "improving. Name it, as in monitor='val_nll'."
                )
        schedule = {"scheduler": scheduler, "interval": interval}
        if self._monitor is not None:
            schedule["monitor"] = self._monitor
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    @property
    def peak_lr(self) -> float | None:
        """The highest rate of the default schedule in this fit; None if it does not follow it."""
        schedules = [] if self._trainer is None else default_schedules(self.trainer)
        return max((float(rate) for one in schedules for rate in one.base_lrs), default=None)

    @staticmethod
    def _refuse_weight_decay(optimizer: Optimizer) -> None:
        if any(group.get("weight_decay") for group in optimizer.param_groups):
            decay = optimizer.defaults["weight_decay"]
            raise ConfigurationError(
                f"{type(optimizer).__name__} decays weights by {decay}, "
                "which counts the prior twice and biases the posterior's scales. Set "
                "weight_decay=0 and say what you want with prior=."
            )

    def _default_optimizer(
        self, parameters: list[nn.Parameter], lr: float | None = None
    ) -> Optimizer:
        """Adam, in one fused pass on a CPU, where that is several times faster on large networks.

        Not under mixed precision: Lightning does not clip gradients of a fused optimizer there.

        Args:
            parameters: What it trains.
            lr: Its learning rate; None: the peak of a schedule.
        """
        if lr is None:
            widest = max((fan_in(self.net, name) for name in self.trained), default=1)
            lr = peak_rate(widest, self._untrained, self.restores_best)
        for shown in (self.hparams, self._hparams_initial):
            if str(shown.get("optimizer", "")).startswith(_ADAM):
                shown["optimizer"] = f"{_ADAM}(lr={lr:.3g})"
        mixed = self._trainer is not None and "mixed" in str(self.trainer.precision)
        on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
        return Adam(parameters, lr=lr, fused=on_cpu and not mixed and self._may_fuse(parameters))

    def go_back_to_best(self) -> list[int]:
        """Train on from the best weights by validation, if they are kept; return who went back."""
        return []

    @property
    def restores_best(self) -> bool:
        """Whether the best weights by validation are restored; a strategy of several sets may."""
        return False

    def _may_fuse(self, parameters: list[nn.Parameter]) -> bool:
        """Whether a fused optimizer does what it should; a strategy of several sets has a say."""
        return True

    def _adam(self, schedule: Any) -> OptimizerFactory:
        """What makes the default optimizer, whose rate depends on whether it is annealed."""
        lr = None if schedule is WarmUpCosine else CONSTANT_RATE
        return partial(self._default_optimizer, lr=lr)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch, checked and logged."""
        loss = self.loss(batch)
        self.watch(loss.detach()[None], batch, batch_idx)
        self.log("train_loss", loss, prog_bar=True, batch_size=self.batch_size(batch))
        return loss

    def check(self, stage: str, outputs: Tensor, targets: Any) -> None:
        """Check that data and outputs fit the likelihood.

        Shapes and values are looked at in every batch on a CPU; elsewhere only in the first of
        a stage, because reading values makes the device wait.
        """
        if self.reads_are_free(outputs) or stage not in self._checked:
            self.likelihood.check(outputs.detach(), targets)
            self._checked.add(stage)
            self._logits.look(self.likelihood, outputs)

    # ---------------------------------------------------------------- energies that are not finite

    @staticmethod
    def reads_are_free(tensor: Tensor) -> bool:
        """Whether the host can read the values of a tensor without waiting for a device."""
        return tensor.device.type == "cpu"

    def watch(self, energies: Tensor, batch: Any, batch_idx: int) -> None:
        """Act on energies, (K,), that are not finite.

        On a CPU at once. On an accelerator the step at which each went wrong is noted on the
        device and read at intervals (every ``log_every_n_steps`` steps, at the end of an epoch,
        and before a checkpoint is written), because a read makes the device wait.
        """
        bad = ~energies.isfinite()
        if self.drops_diverged:
            if self.trainer.world_size > 1:  # not finite on one rank: dropped on all
                bad = self.trainer.strategy.reduce(bad.float(), reduce_op="sum") > 0
            bad &= self.alive
        free = self.reads_are_free(energies)
        if free and not bad.any():
            return
        if self._diverged_at is None or self._diverged_at.device != bad.device:
            self._diverged_at = torch.full_like(bad, -1, dtype=torch.int64)
        at = self._diverged_at
        self._diverged_at = torch.where(bad & (at < 0), self.global_step, at)
        if self.drops_diverged:
            self.alive.logical_and_(~bad)
        interval = max(1, getattr(self.trainer, "log_every_n_steps", 0) or 50)
        if free or (self.global_step + 1) % interval == 0:
            self._read_diverged(f"epoch {self.current_epoch}, batch {batch_idx}", batch)

    def _read_diverged(self, place: str | None = None, batch: Any = None) -> None:
        """Read which energies were not finite since the last look, and act on it."""
        if self._diverged_at is None:
            return
        steps = self._diverged_at.tolist()
        rows = {row: step for row, step in enumerate(steps) if step >= 0}
        self._diverged_at = None
        if rows:
            now = place is not None and set(rows.values()) == {self.global_step}
            step = ", ".join(map(str, sorted(set(rows.values()))))
            where = f"at step {step}" + (f" ({place})" if now else "")
            self.on_diverged(list(rows), where, batch if now else None)

    def on_diverged(self, rows: list[int], where: str, batch: Any) -> None:
        """Act on energies that are not finite: by default an error.

        Args:
            rows: Whose energies.
            where: At which step.
            batch: The batch, where it is still at hand.
        """
        if batch is None:  # seen some steps later: what was at fault cannot be told any more
            raise NonFiniteError(
                f"The loss was not finite {where}. Resume from a checkpoint before it, and check "
                "the data for NaN, lower the learning rate or clip gradients."
            )
        if not all(bool(p.isfinite().all()) for p in self.parameters()):
            raise NonFiniteError(
                f"The loss is not finite {where}, because weights are not finite: the gradient of "
                "an earlier step was not. Resume from an earlier checkpoint with a lower learning "
                "rate or with gradient clipping."
            )
        raise NonFiniteError(
            f"The loss is not finite {where}. {self.blame(batch)} The weights are those of the "
            "last finite step; the checkpoints before it are good."
        )

    def blame(self, batch: Any) -> str:
        """Which part of a batch is not finite; if none is, what to do."""
        if batch is not None:
            for kind, value in zip(("inputs", "targets"), self.split(batch), strict=True):
                if isinstance(value, Tensor) and not torch.isfinite(value).all():
                    return f"The batch's {kind} hold NaN or infinity."
        known = "" if batch is None else "Inputs and targets are finite: "
        advice = "lower the learning rate or clip gradients."
        return f"{known}{advice}" if known else advice.capitalize()

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
        if isinstance(self._split, KeySplit) and not isinstance(batch, Tensor):
            return self._split.inputs_of(batch)
        if isinstance(batch, Mapping) and self._splits_mappings:
            try:
                return self.split(batch)[0]
            except KeyError:
                return batch  # no targets in it
        if isinstance(batch, (Tensor, Mapping)):
            return batch
        if isinstance(batch, (tuple, list)) and len(batch) == 1:
            return batch[0]  # as DataLoader(TensorDataset(x)) gives it
        return self.split(batch)[0]

    @property
    def _splits_mappings(self) -> bool:
        overridden = getattr(self.split, "__func__", None) is not Strategy.split  # or replaced
        return self._split is not split_batch or overridden

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
        if self.predicts_with_samples and "nll" in metrics:
            metrics.add_metrics({_MCSE: MonteCarloStandardError()})
        self._metrics[stage] = [metrics.clone().to(self.device) for _ in range(count)]

    def _evaluate(self, stage: str, batch: Any, dataloader_idx: int) -> Predictive:
        inputs, targets = self.split(batch)
        predictive = self._predict(inputs)
        self.check(stage, predictive.outputs[0], targets)
        self._metrics[stage][dataloader_idx].update(predictive, targets)
        return predictive

    def _predict(self, inputs: Any) -> Predictive:
        assert self._snapshot is not None
        return self._snapshot.predict(inputs, draws=self.draws_of(self._snapshot))

    def draws_of(self, posterior: Posterior) -> int:
        """With how many draws of a posterior evaluations predict: as given, or as suits it."""
        given = self.predict_draws
        return min(posterior.default_draws, _MOST_DRAWS) if given is None else given

    def _log_metrics(self, stage: str) -> None:
        several = len(self._metrics[stage]) > 1
        for index, metrics in enumerate(self._metrics[stage]):
            suffix = f"/dataloader_idx_{index}" if several else ""
            values = {f"{stage}_{k}{suffix}": v for k, v in metrics.compute().items()}
            error = values.pop(name := f"{stage}_{_MCSE}{suffix}", None)
            if error is not None and self._has_several_draws(metrics):
                self.log(name, error, sync_dist=True, add_dataloader_idx=False)
            self.log_dict(values, prog_bar=stage == "val", sync_dist=True, add_dataloader_idx=False)

    @staticmethod
    def _has_several_draws(metrics: MetricCollection) -> bool:
        error = metrics[_MCSE]
        return isinstance(error, MonteCarloStandardError) and error.draws > 1

    # ---------------------------------------------------------------- data and resume

    def setup(self, stage: str) -> None:
        """Let the trainer's checkpoints be whole, before one of them is read."""
        protect_checkpoints(self.trainer)
        self._resumes_unscheduled = False
        # they are the same on all ranks, and too large to be handed out in each step
        self._ddp_params_and_buffers_to_ignore = [
            f"{path}.{name}"
            for path, module in self.named_modules()
            if getattr(module, "same_on_all_ranks", False)
            for name, _ in module.named_buffers()
        ]

    def on_fit_start(self) -> None:
        """Make every loader resumable, with one seed for all ranks."""
        # A fit or a validation that died has left them: Lightning calls no teardown then.
        self._random_before_validation = None
        if self._random_state is None:  # this fit has loaded no checkpoint
            self._restart = self._finished_at = None
        self._drop_snapshot()
        show_phase(self.trainer)
        if self._has_summary():
            rank_zero_info(self._parameter_summary())
        note_fit(self.trainer)
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

    def _has_summary(self) -> bool:
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        return any(isinstance(callback, pl.callbacks.ModelSummary) for callback in callbacks)

    def _tell_schedule(self) -> None:
        """Say at which rates the fit trains, if the schedule is the default one."""
        schedules = default_schedules(self.trainer)
        if not schedules or not self._has_summary():
            return
        optimizer, total = type(schedules[0].optimizer).__name__, schedules[0].total
        then = (
            "and stays there: the length of the fit is not known"
            if math.isinf(total)
            else f"and falls to 0 by step {int(total):,} along a cosine"
        )
        rank_zero_info(
            f"The learning rate of {optimizer} rises to {self.peak_lr:.3g} in "
            f"{warm_up_steps(total):,} steps {then}. Pass scheduler=None for a constant rate."
        )

    def _parameter_summary(self) -> str:
        """What is done with the network's parameters; Lightning's table shows who holds them."""
        sizes = {name: parameter.numel() for name, parameter in self.net.named_parameters()}
        inferred, points = (
            sum(sizes[name] for name in names) for names in (self.inferred, self.point_estimates)
        )
        total = sum(sizes.values())
        text = (
            f"{type(self).__name__} infers {inferred:,} of the {total:,} parameters of "
            f"{type(self.net).__name__}; {points:,} are point estimates and "
            f"{total - inferred - points:,} are fixed."
        )
        if self.holder is None:
            return text
        return (
            f"{text} The table above counts parameters of 'net' as non-trainable where "
            f"{self.holder!r} stands in for them."
        )

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
        epochs: Any = trainer.fit_loop.epoch_progress
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress
        return ResumableLoader(
            loader,
            seed,
            trainer.global_rank,
            epoch=lambda: epochs.current.processed,
            limit=limit,
            progress=lambda: batches.current.processed,
        )

    def on_train_start(self) -> None:
        """Find N, and set the random state of a resumed fit."""
        self._checked.clear()
        self._diverged_at = None
        if type(self).finish is not Strategy.finish:
            single_loader(self.trainer.train_dataloader)  # or it raises now, and not at the end
        self.target.num_data = self._count_examples()
        fit_schedules(self.trainer, self.lr)
        self._tell_schedule()
        if self._restart is not None:
            self._restart.check(self.trainer)
            self._restart.begin(self.trainer)
        if self._random_state is not None:
            ranks = len(self._random_state)
            restore_random_state(self._random_state[self.global_rank % ranks])
            self._random_state = None

    def on_train_epoch_start(self) -> None:
        """Find N again: a trainer may load other data for an epoch."""
        if self._restart is not None:
            self._restart.begin_epoch(self.trainer)
            self._restart = None
        self.target.num_data = self._count_examples()

    def on_train_epoch_end(self) -> None:
        """Finish the last epoch of a fit before its checkpoint is written."""
        self._read_diverged()
        trainer = self.trainer
        if scales := logged_scales(self._fitted_scales()):
            self.log_dict(scales, sync_dist=True)
        if self._restart is not None:
            self._restart.end_epoch(trainer)
        elif trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0:
            if self.global_step == 0:
                raise DataError(_NO_BATCHES)
            rank_zero_warn(
                f"Nothing was trained in epoch {self.current_epoch}: the training data gave no "
                "batch any more. A generator gives its examples once; let the data set begin anew "
                "whenever it is iterated over, or set max_epochs=1.",
                category=UserWarning,
            )
        epochs = trainer.max_epochs
        by_epochs = epochs is not None and 0 <= epochs <= self.current_epoch + 1
        stopped = trainer.should_stop and trainer.fit_loop._can_stop_early
        if by_epochs or stopped or 0 <= trainer.max_steps <= trainer.global_step:
            self._finish()

    def on_train_end(self) -> None:
        """Finish a fit that ended in another way, and say which prior scales were found."""
        self._read_diverged()
        self._finish()
        if scales := logged_scales(self._fitted_scales()):
            shown = ", ".join(f"{k.partition('/')[2]} {v:.3g}" for k, v in scales.items())
            rank_zero_info(f"The scales of the prior were learned: {shown}.")

    def _fitted_scales(self) -> dict[str, Tensor]:
        """The learned scales of the prior as the weights stand, (K,)."""
        return self.prior_scales()

    def on_fit_end(self) -> None:
        """Finish a fit that took no step because none was left; refuse one without data.

        Lightning calls no other hook of such a fit.
        """
        if self.trainer.fit_loop.max_batches == 0:
            raise DataError(_NO_BATCHES)
        if self._must_finish():
            self.to(self.trainer.strategy.root_device)
            self.target.num_data = self._count_examples()
            self._finish()
            self.cpu()

    def _must_finish(self) -> bool:
        overridden = type(self).finish is not Strategy.finish
        trial: bool = self.trainer.fast_dev_run  # type: ignore[attr-defined]
        return overridden and self._finished_at != self.global_step and not trial

    def _finish(self) -> None:
        """Call :meth:`finish` once for the steps taken so far."""
        if not self._must_finish():
            return
        with training_batches(self.trainer, None, self.global_step, own_share=True) as batches:
            self.finished = dict(self.finish(batches))
        self._finished_at = self.global_step

    def _is_fitting(self) -> bool:
        return self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING

    def _count_examples(self) -> int:
        trainer: Any = self.trainer
        loader, given = trainer.train_dataloader, self._given_num_data
        count = count_examples(loader, given, trainer.world_size)
        if given is None and trainer.overfit_batches:
            return count_overfit(loader, count, trainer.num_training_batches, trainer.world_size)
        return count

    def teardown(self, stage: str) -> None:
        """Give the trainer its own methods back, and let a snapshot go."""
        self._drop_snapshot()
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the random state of every rank."""
        self._read_diverged()
        # A checkpoint made while validating holds the state that training resumes with, not what
        # validation left.
        state = self._random_before_validation or random_state()
        states: list[Any] = [state]
        if self._trainer is not None and self.trainer.world_size > 1:
            states = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(states, state)
        # texts, which no constructor takes: the options are ours
        checkpoint.pop(self.CHECKPOINT_HYPER_PARAMS_KEY, None)
        checkpoint["lightning_bnn"] = {
            "strategy": type(self).__name__,
            "options": self._options,
            "random_state": states,
            "order": self._order,
            "mode": getattr(self._snapshot, "mode", self._mode),
            "finished_at": self._finished_at,
            "finished": self.finished,
            "monitored": self._monitored(),
        }

    def _monitored(self) -> dict[str, Any]:
        """The metric that the scheduler waits for, if it is known yet."""
        if self._monitor is None or self._trainer is None:
            return {}
        metrics = self.trainer.callback_metrics
        return {self._monitor: metrics[self._monitor]} if self._monitor in metrics else {}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the random state of a fit that goes on, for the moment before its next batch."""
        # Lightning loads weights before it converts the module to the trainer's precision, which
        # would round those of a float64 run to the float32 of the network that was given.
        saved = checkpoint["state_dict"]
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if name in saved and tensor.is_floating_point():
                tensor.data = tensor.data.to(saved[name].dtype)
        own = checkpoint.get("lightning_bnn", {})
        self._finished_at, self.finished = own.get("finished_at"), own.get("finished", {})
        if not self._is_fitting():
            return  # a test or a loaded module must not turn back a later fit
        self._resumes_unscheduled = not checkpoint.get("lr_schedulers")
        self._restart = Restart(checkpoint["loops"]["fit_loop"], own.get("monitored"))
        self._random_state = own.get("random_state")
        self._restored_order = own.get("order")
        self._mode = own.get("mode", "auto")


def cyclical_schedule(trainer: pl.Trainer) -> Cyclical | None:
    """The trainer's learning-rate schedule that has cycles, or None."""
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    return next((schedule for schedule in schedules if isinstance(schedule, Cyclical)), None)


def batch_size(batch: Any) -> int | None:
    """The length of the first tensor in a batch, for weighting logged means."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else None
    values = batch.values() if isinstance(batch, dict) else batch
    if isinstance(values, Iterable) and not isinstance(values, str):
        return next((size for item in values if (size := batch_size(item))), None)
    return None


def _named_arguments(owners: Sequence[type], arguments: Any, options: Any) -> dict[str, Any]:
    """All arguments of a constructor by name; those that ``*args`` takes have the base's names.

    Args:
        owners: The class, and those above it in turn, which have a constructor of their own.
        arguments: The positional arguments.
        options: The keyword arguments.
    """
    signature = inspect.signature(vars(owners[0])["__init__"])
    given = signature.bind(None, *arguments, **options)
    given.apply_defaults()
    _, *named = given.arguments
    flat = {name: given.arguments[name] for name in named}
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    further = flat.pop(kinds.get(inspect.Parameter.VAR_KEYWORD, ""), {})
    if (others := kinds.get(inspect.Parameter.VAR_POSITIONAL)) is not None:
        try:
            base = _named_arguments(owners[1:], flat[others], further)
        except TypeError:
            base = {}
        # else they are not handed on as they are
        if isinstance(base.get("likelihood"), Likelihood):
            further = base
            del flat[others]
    return {**flat, **further}


def _option_recipe(value: Any) -> Any:
    """The recipe of an option; of a network only if all of it is trained, or all is frozen."""
    if not isinstance(value, nn.Module) or isinstance(value, Likelihood):
        return recipe(value)
    trained = {parameter.requires_grad for parameter in value.parameters()}
    return None if False in trained else network_recipe(plain_network(value))


def _text(value: Any) -> Any:
    """An option for a person: numbers and words as they are, others in short."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, partial):
        arguments = [repr(one) for one in value.args]
        arguments += [f"{name}={one!r}" for name, one in value.keywords.items()]
        return f"{getattr(value.func, '__name__', value.func)}({', '.join(arguments)})"
    weights = [p.numel() for p in value.parameters()] if isinstance(value, nn.Module) else []
    if weights:
        return f"{type(value).__name__}, {sum(weights):,} weights"
    if isinstance(value, type) or inspect.isfunction(value):
        return value.__name__
    return f"{value!r:.200}"


def logged_scales(scales: Mapping[str, Tensor]) -> dict[str, float]:
    """Learned scales for a logger, as means over members; of many the range and the median.

    Example:
        >>> logged_scales({"fc.weight": torch.tensor([0.25, 0.75])})
        {'prior_scale/fc.weight': 0.5}
    """
    means = {name: scale.float().mean().item() for name, scale in scales.items()}
    if len(means) > _MANY_SCALES:
        ordered = sorted(means.values())
        places = {"smallest": 0, "median": len(ordered) // 2, "largest": -1}
        means = {name: ordered[place] for name, place in places.items()}
    return {f"prior_scale/{name}": mean for name, mean in means.items()}


def _check_network(net: Any) -> None:
    if not isinstance(net, nn.Module):
        raise ConfigurationError(f"net= is a torch.nn.Module; got {type(net).__name__}.")
    if isinstance(net, torch.jit.ScriptModule):
        raise ConfigurationError(
            "net= is a ScriptModule, whose weights cannot be exchanged. Pass the module that it "
            "was scripted from."
        )
    warn_if_compiled(net)
    for name, parameter in net.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigurationError(
                f"The parameter {name!r} of a lazy module has no shape yet. Run one batch through "
                "the network first."
            )
