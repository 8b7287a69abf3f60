r"""Variational inference (Bayes by Backprop) on any network.

Minimises, in units of the mean energy,

.. math::
    \mathbb{E}_q\Big[-\tfrac1n\sum_i\log p(y_i\mid x_i,w)\Big]
    + \frac{T\beta}{N}\,\mathrm{KL}(q\,\|\,p)

over a family of distributions q (:mod:`lightning_bnn.families`; by default the mean field
:math:`q = \prod N(\mu_j, \sigma_j^2)`), with the KL summed over all weights. At T = 1 and β = 1 its
minimum is the family's best fit to the Bayes posterior, and −N times it is the ELBO. T scales the
KL: q approximates the posterior of the likelihood to the power 1/T. β rises linearly to 1 over the
first ``kl_warmup`` steps. Weights that are not Bayesian are point estimates under the same prior,
as if their σ were 0, and so is what a likelihood learns under a prior of its own. (Blundell et al.,
2015, *Weight Uncertainty in Neural Networks*.) Pruned weights (:meth:`VariationalBNN.prune`) are
zero from then on and take no part in the KL.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from lightning_bnn import families
from lightning_bnn.checks import check_kind, check_option, check_whole
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import Family, MeanField
from lightning_bnn.families.per_example import PerExampleNoise
from lightning_bnn.families.pruned import KeptTensors
from lightning_bnn.lightning import TrainerStatus, WeightAveraging, pl
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import checked_masks, network_tensors
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.priors import BoundPrior, Normal, Prior, check_prior
from lightning_bnn.random import NoiseGenerator, member_seed
from lightning_bnn.recipes import allow
from lightning_bnn.selection import Choice, FlatLayout, select, trainable_names
from lightning_bnn.stacked import call_network
from lightning_bnn.strategies.base import DataOptions, OptimizerFactory, SchedulerFactory, Strategy
from lightning_bnn.target import Target

__all__ = ["VariationalBNN"]

allow(families, Family)

Estimator = Literal["weight", "flipout", "local"]


class VariationalBNN(Strategy):
    """Variational inference as a Lightning module.

    Args:
        net: Any module; the strategy works on a copy, and its weights become the means.
        likelihood: How outputs of the network give targets.
        prior: One prior for all weights, or a mapping from name patterns to priors.
        bayesian: Which weights are Bayesian: ``None`` for all, a name pattern, a submodule, a
            function or a list (see :func:`lightning_bnn.selection.select`). The others are
            point estimates under their prior.
        num_data: The number of training examples; found from the training data if left out.
        temperature: T, the weight of the KL; 1 is the Bayes posterior. It tempers the likelihood
            alone, p(D|w)^(1/T) p(w), where ``SGMCMC`` tempers the prior, too.
        kl_warmup: Optimizer steps over which the KL's weight rises to 1.
        draws: Draws of the weights in each training step.
        estimator: ``"weight"``: one draw for the batch, for any network. ``"flipout"`` and
            ``"local"``: noise for each example in linear and convolutional layers.
        initial_scale: The standard deviation that every weight starts with.
        family: The variational distribution, one of :mod:`lightning_bnn.families`; by default
            ``MeanField()``.
        optimizer: Makes the optimizer from parameters; by default ``partial(Adam, lr=1e-3)``.
        scheduler: Makes a learning-rate scheduler from the optimizer.
        scheduler_interval: Whether the scheduler steps each ``"epoch"`` or each ``"step"``.
        predict_draws: Draws of the posterior in validation, test and prediction.
        seed: Seed of the noise; by default ``seed_everything`` decides it.
        **data: ``split``, ``output`` and ``monitor`` (see :class:`DataOptions`).

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> bnn = VariationalBNN(nn.Linear(2, 1), Gaussian(0.1), Normal(0.0, 1.0), num_data=100)
        >>> loss = bnn.loss((torch.randn(8, 2), torch.randn(8, 1)))
        >>> loss.backward()
        >>> bnn.posterior().predict(torch.randn(4, 2)).mean.shape
        torch.Size([4, 1])
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        prior: Prior | Mapping[str, Prior] | None = None,
        bayesian: Choice = None,
        num_data: int | None = None,
        temperature: float = 1.0,
        kl_warmup: int = 0,
        draws: int = 1,
        estimator: Estimator = "weight",
        initial_scale: float = 0.01,
        family: Family | None = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        predict_draws: int = 16,
        seed: int | None = None,
        **data: Unpack[DataOptions],
    ) -> None:
        names = select(net, bayesian) if isinstance(net, nn.Module) else []
        super().__init__(
            net,
            likelihood,
            num_data,
            optimizer,
            scheduler,
            scheduler_interval,
            predict_draws,
            **data,
        )
        check_option("estimator", estimator, ("weight", "flipout", "local"))
        family = MeanField() if family is None else deepcopy(family)
        check_kind("family", family, Family, "one of lightning_bnn.families, such as MeanField()")
        if estimator != "weight" and not family.factorised:
            raise ConfigurationError(
                f"estimator={estimator!r} gives each example noise of its own, which needs "
                f"independent weights; those of {type(family).__name__} are not. Leave it out."
            )
        self.estimator = estimator
        self.train_draws = check_whole("draws", draws, 1)
        self.kl_warmup = check_whole("kl_warmup", kl_warmup, 0)
        prior = Normal() if prior is None else prior
        trainable = trainable_names(self.net)
        check_prior(prior, trainable)
        own = dict(self.net.named_parameters())
        tensors = {name: own[name] for name in names}
        points = {name: own[name] for name in trainable if name not in tensors}
        self.family = family.bind(tensors, initial_scale)
        self.prior = BoundPrior(prior, self.net, tensors)
        self.point_prior = BoundPrior(prior, self.net, points) if points else None
        self.target = Target(self.likelihood, self.prior, num_data, temperature, self.point_prior)
        self.noise = NoiseGenerator(seed)
        self.others = KeptTensors(
            {name: t for name, t in network_tensors(self.net).items() if name not in tensors}
        )
        self._points = FlatLayout(points)
        for parameter in tensors.values():
            parameter.requires_grad_(False)  # a draw stands in for it
        self._per_example = (
            None if estimator == "weight" else PerExampleNoise(self.net, names, estimator)
        )
        self._keep_noise = False

    # ---------------------------------------------------------------- the objective

    def loss(self, batch: Any, kl_weight: float = 1.0) -> Tensor:
        """The negative ELBO per training example, estimated on a batch.

        Args:
            batch: Inputs and targets.
            kl_weight: β, the weight of the KL.
        """
        inputs, targets = self.split(batch)
        energies, divergences, noise_energies = [], [], []
        for index in range(self.train_draws):
            outputs, kl = self._run_draw(index, inputs)
            self.check("train", outputs, targets)
            energies.append(self.target.data_energy(outputs[None], targets)[0])
            divergences.append(kl)
            if (noise := self.target.noise_energy(outputs[None])) is not None:
                noise_energies.append(noise[0])
        energy, kl = _mean(energies), _mean(divergences)
        self._last = (energy.detach(), kl.detach())
        if self.point_prior is not None:
            own = dict(self.net.named_parameters())
            flat = torch.cat([own[name].reshape(-1) for name in self._points.names])
            kl = kl + self.point_prior.energy(flat, self._kept_points())
        if noise_energies:
            kl = kl + _mean(noise_energies)
        return energy + (kl_weight * self.target.temperature / self.target.num_data) * kl

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch; accumulated batches share one draw, as one large batch would."""
        self._keep_noise = batch_idx % self.trainer.accumulate_grad_batches != 0
        loss = self.loss(batch, self._kl_weight(self.trainer.global_step + 1))
        self._keep_noise = False
        self.watch(loss.detach()[None], batch, batch_idx)
        energy, kl = self._last
        size = self.batch_size(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=size)
        self.log_dict({"train_nll": energy, "kl": kl}, batch_size=size)
        return loss

    def _kl_weight(self, step: int) -> float:
        """β in a step; the first is 1."""
        return min(1.0, step / self.kl_warmup) if self.kl_warmup else 1.0

    def phase(self) -> dict[str, str]:
        """The KL's weight in the progress bar, until it is 1."""
        weight = self._kl_weight(self.global_step)
        return {"kl_weight": f"{weight:.2f}"} if weight < 1 else {}

    def _run_draw(self, index: int, inputs: Any) -> tuple[Tensor, Tensor]:
        """Outputs of the network at one draw of the weights, and the KL."""
        if self._per_example is not None:
            return self._run_per_example(index, inputs, self._per_example)
        fresh = not self._keep_noise
        weights, kl = self.family.draw(index, self.noise.stream, self.prior, fresh)
        return call_network(self.net, {**weights, **self._zeroed_points()}, inputs), kl

    def _run_per_example(
        self, index: int, inputs: Any, layers: PerExampleNoise
    ) -> tuple[Tensor, Tensor]:
        """The same, where each example has noise of its own in the layers that can take it."""
        family, views = self.family, self.family.layout.views
        assert isinstance(family, MeanField)
        space = family.workspace(index)
        if not (self._keep_noise and space.filled):
            self.noise.stream.fill_(space.noise)
            space.filled = True
        draw = family.rsample(space.noise)
        kl = family.kl(draw, self.prior)
        mean, sd, draw = map(family.masked, (family.mean, family.sd(), draw))
        # examples differ between ranks, and so must their noise
        generator = torch.Generator(mean.device)
        seed = (self.noise.stream.integer() + self.global_rank) % 2**63
        while True:
            generator.manual_seed(seed)
            means = views(mean)
            tensors = {k: means[k] if k in layers.covered else v for k, v in views(draw).items()}
            with layers.active(views(sd), views(space.noise), generator):
                outputs = call_network(self.net, {**tensors, **self._zeroed_points()}, inputs)
            if not layers.drop_unreached():
                return outputs, kl

    # ---------------------------------------------------------------- what it leaves behind

    def forward(self, inputs: Any) -> Tensor:
        """The network at the posterior mean; for predictions use :meth:`posterior`."""
        mean = self.family.layout.views(self.family.masked(self.family.mean))
        # BatchNorm that trains has to find its own buffers
        own = self._zeroed_points() if self.training else self._zeroed()
        return call_network(self.net, {**mean, **own}, inputs)

    def posterior(self) -> WeightPosterior:
        """The fitted distribution as it stands now; later training does not change it."""
        own = {**network_tensors(self.net), **self._zeroed()}
        bayesian = set(self.family.layout.names)
        fixed = {name: tensor for name, tensor in own.items() if name not in bayesian}
        return self.family.posterior(self.net, self.likelihood, fixed)

    holder = "family"

    @property
    def inferred(self) -> list[str]:
        """The names of the Bayesian parameters."""
        return self.family.layout.names

    @property
    def point_estimates(self) -> list[str]:
        """The names of the point estimates."""
        return self._points.names

    @property
    def trained(self) -> list[str]:
        """The names of the Bayesian parameters and of the point estimates."""
        names = {*self.family.layout.names, *self._points.names}
        return [name for name in super().trained if name in names]

    def current_draws(self) -> dict[str, Tensor]:
        """One draw of the Gaussian as it stands, with its buffers; seed and step decide it."""
        seed = member_seed(self.noise.stream.seed, self.global_step)
        generator = torch.Generator(self.device).manual_seed(seed)
        others = {name: tensor.detach()[None] for name, tensor in self._zeroed().items()}
        draw = self.posterior().sample(1, generator)
        return {**super().current_draws(), **others, **draw}

    @torch.no_grad()
    def prior_scales(self) -> dict[str, Tensor]:
        """By name, the learned scales of the prior, 1/√E[τ] under q(τ) at its optimum, (1,).

        Example:
            >>> from lightning_bnn.likelihoods import Gaussian
            >>> from lightning_bnn.priors import Learned
            >>> net = nn.Linear(50, 1, bias=False)
            >>> nn.init.constant_(net.weight, 0.5).shape
            torch.Size([1, 50])
            >>> VariationalBNN(net, Gaussian(0.1), Normal(scale=Learned())).prior_scales()
            {'weight': tensor([0.4943])}
        """
        scales: dict[str, Tensor] = {}
        if self.prior.learned is not None:
            moments, layout = self.posterior().moments(), self.family.layout
            mean, variance = layout.flatten(moments.mean), layout.flatten(moments.variance)
            scales = self.prior.fitted_scales(mean, variance.sqrt(), self.family.keep)
        if self.point_prior is not None and self.point_prior.learned is not None:
            flat = self._points.flatten(dict(self.net.named_parameters()))
            scales |= self.point_prior.fitted_scales(flat, keep=self._kept_points())
        return {name: scale[None] for name, scale in scales.items()}

    @torch.no_grad()
    def elbo(self, batch: Any, draws: int = 32) -> Tensor:
        """An estimate of the evidence lower bound in nats.

        Args:
            batch: All N training examples.
            draws: Draws of the weights over which the likelihood is averaged.
        """
        inputs, targets = self.split(batch)
        outputs = self.posterior().predict(inputs, draws).outputs
        log_likelihood = torch.stack(
            [self.likelihood.log_prob(one, targets).sum() for one in outputs]
        ).mean()
        mean, noise = self.family.mean, NoiseGenerator(seed=0)
        kl = torch.stack(
            [
                self.family.kl(self.family.rsample(noise.stream.fill_(empty)), self.prior)
                for empty in [mean.new_empty(self.family.noise_size) for _ in range(draws)]
            ]
        ).mean()
        return log_likelihood - kl

    # ---------------------------------------------------------------- pruning

    def prune(self, masks: Mapping[str, Tensor]) -> None:
        """Take weights out for good: zero in every draw from now on, and in the posterior.

        They get no gradient and no KL, and the optimizer's state of them is cleared. What was
        pruned stays so, whatever later masks say; the masks are in the ``state_dict``. Beside
        Bayesian weights, masks may name point estimates and buffers of the network.

        Args:
            masks: By name, a boolean tensor (or one of zeros and ones) in the shape of the
                weight: False where it is pruned.

        Raises:
            ConfigurationError: A name or a shape is wrong, or a fit is going on whose weights a
                callback of Lightning averages.

        Example:
            >>> from lightning_bnn.likelihoods import Gaussian
            >>> bnn = VariationalBNN(nn.Linear(2, 1), Gaussian(0.1), num_data=100)
            >>> bnn.prune({"weight": torch.tensor([[True, False]])})
            >>> bnn.posterior().sd["weight"]
            tensor([[0.0100, 0.0000]])
        """
        given = checked_masks(self.net, masks)
        if self._trainer is not None and self._trainer.state.status == TrainerStatus.RUNNING:
            refuse_averaging(self._trainer)
        others = {name: mask for name, mask in given.items() if name in self.others.layout.names}
        bayesian = {name: mask for name, mask in given.items() if name not in others}
        if bayesian:
            self.family.prune(_flat(self.family.layout, bayesian, self.device), self.prior)
        if others:
            self.others.restrict(_flat(self.others.layout, others, self.device))
        own = network_tensors(self.net)
        for name, tensor in self._zeroed().items():
            own[name].data.copy_(tensor)
        self._clear_optimizers()

    def masks(self) -> dict[str, Tensor]:
        """By name, what remains of each tensor from which something was pruned.

        Example:
            >>> from lightning_bnn.likelihoods import Gaussian
            >>> bnn = VariationalBNN(nn.Linear(2, 1), Gaussian(0.1), num_data=100)
            >>> bnn.prune({"weight": torch.tensor([[True, False]])})
            >>> bnn.masks()
            {'weight': tensor([[ True, False]])}
        """
        return {**self.family.masks(), **self.others.masks()}

    def _zeroed(self) -> dict[str, Tensor]:
        """The pruned tensors of the network that are not Bayesian, with their zeros."""
        return self.others.zeroed(network_tensors(self.net)) if self.others.keep is not None else {}

    def _zeroed_points(self) -> dict[str, Tensor]:
        if self.others.keep is None:
            return {}
        return self.others.zeroed(dict(self.net.named_parameters()))

    def _kept_points(self) -> Tensor | None:
        """Which of the point estimates remain, as they lie in one vector."""
        if self.others.keep is None:
            return None
        return self._points.flatten(self.others.layout.views(self.others.keep))

    def _clear_optimizers(self) -> None:
        """Let no momentum move what was pruned, nor a gradient that is already there."""
        family, own = self.family, dict(self.net.named_parameters())
        pruned = [] if family.keep is None else [(p, family.keep) for p in family.parameters()]
        pruned += [(own[name], keep) for name, keep in self.others.masks().items() if name in own]
        optimizers = self.trainer.optimizers if self._trainer is not None else []
        for parameter, keep in pruned:
            states = [one.state.get(parameter, {}).values() for one in optimizers]
            for tensor in (parameter.grad, *itertools.chain(*states)):
                if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
                    tensor.masked_fill_(~keep, 0)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any
    ) -> None:
        """Drop masks of point estimates that a whole checkpoint does not have."""
        if f"{prefix}family.mean" in state_dict and f"{prefix}others.keep" not in state_dict:
            self.others.keep = None
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)

    # ---------------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add which layers take per-example noise: those that were not called lost it."""
        super().on_save_checkpoint(checkpoint)
        saved = checkpoint.get("state_dict", {})
        for name, kept in (("family", self.family), ("others", self.others)):
            # an average of an earlier fit may stand in for the weights, made without the masks
            if kept.keep is not None and "family.mean" in saved:
                saved.setdefault(f"{name}.keep", kept.keep)
        if self._per_example is not None:
            checkpoint["lightning_bnn"]["per_example"] = self._per_example.layers

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the same layers."""
        super().on_load_checkpoint(checkpoint)
        layers = checkpoint.get("lightning_bnn", {}).get("per_example")
        if self._per_example is not None and layers is not None:
            self._per_example.keep(layers)

    def on_train_start(self) -> None:
        """Find N, and let all ranks draw the same noise."""
        super().on_train_start()
        state = self.trainer.strategy.broadcast(self.noise.get_extra_state())
        self.noise.set_extra_state(state)


def refuse_averaging(trainer: pl.Trainer) -> None:
    """Raise if a callback averages the weights of a fit in which weights are pruned."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging):
            name = type(callback).__name__
            raise ConfigurationError(
                f"Weights cannot be pruned in a fit whose weights {name} averages: its copy of the "
                "model was made before the masks, has none of them, and takes the place of the "
                f"model in checkpoints and at the end, where what was pruned would be back. Leave "
                f"{name} out of this fit; to average as well, do so in a fit that begins after "
                "the last pruning, with use_buffers=False."
            )


def _mean(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).mean()


def _flat(layout: FlatLayout, masks: Mapping[str, Tensor], device: torch.device) -> Tensor:
    keep = torch.ones(layout.size, dtype=torch.bool, device=device)
    views = layout.views(keep)
    for name, mask in masks.items():
        views[name].copy_(mask)
    return keep
