r"""SWAG: a Gaussian fitted to the weights that training passes through at its end.

In the last part of training a snapshot of the weights is taken after every epoch or every few
steps. Of the snapshots the running mean, the second central moment and the last R deviations are
kept (see :mod:`lightning_bnn.callbacks.swag_running`), and make the Gaussian

.. math:: N\big(\bar w,\; s\,(\tfrac12\,\mathrm{diag}(v) + \tfrac12\,D D^\top / (R - 1))\big)

of :class:`~lightning_bnn.posteriors.LowRankPosterior`. Over a stacked ensemble each member has
moments of its own, and the posterior is the mixture of the members' Gaussians: MultiSWAG.

Maddox et al. (2019), *A Simple Baseline for Bayesian Uncertainty in Deep Learning*; Izmailov et al.
(2018), *Averaging Weights Leads to Wider Optima and Better Generalization* (SWA, the mean alone);
Wilson and Izmailov (2020), *Bayesian Deep Learning and a Probabilistic Perspective of
Generalization* (MultiSWAG).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_warn

from lightning_bnn.callbacks.draw_rule import check_count, check_positive
from lightning_bnn.callbacks.swag_learning_rate import AnnealShape, AveragingRate
from lightning_bnn.callbacks.swag_posterior import (
    FreshStatistics,
    check_rank,
    gaussians,
    mixture,
    stored,
    usable_rank,
)
from lightning_bnn.callbacks.swag_running import RunningMoments
from lightning_bnn.callbacks.swag_schedule import (
    SnapshotRule,
    Unit,
    begun,
    check_number,
    check_start,
    completed,
    resolve_start,
    training_length,
)
from lightning_bnn.callbacks.swag_source import SnapshotSource
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import LowRankPosterior, WeightPosterior
from lightning_bnn.posteriors.batch_norm import training_batch_norm
from lightning_bnn.posteriors.weights import Weights

__all__ = ["SWAGMoments"]

_RANK = 20
_DRAWS = 30


class SWAGMoments(pl.Callback):
    """Track the moments of the weights late in training, and make a posterior of them.

    It works with every strategy and with any LightningModule, needs no validation, and does nothing
    in a ``fast_dev_run``. Its whole state is in every checkpoint, and a fit that goes on from one
    ends with the same moments. They are held in the memory of the CPU: two numbers, and one for
    each rank, for every weight.

    Of a :class:`~lightning_bnn.VariationalBNN` a snapshot is one draw of its Gaussian, so that the
    moments are those of draws, and :meth:`average` is a mean of draws.

    A fit that would take fewer than two snapshots is refused before it begins, where its length is
    known; one that takes fewer than ``rank`` is warned of.

    Args:
        start: When averaging begins: a share of training (a float from 0 to less than 1), or after
            how many epochs (an int; steps, if ``every_n_steps`` is given).
        every_n_epochs: Epochs from one snapshot to the next; 1 if neither is given.
        every_n_steps: Optimizer steps from one snapshot to the next.
        rank: How many deviations are kept, the last ones; 0 for the diagonal alone. None keeps 20,
            or as many as there are snapshots.
        scale: What the covariance is multiplied by; 1 is that of the snapshots.
        lr: The learning rate in the averaging phase, whatever a scheduler says; None leaves it
            alone.
        anneal: In how many epochs (or steps) learning rates go to ``lr`` from what they are when
            averaging begins. None takes those before the first snapshot, so that all snapshots are
            of one learning rate.
        anneal_shape: How they go there: ``"cosine"`` or ``"linear"``.
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
        >>> swag = SWAGMoments(start=0.5, rank=3)
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
        lr: float | None = None,
        anneal: int | None = None,
        anneal_shape: AnnealShape = "cosine",
        net: str | None = None,
        likelihood: Likelihood | None = None,
        refresh_batch_norm: int | None = None,
    ) -> None:
        check_start(start)
        if every_n_epochs is not None and every_n_steps is not None:
            raise ConfigurationError(
                "Snapshots are taken by epochs or by steps; got every_n_epochs="
                f"{every_n_epochs} and every_n_steps={every_n_steps}. Leave one out."
            )
        self.unit: Unit = "epochs" if every_n_steps is None else "steps"
        self.every = next((n for n in (every_n_epochs, every_n_steps) if n is not None), 1)
        check_count(f"every_n_{self.unit}", self.every, 1)
        if rank is not None:
            check_rank(rank)
        check_positive("scale", scale)
        if anneal is not None and lr is None:
            raise ConfigurationError(f"anneal={anneal} says how to get to lr=, which is not given.")
        if refresh_batch_norm is not None:
            check_count("refresh_batch_norm", refresh_batch_norm, 1)
        self.start, self.rank, self.scale = start, rank, scale
        self.rate = AveragingRate(lr, self.every if anneal is None else anneal, anneal_shape)
        self.net, self.likelihood = net, likelihood
        self.refresh_batch_norm = refresh_batch_norm
        self._statistics = FreshStatistics(refresh_batch_norm)
        self._source: SnapshotSource | None = None
        self._trainer: pl.Trainer | None = None  # the one that fitted
        self._fitted: pl.LightningModule | None = None
        self._restored: dict[str, Any] | None = None
        self._in_batch = self._checked = False
        self._moments: RunningMoments | None = None
        self._last: dict[str, Any] = {}  # what belongs to the last snapshot beside its weights
        self._names: list[str] = []
        self._rule: SnapshotRule | None = None
        self._seen = 0  # the last position that was looked at
        self._step = 0  # of the last snapshot
        self._pending: int | None = None  # one that was to come when the checkpoint was made

    # ---------------------------------------------------------------- what it leaves behind

    @property
    def snapshots(self) -> int:
        """The number of snapshots that were taken."""
        return 0 if self._moments is None else self._moments.count

    @property
    def moments(self) -> RunningMoments:
        """The moments of the weights as they lie in one flat vector, (members, P).

        Raises:
            ConfigurationError: No snapshot was taken yet.
        """
        if self._moments is None:
            raise ConfigurationError(
                "SWAGMoments has taken no snapshot yet: the first is taken after start="
                f"{self.start} {'of training' if isinstance(self.start, float) else self.unit} and "
                f"{self.every} more {self.unit}."
            )
        return self._moments

    def gaussian(self, rank: int | None = None) -> WeightPosterior:
        """The Gaussian itself; of an ensemble the mixture of one for each member.

        BatchNorm's statistics, and other buffers, are those of the training at the last snapshot,
        which are not those of the draws: see :meth:`posterior`.

        Args:
            rank: Use only so many of the last deviations; 0 for the diagonal alone.
        """
        self._known_source()
        parts = self._gaussians(usable_rank(self.moments, rank))
        return mixture(list(parts.values()), len(self.moments.mean))

    def _gaussians(self, rank: int) -> dict[int, LowRankPosterior]:
        """The Gaussian of each member by its place in the strategy."""
        source, moments = self._known_source(), self.moments
        return gaussians(source, moments, self._names, self._last, rank, self.scale)

    def posterior(
        self, draws: int | None = None, rank: int | None = None, seed: int = 0
    ) -> WeightPosterior:
        """The posterior of SWAG; of an ensemble that of MultiSWAG.

        Without BatchNorm in the network this is :meth:`gaussian`. With BatchNorm it is stored
        draws, each with statistics that are recomputed from the training data of the fit: one
        forward pass over them for each draw of each member. What the likelihood has learned is
        that of the last snapshot.

        Args:
            draws: The number of stored draws of each member; by default 30 with BatchNorm, and the
                Gaussian itself without.
            rank: Use only so many of the last deviations; 0 for the diagonal alone.
            seed: Decides the stored draws.
        """
        parts = self.member_posteriors(draws, rank, seed)
        return mixture(list(parts.values()), len(self.moments.mean))

    def member_posteriors(
        self, draws: int | None = None, rank: int | None = None, seed: int = 0
    ) -> dict[int, WeightPosterior]:
        """The parts of :meth:`posterior`: that of each member, by its place in the strategy.

        Args:
            draws: As for :meth:`posterior`.
            rank: As for :meth:`posterior`.
            seed: As for :meth:`posterior`.
        """
        self._known_source()
        rank = usable_rank(self.moments, rank)
        if draws is None and not self._last["batch_norm"]:
            return dict(self._gaussians(rank))
        count = _DRAWS if draws is None else draws
        check_count("draws", count, 1)
        generator = torch.Generator().manual_seed(seed)
        return self._stored(rank, lambda part: part.sample(count, generator))

    def average(self) -> WeightPosterior:
        """SWA: the mean of the snapshots alone, one draw for each member.

        BatchNorm's statistics are recomputed for it from the training data, as in
        :meth:`posterior`.
        """
        parts = self._stored(0, lambda part: {name: t[None] for name, t in part.mean.items()})
        return mixture(list(parts.values()), len(self.moments.mean))

    def _stored(
        self, rank: int, draw: Callable[[LowRankPosterior], Weights]
    ) -> dict[int, WeightPosterior]:
        source = self._known_source()
        parts: dict[int, WeightPosterior] = {}
        for place, part in self._gaussians(rank).items():
            layers = self._last["batch_norm"]
            weights = self._statistics.compute(source, layers, place, part, draw(part))
            parts[place] = stored(part, weights)
        return parts

    def _known_source(self) -> SnapshotSource:
        if self._source is None:
            raise ConfigurationError(
                "SWAGMoments has taken no snapshot yet: it is one of a Trainer's callbacks, and "
                "that Trainer has not fitted; or it has in other processes (ddp_spawn), and the "
                "moments were lost with them. Use strategy='ddp' then."
            )
        return self._source

    # ---------------------------------------------------------------- before training

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Find the network and the likelihood."""
        self._restored = None
        if stage == "fit" or self._source is None:
            self._source = SnapshotSource(pl_module, self.net, self.likelihood)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on with earlier snapshots or start anew."""
        # a trainer that fits again goes on counting; a new one starts from 0
        again = self._fitted is pl_module and 0 < self._step <= trainer.global_step
        self._trainer, self._fitted = trainer, pl_module
        self._in_batch = self._checked = False
        if self._restored is not None:
            self._adopt(self._restored)
        elif not again:
            if self.snapshots:
                rank_zero_warn(
                    f"SWAGMoments drops the {self.snapshots} snapshots of an earlier fit, as this "
                    "fit starts anew. Take swag.posterior() before it."
                )
            self._adopt({})

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find when averaging begins; refuse a fit that ends before it or takes too little."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        length = training_length(trainer, pl_module, self.unit)
        if self._rule is None or not (self.snapshots or self.rate.first):  # else it has begun
            begin = resolve_start(self.start, length, self.unit)
            self._rule = SnapshotRule(begin, self.every)
        self._known_source().weights(self._names or None)
        if self._pending is not None:
            self._take(trainer, self._pending)
            self._pending = None
        now = trainer.global_step if self.unit == "steps" else trainer.current_epoch
        self._seen = max(self._seen, now)
        if length is not None:
            check_number(self._rule, self.unit, length, self._seen, self.snapshots, self.rank or 0)

    # ---------------------------------------------------------------- while training

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the learning rates of the averaging phase; check the first batch."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._in_batch = True
        if not self._checked and training_batch_norm(self._known_source().net):
            self._statistics.keep(trainer)
            self._statistics.check(self._known_source(), batch)
        self._checked = True
        assert self._rule is not None
        gone = begun(trainer, self.unit, batch_idx) - self._rule.start
        self.rate.apply(trainer.optimizers, gone)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Take a snapshot, if this batch ended a step or an epoch after which one is due."""
        self._look(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the snapshot of an epoch that ended without a last batch."""
        self._look(trainer)

    def _look(self, trainer: pl.Trainer) -> None:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if (position := self._due(trainer)) is not None:
            self._take(trainer, position)
        self._in_batch = False

    def _due(self, trainer: pl.Trainer) -> int | None:
        """The position of a snapshot that is to be taken now, or None."""
        position = completed(trainer, self.unit) if self._in_batch else None
        if position is None or self._rule is None or not self._rule.is_due(position, self._seen):
            return None
        return position

    def _take(self, trainer: pl.Trainer, position: int) -> None:
        names, flat = self._known_source().snapshot(self._names or None, trainer.global_step)
        kept = _RANK if self.rank is None else self.rank
        if self._moments is None:
            self._names, self._moments = names, RunningMoments.of(flat, kept)
        else:
            self._moments = self._moments.add(flat, kept)
        # running statistics are of the batches that a rank has seen
        self._last = trainer.strategy.broadcast(self._known_source().surroundings(len(flat)))
        self._statistics.keep(trainer)
        self._seen, self._step = position, trainer.global_step

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if there is nothing to make a posterior of; leave out who was dropped since."""
        if self._moments is not None:
            self._last["alive"] = self._known_source().alive(len(self._moments.mean))
        if not self.snapshots and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            assert self._rule is not None
            rank_zero_warn(
                f"SWAGMoments took no snapshot: averaging begins after {self._rule.start} "
                f"{self.unit}, and the fit ended in epoch {trainer.current_epoch} after step "
                f"{trainer.global_step}. Start earlier or train longer.",
                category=UserWarning,
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the training data, also those of a fit that had nothing more to do."""
        self._statistics.keep(trainer)

    # ---------------------------------------------------------------- checkpoints

    @property
    def state_key(self) -> str:
        """Under which the checkpoint has the state: other options are another callback."""
        return self._generate_state_key(
            start=self.start, unit=self.unit, every=self.every, rank=self.rank, net=self.net
        )

    def state_dict(self) -> dict[str, Any]:
        """The moments, and where the schedule stands."""
        # another callback may save before this one has had its turn
        due = None if self._trainer is None else self._due(self._trainer)
        return {
            "moments": None if self._moments is None else self._moments.state_dict(),
            "names": list(self._names),
            "last": dict(self._last),
            "start": None if self._rule is None else self._rule.start,
            "seen": self._seen,
            "step": self._step,
            "pending": self._pending if due is None else due,
            "first_rates": self.rate.first,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state for a fit that goes on; one without snapshots takes it at once."""
        self._restored = state_dict
        if not self.snapshots:  # else a test of an earlier checkpoint would lose later ones
            self._adopt(state_dict)

    def _adopt(self, state: dict[str, Any]) -> None:
        moments, start = state.get("moments"), state.get("start")
        self._moments = None if moments is None else RunningMoments(**moments)
        self._names, self._last = list(state.get("names", [])), dict(state.get("last", {}))
        self._rule = None if start is None else SnapshotRule(start, self.every)
        self._seen, self._step = state.get("seen", 0), state.get("step", 0)
        self._pending, self.rate.first = state.get("pending"), state.get("first_rates")
