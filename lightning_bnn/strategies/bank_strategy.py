"""Strategies that train a bank: K sets of weights side by side (ensembles, chains).

What all of them share: the energy of every set, gradients clipped by set, the rule for a set that
diverges, and how a checkpoint says what is in the bank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_bnn.bank import Bank, View, clip_rows
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import EMAWeightAveraging, WeightAveraging
from lightning_bnn.posteriors.prior import GivenPrior, chosen_prior
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import BoundPrior
from lightning_bnn.selection import trainable_names
from lightning_bnn.stacked import Mode
from lightning_bnn.strategies.base import Strategy
from lightning_bnn.strategies.best_weights import BestWeights
from lightning_bnn.target import Target

__all__ = ["BankStrategy"]


class BankStrategy(Strategy):
    """A strategy that trains K sets of weights of one network; a subclass builds its bank."""

    bank: Bank
    seed: int
    noun = "members"  # what the sets are called
    best: BestWeights | None = None  # of a strategy that keeps the best weights by validation

    def _build_bank(
        self,
        stacked: Mapping[str, Tensor],
        prior: GivenPrior | None,
        ids: Sequence[int],
        names: Sequence[str],
        num_data: int | None,
        temperature: float = 1.0,
        learned: Mapping[str, Tensor] | None = None,
        mode: Mode = "auto",
        chunk: int | None = None,
        prior_power: float = 1.0,
    ) -> None:
        """Make the bank and the target; trainable weights not among ``names`` are points."""
        trainable = trainable_names(self.net)
        prior = chosen_prior(prior, trainable)
        own = dict(self.net.named_parameters())
        points = [name for name in trainable if name not in names]
        self.prior = BoundPrior(prior, self.net, {name: own[name] for name in names})
        self.point_prior = (
            BoundPrior(prior, self.net, {name: own[name] for name in points}) if points else None
        )
        priors = [one for one in (self.prior, self.point_prior) if one is not None]
        for one in priors:
            one.power = prior_power
        self.target = Target(self.likelihood, self.prior, num_data, temperature, self.point_prior)
        self.bank = Bank(self.net, stacked, ids, names, points, learned, mode, chunk)
        self.net.requires_grad_(False)  # the bank's weights stand in for the network's own
        self._saved: dict[str, Any] = {}
        self._prior_constant = sum(one.energy_at_mode() for one in priors)

    @property
    def ids(self) -> list[int]:
        """The numbers of the members or chains."""
        return self.bank.ids

    @property
    def weights(self) -> nn.Parameter:
        """The weights of all sets, (K, P)."""
        return self.bank.weights

    @property
    def alive(self) -> Tensor:
        """Which sets have not been dropped, (K,)."""
        return self.bank.alive

    @property
    def restores_best(self) -> bool:
        """Whether each set goes back to its best weights by validation, which the fit has."""
        fits = self._trainer is not None and self.trainer.enable_validation
        return self.best is not None and fits

    holder = "bank"

    @property
    def trained(self) -> list[str]:
        """The names of the parameters that are inferred."""
        return self.bank.layout.names

    @property
    def point_estimates(self) -> list[str]:
        """The names of the parameters that are trained, but not inferred."""
        points = self.bank.points
        return self.bank.point_layout.names if points is not None and points.requires_grad else []

    # ---------------------------------------------------------------- the energy

    def view(self, rows: slice, batch: Any) -> View:
        """What the sets in some rows see of a batch: by default all of it."""
        return View(*self.split(batch))

    def energies(self, batch: Any) -> Tensor:
        """The mean energy of every set, (K,), estimated on a batch."""
        scaler = self._loss_scaler()
        return self.bank.energies(
            self.target,
            lambda rows: self.view(rows, batch),
            lambda outputs, targets: self.check("train", outputs, targets),
            1.0 if scaler is None else scaler.get_scale(),
        )

    def _loss_scaler(self) -> Any:
        """What multiplies the loss in half precision, for its gradients not to vanish."""
        return getattr(self.trainer.precision_plugin, "scaler", None) if self._trainer else None

    def loss(self, batch: Any) -> Tensor:
        """The sum of the sets' mean energies: each set's gradient is its own."""
        return self.bank.total(self.energies(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The summed energies of a batch, each checked."""
        energies = self.energies(batch)
        self.watch(energies.detach(), batch, batch_idx)
        self.log_energies(energies.detach(), batch)
        return self.bank.total(energies)

    def log_energies(self, energies: Tensor, batch: Any) -> None:
        """Log the means over the sets that are alive of the loss and of its data part.

        ``train_loss`` is the mean energy without the prior's constant, so that it is the mean
        negative log likelihood and what the weights cost.
        """
        size, alive = self.batch_size(batch), self.alive.sum()
        loss = self.bank.total(energies) / alive - self._prior_constant / self.target.num_data
        nll = self.bank.total(self.bank.data_energies) / alive
        self.log("train_loss", loss, prog_bar=True, batch_size=size)
        self.log("train_nll", nll, batch_size=size)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each set's gradient by itself."""
        if not gradient_clip_val:
            return
        if getattr(optimizer, "_step_supports_amp_scaling", False) and self._loss_scaler():
            raise ConfigurationError(
                f"gradient_clip_val={gradient_clip_val} cannot be kept: a fused "
                f"{type(optimizer).__name__} takes the loss scale of half precision away only "
                "in its step. Pass fused=False to it."
            )
        self.bank.clip(gradient_clip_val, gradient_clip_algorithm)
        shared = [p.grad.view(1, -1) for p in self.likelihood.parameters() if p.grad is not None]
        if shared:
            clip_rows(shared, gradient_clip_val, gradient_clip_algorithm)

    # ---------------------------------------------------------------- scores by validation

    def scored_rows(self) -> list[int] | None:
        """The sets, as they stand, that validation predicts with; None if it does with others."""
        return None

    def on_validation_start(self) -> None:
        """Begin a round of scores; the sanity check, and validation without a fit, are none."""
        super().on_validation_start()
        if self.best is not None:
            counts = self._is_fitting() and not self.trainer.sanity_checking
            self.best.begin_round(self.scored_rows() if counts else None)

    def _evaluate(self, stage: str, batch: Any, dataloader_idx: int) -> Predictive:
        predictive = super()._evaluate(stage, batch, dataloader_idx)
        if self.best is not None and self.best.running and dataloader_idx == 0:
            self.best.add(predictive.component_log_prob(self.split(batch)[1]))
        return predictive

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics, and keep the weights of sets that were never better."""
        super().on_validation_epoch_end()
        if self.best is not None:
            reduce = partial(self.trainer.strategy.reduce, reduce_op="sum")
            self.best.end_round(self.bank, self.global_step, self.current_epoch, reduce)

    def on_train_epoch_start(self) -> None:
        """Train on from the last weights, if the best were restored."""
        super().on_train_epoch_start()
        if self.best is not None:
            self.best.exchange(self.bank, self.best.exchanged)

    # ---------------------------------------------------------------- the sets as they stand

    def current_draws(self) -> dict[str, Tensor]:
        """The weights and buffers of all sets as they stand, with a leading axis of sets.

        They are views: copy what must outlive the next step. Dropped members are among them.
        """
        return self.bank.current()

    def prior_scales(self) -> dict[str, Tensor]:
        """By name, the learned scales of the prior as they fit the sets now, 1/√E[τ | w], (K,)."""
        return self._fitted_scales()

    @torch.no_grad()
    def _fitted_scales(self) -> dict[str, Tensor]:
        scales = self.prior.fitted_scales(self.bank.weights)
        if self.point_prior is not None and self.bank.points is not None:
            scales |= self.point_prior.fitted_scales(self.bank.points)
        return scales

    def forward(self, inputs: Any) -> Tensor:
        """The outputs of every set's network, (K, batch, ...)."""
        outputs: Tensor = self.bank(inputs)
        return outputs

    # ---------------------------------------------------------------- checkpoints

    def facts(self) -> dict[str, Any]:
        """What must be the same for a run to resume, as far as it is known yet."""
        return {self.noun: self.ids}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the facts, and how the sets run: the other way would differ in the last bits."""
        super().on_save_checkpoint(checkpoint)
        state = {"mode": self.bank.stack.mode, "seed": self.seed, "facts": self.facts()}
        if self.best is not None:
            state["best"] = self.best.state_dict()
        checkpoint["lightning_bnn"]["bank"] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Run the sets as the saved ones did."""
        _translate(checkpoint)
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get("lightning_bnn", {}).get("bank", {})
        self._saved = saved.get("facts", {})
        if not self._is_fitting():  # only what the weights depend on, and nothing for a later fit
            self._saved = {k: v for k, v in self._saved.items() if k == self.noun}
        self._compare_with_saved()
        if not self._is_fitting():
            self._saved = {}
        if self.bank.stack.mode == "auto":
            self.bank.stack.mode = saved.get("mode", "auto")
        self.seed = saved.get("seed", self.seed)
        if self.best is not None and self._is_fitting() and "best" in saved:
            self.best.load_state_dict(saved["best"])

    def setup(self, stage: str) -> None:
        """Forget the checkpoint of an earlier fit; one of this fit is loaded after this."""
        super().setup(stage)
        self._saved = {}
        if stage == "fit" and self.best is not None:
            self.best = BestWeights(len(self.bank))
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            # an exponential average leaves buffers alone that are no floating-point numbers
            every = isinstance(callback, WeightAveraging)
            if every and callback._use_buffers and not isinstance(callback, EMAWeightAveraging):
                raise ConfigurationError(
                    f"{type(callback).__name__} averages buffers, and those of {self.noun} say "
                    "which of them have diverged. Pass use_buffers=False to it."
                )

    def _compare_with_saved(self) -> None:
        for name, value in self.facts().items():
            saved = self._saved.get(name, value)
            if saved != value:
                raise ConfigurationError(
                    f"The checkpoint was made with {name}={saved!r}, this strategy has {value!r}. "
                    "Make them the same to resume, or start from the checkpoint's weights in a "
                    "new run."
                )


def _translate(checkpoint: dict[str, Any]) -> None:
    """Bring a checkpoint of version 0.1 to the layout of today, in place."""
    state = checkpoint["state_dict"]
    if "weights" not in state:
        return
    for name in list(state):
        new = name.replace("member_buffer_", "buffer_").replace("chain_buffer_", "buffer_")
        if new != name or name in ("weights", "points", "learned", "alive"):
            state[f"bank.{new}"] = state.pop(name)
    state.setdefault("bank.alive", torch.ones(len(state["bank.weights"]), dtype=torch.bool))
    own = checkpoint.get("lightning_bnn", {})
    facts = own.pop("ensemble", None) or own.pop("chains", None) or {}
    modes = [own.pop(name) for name in ("members_mode", "chains_mode") if name in own]
    own["bank"] = {"facts": facts, "mode": (modes or ["auto"])[0]}
    if "seed" in own:
        own["bank"]["seed"] = own.pop("seed")
