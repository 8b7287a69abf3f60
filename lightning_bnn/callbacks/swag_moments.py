r"""SWAG: a Gaussian fitted to the weights that training passes through at its end.

In the last part of training a snapshot of the weights is taken after every epoch or every few
steps. Of the snapshots the running mean, the second central moment and the last R deviations are
kept (see :mod:`lightning_bnn.callbacks.running_moments`), and make the Gaussian

.. math:: N\big(\bar w,\; s\,(\tfrac12\,\mathrm{diag}(v) + \tfrac12\,D D^\top / (R - 1))\big)

of :class:`~lightning_bnn.posteriors.LowRankPosterior`. Over a stacked ensemble each member has
moments of its own, and the posterior is the mixture of the members' Gaussians: MultiSWAG.

A position is a number of epochs or of optimizer steps that were completed. Averaging begins at the
position ``start``, and a snapshot is taken after each ``every`` from there: by default each epoch
where that makes at least 30 of them, else so many steps apart that there are 30.

**The learning rate** decides how far the weights move about, so the averaging phase has a rate of
its own. By default it is the one that the loss has been brought down with: the rate at which the
phase begins is held, where a schedule would let it fall on and the weights come to stand; but it is
at least a tenth of the largest rate of the fit. After a cosine that is at three quarters of its way
this is 0.15 of the peak.

Members of an ensemble that keep their best weights by validation go back to them when averaging
begins, and again at the start of each epoch in which they are worse than these: a network that has
overfitted by then would have its moments there. NLL of one member on rows cut from the training
data, means of three splits of boston, wine, energy and yacht: 1.96, 1.20, -0.47 and -1.54 if they
go back once, 1.33, 1.16, -0.22 and -1.92 if they go back in each epoch (energy differs in one split
alone).

Maddox et al. (2019), *A Simple Baseline for Bayesian Uncertainty in Deep Learning*; Izmailov et al.
(2018), *Averaging Weights Leads to Wider Optima and Better Generalization* (SWA, the mean alone);
Wilson and Izmailov (2020), *Bayesian Deep Learning and a Probabilistic Perspective of
Generalization* (MultiSWAG).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_bnn.callbacks.progress import Unit, completed, steps_per_epoch, training_length
from lightning_bnn.callbacks.running_moments import RunningMoments
from lightning_bnn.callbacks.sources import (
    PlainModule,
    Source,
    copy_to_cpu,
    not_finite,
    with_training_statistics,
)
from lightning_bnn.checks import check_number, check_whole, is_whole
from lightning_bnn.errors import ConfigurationError, NonFiniteError
from lightning_bnn.lightning import pl, rank_zero_info, rank_zero_warn
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import copy_network
from lightning_bnn.posteriors import (
    DrawsPosterior,
    LowRankPosterior,
    MixturePosterior,
    WeightPosterior,
)
from lightning_bnn.posteriors.batch_norm import training_batch_norm
from lightning_bnn.posteriors.draws import unstack
from lightning_bnn.posteriors.weights import Weights
from lightning_bnn.samplers import Sampler
from lightning_bnn.samplers.warm_up import WarmUp
from lightning_bnn.selection import FlatLayout
from lightning_bnn.strategies import Strategy
from lightning_bnn.strategies.bar import InBar, show_phase
from lightning_bnn.strategies.training_batches import single_loader

__all__ = ["SWAGMoments"]

_RANK = 20
_DRAWS = 30
_SNAPSHOTS = 30
_LEAST_RATE = 0.1  # of the largest one


@dataclass
class _State:
    """What a checkpoint holds; replaced by the callback, never changed inside."""

    moments: RunningMoments | None = None
    names: list[str] = field(default_factory=list)  # of the weights, as they lie in the moments
    last: dict[str, Any] = field(default_factory=dict)  # what the last snapshot has beside weights
    start: int | None = None  # the position at which averaging begins
    seen: int = 0  # the last position that was looked at
    step: int = 0  # of the last snapshot
    pending: int | None = None  # a snapshot that was still to come when the checkpoint was made
    begun: bool = False  # averaging
    first_rates: list[float] | None = None  # when averaging began
    unit: Unit | None = None  # of positions, and how far snapshots are apart, where it was found
    every: int | None = None
    largest_rates: list[float] = field(default_factory=list)  # before averaging began
    # BatchNorm's, by kind of draws and by row, of those that were made since the last snapshot
    statistics: dict[str, dict[int, Weights]] = field(default_factory=dict)


class SWAGMoments(pl.Callback, InBar):
    """Track the moments of the weights late in training, and make a posterior of them.

    It works with every strategy and with any LightningModule, needs no validation, and does nothing
    in a ``fast_dev_run``. Its whole state is in every checkpoint, and a resumed fit ends with the
    same moments. They are held in the memory of the CPU: two numbers, and one for each rank, for
    every weight.

    Of a :class:`~lightning_bnn.VariationalBNN` a snapshot is one draw of its Gaussian, so that the
    moments are those of draws, and :meth:`average` is a mean of draws.

    A fit that would take fewer than two snapshots is refused before it begins, where its length is
    known; one that takes fewer than ``rank`` is warned of.

    Args:
        start: When averaging begins: a share of training (a float from 0 to less than 1), or after
            how many epochs (an int; steps, if ``every_n_steps`` is given).
        every_n_epochs: Epochs from one snapshot to the next; found as above if neither is given.
        every_n_steps: Optimizer steps from one snapshot to the next.
        rank: How many deviations are kept, the last ones; 0 for the diagonal alone. None keeps 20,
            or as many as there are snapshots.
        scale: What the covariance is multiplied by; 1 is that of the snapshots.
        lr: The learning rate in the averaging phase, whatever a scheduler says; ``"auto"``: as
            above (but that of a sampler is left alone); None leaves it alone.
        anneal: In how many epochs (or steps) learning rates go to ``lr``, along a cosine, from what
            they are when averaging begins. None takes those before the first snapshot, so that all
            snapshots are of one learning rate.
        net: For a LightningModule that is no strategy: the name of its attribute that is the
            network, such as ``"model"``, or ``"self"`` for the module itself. Weights that are
            frozen at the first snapshot are not averaged. With BatchNorm batches are pairs of
            inputs and targets, unless the module has a method ``split(batch)`` that gives these.
        likelihood: For such a module: how outputs of the network give targets.
        refresh_batch_norm: The number of training batches from which BatchNorm's statistics are
            recomputed for each draw; None for one pass over the training data. Layers that are in
            evaluation mode while training, as in fine-tuning, keep theirs.

    Example:
        >>> from torch import nn
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from lightning_bnn import SGMCMC
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> loader = DataLoader(TensorDataset(torch.randn(8, 2), torch.randn(8, 1)), batch_size=4)
        >>> swag = SWAGMoments(start=0.5, every_n_epochs=1, rank=3)
        >>> trainer = pl.Trainer(max_epochs=6, accelerator="cpu", logger=False,
        ...                      enable_checkpointing=False, enable_progress_bar=False,
        ...                      enable_model_summary=False, callbacks=[swag])
        >>> trainer.fit(SGMCMC(nn.Linear(2, 1), Gaussian(0.1), chains=4), loader)
        >>> swag.snapshots, len(swag.posterior().components), swag.posterior().components[0].rank
        (3, 4, 3)
    """

    def __init__(
        self,
        start: int | float = 0.75,  # int: a command line would make 1.0 of 1
        every_n_epochs: int | None = None,
        every_n_steps: int | None = None,
        rank: int | None = None,
        scale: float = 1.0,
        lr: float | Literal["auto"] | None = "auto",
        anneal: int | None = None,
        net: str | None = None,
        likelihood: Likelihood | None = None,
        refresh_batch_norm: int | None = None,
    ) -> None:
        share = isinstance(start, float) and 0 <= start < 1
        if not share and not (is_whole(start) and start >= 0):
            raise ConfigurationError(
                "start= is a share of training, from 0.0 to less than 1.0, or a whole number of "
                f"epochs or steps; got {start!r}."
            )
        if every_n_epochs is not None and every_n_steps is not None:
            raise ConfigurationError("Give every_n_epochs= or every_n_steps=, not both.")
        if rank is not None and check_whole("rank", rank, 0) == 1:
            raise ConfigurationError("rank= is at least 2, or 0 for the diagonal alone; got 1.")
        if lr is not None and not (isinstance(lr, str) and lr == "auto"):
            check_number("lr", lr)
        if refresh_batch_norm is not None:
            check_whole("refresh_batch_norm", refresh_batch_norm, 1)
        if anneal is not None and (lr is None or lr == "auto"):
            raise ConfigurationError(f"anneal={anneal} says how to get to lr=, which is not given.")
        self._unit: Unit = "epochs" if every_n_steps is None else "steps"
        given = every_n_epochs if every_n_steps is None else every_n_steps
        self._every = None if given is None else check_whole(f"every_n_{self._unit}", given, 1)
        self.start, self.rank, self.scale = start, rank, check_number("scale", scale)
        self.lr = lr
        self._anneal = None if anneal is None else check_whole("anneal", anneal, 0)
        self.net, self.likelihood = net, likelihood
        self.refresh_batch_norm = refresh_batch_norm
        self._source: Any = None  # a Source, from the first setup on
        self._fitted: tuple[pl.Trainer, pl.LightningModule] | None = None
        # the last fit's, for BatchNorm, with the number of batches to read
        self._data: tuple[pl.Trainer, Any, float] | None = None
        self._state = _State()
        self._restored: _State | None = None
        self._in_batch = self._checked = False

    # ---------------------------------------------------------------- what it leaves behind

    @property
    def unit(self) -> Unit:
        """What positions are counted in."""
        return self._state.unit or self._unit

    @property
    def every(self) -> int:
        """How far snapshots are apart."""
        return self._state.every or self._every or 1

    @property
    def anneal(self) -> int:
        """How long the learning rate takes to that of the averaging phase."""
        return self.every if self._anneal is None else self._anneal

    @property
    def snapshots(self) -> int:
        """The number of snapshots that were taken."""
        return 0 if self._state.moments is None else self._state.moments.count

    def phase(self) -> dict[str, str]:
        """The number of snapshots in the progress bar."""
        return {"snapshots": f"{self.snapshots}"}

    @property
    def moments(self) -> RunningMoments:
        """The moments of the weights as they lie in one flat vector, (members, P).

        Raises:
            ConfigurationError: No snapshot was taken yet.
        """
        if self._state.moments is None or self._source is None:
            raise ConfigurationError(
                f"SWAGMoments has taken no snapshot yet: the first is taken {self.every} "
                f"{self.unit} after start={self.start}, in this process (not with ddp_spawn)."
            )
        return self._state.moments

    def gaussian(self) -> WeightPosterior:
        """The Gaussian itself; of an ensemble the mixture of one for each member.

        BatchNorm's statistics, and other buffers, are those of the training at the last snapshot,
        which are not those of the draws: see :meth:`posterior`.
        """
        return self._mixture(self._gaussians())

    def posterior(self, draws: int | None = None, seed: int = 0) -> WeightPosterior:
        """The posterior of SWAG; of an ensemble that of MultiSWAG.

        Without BatchNorm in the network this is :meth:`gaussian`. With BatchNorm it is stored
        draws, each with statistics that are recomputed from the training data of the fit: one
        forward pass over them for each draw of each member. They are computed when they are first
        asked for, and are in the checkpoints that are saved afterwards. What the likelihood has
        learned is that of the last snapshot.

        Args:
            draws: The number of stored draws of each member; by default 30 with BatchNorm, and the
                Gaussian itself without.
            seed: Decides the stored draws.
        """
        return self._mixture(self.member_posteriors(draws, seed))

    def member_posteriors(
        self, draws: int | None = None, seed: int = 0
    ) -> Mapping[int, WeightPosterior]:
        """The parts of :meth:`posterior`: that of each member, by its row in the strategy.

        Args:
            draws: As for :meth:`posterior`.
            seed: As for :meth:`posterior`.
        """
        gaussians = self._gaussians()
        if draws is None and not self._state.last["batch_norm"]:
            return gaussians
        count = _DRAWS if draws is None else check_whole("draws", draws, 1)
        generator = torch.Generator().manual_seed(seed)
        rank = len(self.moments.deviations)
        key = f"{count} draws of rank {rank}, scale {self.scale}, seed {seed}"
        return self._stored(key, gaussians, lambda part: part.sample(count, generator))

    def average(self) -> WeightPosterior:
        """SWA: the mean of the snapshots alone, one draw for each member.

        BatchNorm's statistics are recomputed for it from the training data, as in
        :meth:`posterior`.
        """
        mean = lambda part: {name: tensor[None] for name, tensor in part.mean.items()}  # noqa: E731
        return self._mixture(self._stored("average", self._gaussians(mean_alone=True), mean))

    def _gaussians(self, mean_alone: bool = False) -> dict[int, LowRankPosterior]:
        """The Gaussian of each member that was not dropped, by its row."""
        moments, source = self.moments, self._source
        if self.snapshots < 2 and not mean_alone:
            raise ConfigurationError(
                "A Gaussian needs at least 2 snapshots, and 1 was taken. Train longer, or take "
                "average()."
            )
        deviations = [] if mean_alone else moments.deviations
        names, last = self._state.names, self._state.last
        tensors = {**source.current_draws(), **last["buffers"]}
        layout = FlatLayout({name: tensors[name][0] for name in names})
        net, dtype = source.net, moments.mean.dtype
        if tensors[names[0]].dtype != dtype:  # the moments of bfloat16 weights are float32
            net = copy_network(net).to(dtype)
            tensors = {k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}
        gaussians = {}
        for row in last["alive"]:
            if not moments.mean[row].isfinite().all():
                continue  # it diverged in the last step, before it was dropped
            columns = [deviation[row] for deviation in deviations]
            likelihood = deepcopy(source.likelihood_of(row))
            likelihood.load_state_dict(last["learned"][row])
            gaussians[row] = LowRankPosterior(
                net,
                likelihood,
                layout.views(moments.mean[row]),
                layout.views(moments.variance[row]),
                layout.views(torch.stack(columns)) if columns else None,
                {name: t[row].to("cpu") for name, t in tensors.items() if name not in names},
                self.scale,
            ).to("cpu")
        if not gaussians:
            raise NonFiniteError("All members have diverged: no member's mean is finite.")
        return gaussians

    def _mixture(self, parts: Mapping[int, WeightPosterior]) -> WeightPosterior:
        """Of a single network its posterior itself."""
        components = list(parts.values())
        return components[0] if len(self.moments.mean) == 1 else MixturePosterior(components)

    def _stored(
        self,
        kind: str,
        gaussians: dict[int, LowRankPosterior],
        draw: Callable[[LowRankPosterior], Weights],
    ) -> Mapping[int, WeightPosterior]:
        """Draws of each member's Gaussian, with BatchNorm's statistics of each."""
        weights = {row: draw(part) for row, part in gaussians.items()}
        if self._state.last["batch_norm"]:
            # which members are left decides which random numbers a member's draws are made of
            key = f"{kind}, members {list(gaussians)}, {self.refresh_batch_norm or 'all'} batches"
            known = self._state.statistics
            if key not in known:
                fresh = {row: self._fresh(row, gaussians[row], weights[row]) for row in gaussians}
                # with those that were asked for before: draws and their average
                known = self._state.statistics = {**dict(list(known.items())[-1:]), key: fresh}
            weights = {row: {**weights[row], **known[key][row]} for row in weights}
        return {
            row: DrawsPosterior(part.net, part.likelihood, unstack(weights[row]), part.fixed)
            for row, part in gaussians.items()
        }

    # ---------------------------------------------------------------- BatchNorm's statistics

    def _fresh(self, row: int, part: LowRankPosterior, weights: Weights) -> Weights:
        """Statistics from the training data, of each draw of a member's weights."""
        if self._data is None:
            raise ConfigurationError(
                "BatchNorm's statistics are recomputed from the training data, and SWAGMoments has "
                "seen none yet. Ask after a fit (one with ckpt_path= of a finished run loads the "
                "data and trains no further), or take gaussian()."
            )
        trainer, loader, batches = self._data
        layers, options = self._state.last["batch_norm"], {"loader": loader, "fixed": part.fixed}
        fresh = with_training_statistics(
            self._source, weights, layers, trainer, int(batches), row=row, **options
        )
        return {name: tensor.to("cpu") for name, tensor in fresh.items() if name not in weights}

    def _check_data(self, trainer: pl.Trainer, batch: Any) -> None:
        """Raise where BatchNorm's statistics could not be recomputed after the training."""
        single_loader(trainer.train_dataloader)
        if self.refresh_batch_norm is None and trainer.num_training_batches == math.inf:
            raise ConfigurationError(
                "BatchNorm's statistics are recomputed from the training data, which have no "
                "length. Pass refresh_batch_norm= with a number of batches."
            )
        if batch is not None:  # unknown to a training step that takes the iterator
            self._source.inputs_of(batch, 0)

    def _keep_data(self, trainer: pl.Trainer) -> None:
        """Keep the training data: the trainer drops them when it validates or tests."""
        if trainer.train_dataloader is not None:
            batches = self.refresh_batch_norm or trainer.num_training_batches
            self._data = trainer, trainer.train_dataloader, batches

    # ---------------------------------------------------------------- before training

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the network and the likelihood."""
        self._restored = None
        if stage == "fit" or self._source is None:
            self._source = self._source_of(pl_module)

    def _source_of(self, module: pl.LightningModule) -> Source:
        if isinstance(module, Strategy):
            return module
        source = PlainModule(module, self.net or "self", self.likelihood)
        if self.net is None or source.likelihood is None:
            raise ConfigurationError(
                f"SWAGMoments of {type(module).__name__}, which is no strategy, needs net=, the "
                "name of its network ('self' for itself), and likelihood=, such as Categorical()."
            )
        return source

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Resume with earlier snapshots or start anew."""
        # a trainer that fits again counts its steps on; a new one starts from 0
        same = self._fitted is not None and self._fitted[1] is pl_module
        again = same and 0 < self._state.step <= trainer.global_step
        self._fitted = trainer, pl_module
        self._in_batch = self._checked = False
        if self._restored is not None:
            self._state = replace(self._restored)
        elif not again:
            if self.snapshots:
                rank_zero_warn(
                    f"SWAGMoments drops the {self.snapshots} snapshots of an earlier fit. Take "
                    "swag.posterior() before a new one."
                )
            self._state = _State()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find when averaging begins; refuse a fit that ends before it or takes too little."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        show_phase(trainer)
        begun = self.snapshots or self._state.first_rates
        if self._state.start is None or not begun:
            self._state.start = None
            if self._every is None:
                self._space(trainer, pl_module)
        length = training_length(trainer, pl_module, self.unit)
        if self._state.start is None:
            self._state.start = self._resolve_start(length)
        if self._state.pending is not None:
            self._take(trainer, self._state.pending)
            self._state.pending = None
        now = trainer.global_step if self.unit == "steps" else trainer.current_epoch
        self._state.seen = max(self._state.seen, now)
        if length is not None:
            self._check_length(length)

    def _space(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Choose how far snapshots are apart, by the length of the averaging phase."""
        self._state.unit = self._state.every = None
        epochs, steps = (training_length(trainer, module, unit) for unit in ("epochs", "steps"))
        per_epoch = steps_per_epoch(trainer, module)
        if epochs is None or steps is None or per_epoch is None:
            return
        if epochs - self._resolve_start(epochs) >= _SNAPSHOTS:
            return
        share = isinstance(self.start, float)
        start = self._resolve_start(steps) if share else self.start * per_epoch
        self._state.unit, self._state.start = "steps", int(start)
        self._state.every = max(1, (int(steps) - int(start)) // _SNAPSHOTS)

    def _resolve_start(self, length: float | None) -> int:
        """The position at which averaging begins."""
        if not isinstance(self.start, float):
            return self.start
        if length is None:
            raise ConfigurationError(
                f"start={self.start} is a share of training, and the number of {self.unit} of this "
                f"fit is not known. Pass start= as a number of {self.unit} (an int)."
            )
        return math.floor(self.start * length + 1e-9)  # 0.29 · 100 is a little less than 29

    def _check_length(self, length: float) -> None:
        """Raise if the fit will take fewer than two snapshots, warn if fewer than the rank."""
        more = self._due_by(math.floor(length + 1e-9)) - self._due_by(self._state.seen)
        total = self.snapshots + more
        if total >= max(2, self.rank or 0):
            return
        message = (
            f"SWAGMoments would take {total} snapshots in the {length:g} {self.unit} of this fit, "
            f"one every {self.every} after the first {self._state.start}; expected at least "
            f"{max(2, self.rank or 0)}. Train longer, start earlier or take them more often."
        )
        if total < 2:
            raise ConfigurationError(message)
        rank_zero_warn(message)

    def _due_by(self, position: int) -> int:
        """The number of snapshots up to a position, if there is one after each ``every``."""
        assert self._state.start is not None
        return max(0, position - self._state.start) // self.every

    # ---------------------------------------------------------------- while training

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the learning rates of the averaging phase; check the first batch."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._in_batch = True
        if not self._checked and training_batch_norm(self._source.net):
            self._check_data(trainer, batch)
            self._keep_data(trainer)
        self._checked = True
        gone = self._gone(trainer, batch_idx)
        begun = self._state.begun or self._state.first_rates or self.snapshots
        if gone >= 0 and not begun:
            self._begin()
        elif begun and batch_idx == 0:
            self._source.go_back_to_best()
        # schedules of samplers have a meaning of their own
        sampled = any(isinstance(one, Sampler | WarmUp) for one in trainer.optimizers)
        if self.lr is not None and not (self.lr == "auto" and sampled):
            self._set_rates(trainer, gone)

    def _gone(self, trainer: pl.Trainer, batch_idx: int) -> float:
        """How far training is beyond the position at which averaging begins."""
        assert self._state.start is not None
        position: float = trainer.global_step
        if self.unit == "epochs":
            batches = trainer.num_training_batches
            # of an epoch of unknown length all is one step
            position = trainer.current_epoch + (batch_idx / batches if batches < math.inf else 1)
        return position - self._state.start

    def _begin(self) -> None:
        """Begin to average: around the best weights by validation, where they are kept."""
        self._state.begun = True
        if back := self._source.go_back_to_best():
            rank_zero_info(
                f"SWAGMoments averages from the best weights by validation of the members {back}. "
                "Pass restore_best=False to the ensemble to go on from the last ones."
            )

    def _set_rates(self, trainer: pl.Trainer, gone: float) -> None:
        """Anneal learning rates, or hold them.

        They are set before every batch, so that a scheduler's values are never used, and are a
        function of how far training has gone, so that they are the same after a resume.
        """
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        now = [float(group["lr"]) for group in groups]
        if gone < 0 or self._state.first_rates is None:
            before = self._state.largest_rates
            largest = [max(pair) for pair in zip_longest(before, now, fillvalue=0.0)]
            self._state.largest_rates = largest
        if gone < 0:
            return
        share = gone / self.anneal if self.anneal else 1.0
        weight = (1 - math.cos(math.pi * share)) / 2
        begins = self._state.first_rates is None
        first_rates = self._state.first_rates = self._state.first_rates or now
        peaks = self._state.largest_rates or first_rates  # a checkpoint of before has none
        held = [
            max(first, _LEAST_RATE * largest) if self.lr == "auto" else float(self.lr or 0)
            for first, largest in zip(first_rates, peaks, strict=False)
        ]
        if begins and self.lr == "auto":
            rates = ", ".join(f"{rate:.3g}" for rate in dict.fromkeys(held))
            rank_zero_info(f"SWAGMoments averages at the learning rate {rates}.")
        for group, first, last in zip(groups, first_rates, held, strict=False):
            value = last if share >= 1 else first + (last - first) * weight
            if isinstance(group["lr"], Tensor):  # as compiled and capturable optimizers have it
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any
    ) -> None:
        """Take a snapshot, if this batch ended a step or an epoch after which one is due."""
        if (position := self._due(trainer)) is not None:
            self._take(trainer, position)
        self._in_batch = False

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the snapshot of an epoch that ended without a last batch."""
        self.on_train_batch_end(trainer, pl_module)

    def _due(self, trainer: pl.Trainer) -> int | None:
        """The position of a snapshot that is to be taken now, or None."""
        position = completed(trainer, self.unit) if self._in_batch else None
        due = position is not None and self._due_by(position) > self._due_by(self._state.seen)
        return position if due else None

    def _take(self, trainer: pl.Trainer, position: int) -> None:
        """Add a snapshot of the weights that were trained at the first one."""
        source, net = self._source, self._source.net
        current = source.current_draws()
        weights = {name: current[name] for name in self._state.names or source.trained}
        alive, bad = source.alive.nonzero().flatten().tolist(), not_finite(weights)
        # a strategy that drops members does so in its next step, when it sees their energy
        if bad and (not source.drops_diverged or bad.keys() >= set(alive)):
            row, name = next(iter(bad.items()))
            raise NonFiniteError(
                f"{name!r} of member {source.ids[row]} is not finite after step "
                f"{trainer.global_step}; the snapshots before it are good. Lower the learning rate "
                "(lr=), or clip gradients."
            )
        flat = torch.cat([tensor.flatten(1) for tensor in weights.values()], dim=1)
        # low precision loses the sums of many snapshots
        flat = flat.to("cpu", torch.promote_types(flat.dtype, torch.float32), copy=True)
        kept = _RANK if self.rank is None else self.rank
        moments = self._state.moments
        self._state.moments = moments.add(flat, kept) if moments else RunningMoments.of(flat, kept)
        beside = {
            "buffers": copy_to_cpu({k: current[k] for k, _ in net.named_buffers() if k in current}),
            "learned": [
                copy_to_cpu(source.likelihood_of(row).state_dict()) for row in range(len(flat))
            ],
            "alive": alive,
            "batch_norm": training_batch_norm(net),
        }
        # running statistics are of the batches that a rank has seen
        self._state.last = trainer.strategy.broadcast(beside)
        self._state.names, self._state.statistics = list(weights), {}
        self._state.seen, self._state.step = position, trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if there is nothing to make a posterior of; leave out who was dropped since."""
        if self._state.moments is not None:
            alive = self._source.alive.nonzero().flatten().tolist()
            self._state.last = {**self._state.last, "alive": alive}
        elif not trainer.fast_dev_run:  # type: ignore[attr-defined]
            rank_zero_warn(
                f"SWAGMoments took no snapshot: averaging begins after {self._state.start} "
                f"{self.unit}. Start earlier or train longer."
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the training data, also those of a fit that had nothing more to do."""
        self._keep_data(trainer)

    # ---------------------------------------------------------------- checkpoints

    @property
    def state_key(self) -> str:
        """Under which the checkpoint has the state: other options are another callback."""
        return self._generate_state_key(
            start=self.start, unit=self._unit, every=self._every or 1, rank=self.rank, net=self.net
        )

    def state_dict(self) -> dict[str, Any]:
        """The moments, where the schedule stands, and statistics that were recomputed."""
        moments = self._state.moments
        # another callback may save before this one has had its turn
        due = None if self._fitted is None else self._due(self._fitted[0])
        return {
            **vars(self._state),
            "moments": None if moments is None else moments.state_dict(),
            "pending": self._state.pending if due is None else due,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for a fit that resumes; one without snapshots takes it at once."""
        saved = state_dict["moments"]
        moments = None if saved is None else RunningMoments(**saved)
        self._restored = _State(**{**state_dict, "moments": moments})
        if not self.snapshots:  # else a test of an earlier checkpoint would lose later ones
            self._state = replace(self._restored)
