r"""Variational inference (Bayes by Backprop) on any network.

Minimises, in units of the mean energy,

.. math::
    \mathbb{E}_q\Big[-\tfrac1n\sum_i\log p(y_i\mid x_i,w)\Big]
    + \frac{T\beta}{N}\,\mathrm{KL}(q\,\|\,p)

over a family of distributions q (:mod:`lightning_bnn.families`; by default the mean field
:math:`q = \prod N(\mu_j, \sigma_j^2)`), with the KL summed over all weights. At T = 1 and β = 1 its
minimum is the family's best fit to the Bayes posterior, and −N times it is the ELBO. T scales the
KL: q approximates the posterior of the likelihood to the power 1/T. With ``tempers="posterior"``
the prior in the KL is :math:`p^{1/T}`, and q approximates the cold posterior exp(−U/T); the two
are side by side in :mod:`lightning_bnn.target`. β rises linearly to 1 over the
first ``kl_warmup`` steps. Weights that are not Bayesian are point estimates under the same prior,
as if their σ were 0, and so is what a likelihood learns under a prior of its own. (Blundell et al.,
2015, *Weight Uncertainty in Neural Networks*.) Pruned weights (:meth:`VariationalBNN.prune`) are
zero from then on and take no part in the KL.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
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
from lightning_bnn.lightning import (
    TrainerStatus,
    WeightAveraging,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import checked_masks, network_tensors
from lightning_bnn.posteriors import Evidence, WeightPosterior
from lightning_bnn.posteriors.prior import GivenPrior, chosen_prior, starting_network
from lightning_bnn.priors import BoundPrior
from lightning_bnn.random import NoiseGenerator, member_seed
from lightning_bnn.recipes import allow
from lightning_bnn.selection import Choice, FlatLayout, select, trainable_names
from lightning_bnn.stacked import call_network
from lightning_bnn.strategies.base import DataOptions, OptimizerFactory, Strategy
from lightning_bnn.strategies.collapse import concordant_pairs, explain_collapse, is_suspicious
from lightning_bnn.strategies.schedule import NamedSchedule, SchedulerFactory, steps_of_fit
from lightning_bnn.strategies.temperature import TemperatureSearch
from lightning_bnn.strategies.training_batches import training_batches
from lightning_bnn.target import Target, Tempers, prior_power

__all__ = ["VariationalBNN"]

allow(families, Family)

Estimator = Literal["weight", "flipout", "local"]

_SCALE = 0.01  # that a weight starts with, where nobody says which
_SEARCH = "temperature='validation' chooses T by the validation NLL in a fit, and this one"
_LOOKED_AT = 512  # training examples, where a fit may have learned nothing


class VariationalBNN(Strategy):
    """Variational inference as a Lightning module.

    Args:
        net: Any module; the strategy works on a copy, and its weights become the means.
        likelihood: How outputs of the network give targets.
        prior: One prior for all weights, or a mapping from name patterns to priors. A posterior is
            one, too (see :class:`~lightning_bnn.PosteriorPrior`).
        bayesian: Which weights are Bayesian: ``None`` for all, a name pattern, a submodule, a
            function or a list (see :func:`lightning_bnn.selection.select`). The others are
            point estimates under their prior.
        num_data: The number of training examples; found from the training data if left out.
        temperature: T, the weight of the KL; 1 is the Bayes posterior. ``"validation"``: chosen
            on the validation data in the second half of the fit, and said so
            (:mod:`lightning_bnn.strategies.temperature`).
        tempers: What T is the temperature of (see :mod:`lightning_bnn.target`): the
            ``"likelihood"``, p(D|w)^(1/T) p(w), or the ``"posterior"``, (p(D|w) p(w))^(1/T), which
            is the default of ``SGMCMC``.
        kl_warmup: Optimizer steps over which the KL's weight rises to 1.
        draws: Draws of the weights in each training step.
        estimator: ``"weight"``: one draw for the batch, for any network. ``"flipout"`` and
            ``"local"``: noise for each example in linear and convolutional layers.
        initial_scale: The standard deviation that every weight starts with; None: that of
            :func:`starting_scale`, or 0.01 with an optimizer of your own or without a schedule.
        family: The variational distribution, one of :mod:`lightning_bnn.families`; by default
            ``MeanField()``.
        optimizer: Makes the optimizer from parameters; by default Adam, at the rate of
            :func:`lightning_bnn.strategies.schedule.peak_rate`.
        scheduler: ``"auto"``, ``"cosine"``, None or what makes a learning-rate scheduler from the
            optimizer (see :class:`~lightning_bnn.strategies.base.Strategy`).
        scheduler_interval: Whether a scheduler of your own steps each ``"epoch"`` or ``"step"``.
        predict_draws: Draws of the posterior in validation, test and prediction; None: 32.
        evidence_draws: Draws for a bound of the log evidence, one pass over the training data at
            the end of a fit, which the posterior keeps (see :meth:`evidence_bound`); 0: none.
        seed: Seed of the noise; by default ``seed_everything`` decides it.
        **data: ``split``, ``output`` and ``monitor`` (see :class:`DataOptions`).

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.priors import Normal
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
        prior: GivenPrior | None = None,
        bayesian: Choice = None,
        num_data: int | None = None,
        temperature: float | Literal["validation"] = 1.0,
        tempers: Tempers = "likelihood",
        kl_warmup: int = 0,
        draws: int = 1,
        estimator: Estimator = "weight",
        initial_scale: float | None = None,
        family: Family | None = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: NamedSchedule | SchedulerFactory | None = "auto",
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        predict_draws: int | None = None,
        evidence_draws: int = 0,
        seed: int | None = None,
        **data: Unpack[DataOptions],
    ) -> None:
        names = select(net, bayesian) if isinstance(net, nn.Module) else []
        super().__init__(
            starting_network(net, prior),
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
        self.evidence_draws = check_whole("evidence_draws", evidence_draws, 0)
        if evidence_draws and (evidence_draws == 1 or temperature != 1):
            raise ConfigurationError(
                "The bound of the evidence is that of the Bayes posterior, temperature=1, and its "
                f"error needs evidence_draws= of at least 2; got temperature={temperature!r} and "
                f"evidence_draws={evidence_draws}."
            )
        trainable = trainable_names(self.net)
        prior = chosen_prior(prior, trainable)
        own = dict(self.net.named_parameters())
        tensors = {name: own[name] for name in names}
        points = {name: own[name] for name in trainable if name not in tensors}
        self._finds_scale = initial_scale is None and optimizer is None
        self.family = family.bind(tensors, _SCALE if initial_scale is None else initial_scale)
        self.prior = BoundPrior(prior, self.net, tensors)
        self.point_prior = BoundPrior(prior, self.net, points) if points else None
        self.temperature_search: TemperatureSearch | None = None
        if isinstance(temperature, str):
            if temperature != "validation":
                raise ConfigurationError(
                    f"temperature= is a number of at least 0, or 'validation'; got {temperature!r}."
                )
            self.temperature_search, temperature = TemperatureSearch(), 1.0
        self.target = Target(self.likelihood, self.prior, num_data, temperature, self.point_prior)
        self.tempers = tempers
        self._set_temperature(self.target.temperature)
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

    def _set_temperature(self, temperature: float) -> None:
        """Let T be the temperature of what ``tempers`` names."""
        self.target.temperature = temperature
        power = prior_power(self.tempers, temperature, own="likelihood")
        for prior in (self.prior, self.point_prior):
            if prior is not None:
                prior.power = power
        if self.family.keep is not None:  # what was pruned is parked at the prior
            self.family.prune(self.family.keep, self.prior)

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
        if self.temperature_search is not None:
            self.log("temperature", self.target.temperature, batch_size=size)
        return loss

    def _kl_weight(self, step: int) -> float:
        """β in a step; the first is 1."""
        return min(1.0, step / self.kl_warmup) if self.kl_warmup else 1.0

    def phase(self) -> dict[str, str]:
        """The KL's weight in the progress bar, until it is 1, and the temperature if it changes."""
        weight = self._kl_weight(self.global_step)
        shown = {"kl_weight": f"{weight:.2f}"} if weight < 1 else {}
        if self.temperature_search is not None:
            shown["T"] = f"{self.target.temperature:g}"
        return shown

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

    # ---------------------------------------------------------------- a temperature by validation

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics, and end a stage of the search for a temperature."""
        super().on_validation_epoch_end()
        search = self.temperature_search
        if search is None or self.trainer.sanity_checking or not self._is_fitting():
            return
        nll = float(self._metrics["val"][0].compute()["nll"])
        # what is made while validating is changed by training
        with torch.inference_mode(False), torch.no_grad():
            better = search.score(self.global_step, nll, steps_of_fit(self.trainer))
            if better:
                now = self._tensors() if search.chosen is None else {}
                search.kept = {name: one.clone() for name, one in now.items()}
            elif better is not None:
                self._go_back(search)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin the next stage: after checkpoints of what was validated are written."""
        search, before = self.temperature_search, self.target.temperature
        if search is not None and search.temperature != before:
            prior = None if self.tempers == "posterior" else self.prior
            self.family.sharpen(before / search.temperature, prior)
            self._set_temperature(search.temperature)

    def _go_back(self, search: TemperatureSearch) -> None:
        """To the weights and the temperature of the best stage."""
        for name, tensor in self._tensors().items():
            tensor.copy_(search.kept[name])
        self._set_temperature(search.best)
        search.kept = {}

    def _tensors(self) -> dict[str, Tensor]:
        """All that training changes."""
        buffers = {name: one for name, one in self.named_buffers() if not name.endswith("keep")}
        return {**dict(self.named_parameters()), **buffers}

    def _end_search(self, search: TemperatureSearch) -> None:
        """Choose among what was tried, if the fit ended early, and say what was chosen."""
        if search.chosen is None and search.scores:
            search.chosen = search.best
            with torch.no_grad():
                self._go_back(search)
        if len(search.scores) < 2:
            rank_zero_warn(
                "temperature='validation' had nothing to choose from, and T is 1: it compares "
                "rounds of validation in the second half of a fit, of which this one had "
                f"{len(search.scores)}. Train for longer, or validate more often "
                "(val_check_interval=)."
            )
            return
        rank_zero_info(str(search))
        for logger in self.trainer.loggers:
            logger.log_hyperparams({"chosen_temperature": search.chosen})

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
        made = self.family.posterior(self.net, self.likelihood, fixed)
        known = self.finished.get("bound_of")
        if known is not None and torch.allclose(known, self._fingerprint(), rtol=1e-9, atol=0):
            value, error = self.finished["bound"].tolist()
            made.evidence = Evidence(value, error, "ELBO")
        return made

    def _fingerprint(self) -> Tensor:
        """Sums over q and the network, which change as soon as these do."""
        tensors = [*self.family.parameters(), *network_tensors(self.net).values()]
        return torch.stack([tensor.detach().double().abs().sum().cpu() for tensor in tensors])

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
            >>> from lightning_bnn.priors import Learned, Normal
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
        log_likelihood, kl = self._bound([batch], draws)
        return log_likelihood.mean() - kl.mean()

    @torch.no_grad()
    def evidence_bound(self, batches: Iterable[Any], draws: int = 32) -> Evidence:
        """The ELBO, a lower bound of the log evidence, with its Monte Carlo error.

        It lies below by KL(q‖posterior), which is no part of the error. Point estimates, and what
        a likelihood has learned, are taken as given.

        Args:
            batches: All N training examples, such as a loader that leaves none out.
            draws: Draws of the weights over which the likelihood is averaged, at least 2.
        """
        return _evidence(*self._bound(batches, check_whole("draws", draws, 2)))

    def _must_finish(self) -> bool:
        return self.evidence_draws > 0 and super()._must_finish()

    @torch.no_grad()
    def finish(self, batches: Iterable[Any]) -> dict[str, Tensor]:
        """Bound the evidence, with the shares of all processes."""
        log_likelihood, kl = self._bound(batches, self.evidence_draws)
        if self.trainer.world_size > 1:
            log_likelihood = self.trainer.strategy.reduce(log_likelihood, reduce_op="sum")
        value, error, _ = _evidence(log_likelihood, kl)
        bound = torch.tensor([value, error], dtype=torch.float64)
        return {"bound": bound, "bound_of": self._fingerprint()}

    def _bound(self, batches: Iterable[Any], draws: int) -> tuple[Tensor, Tensor]:
        """The log likelihood of the data by draw, and estimates of the KL, each (draws,)."""
        posterior, log_likelihood = self.posterior(), torch.zeros(())
        for inputs, targets in map(self.split, batches):
            outputs = posterior.predict(inputs, draws).outputs
            each = [self.likelihood.log_prob(one, targets).sum() for one in outputs]
            log_likelihood = log_likelihood.to(outputs.device) + torch.stack(each).double()
        mean, noise = self.family.mean, NoiseGenerator(seed=0)
        power, self.prior.power = self.prior.power, 1.0  # the evidence is that of the prior itself
        kl = torch.stack(
            [
                self.family.kl(self.family.rsample(noise.stream.fill_(empty)), self.prior)
                for empty in [mean.new_empty(self.family.noise_size) for _ in range(draws)]
            ]
        )
        self.prior.power = power
        return log_likelihood, kl.double()

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
        pruned = [] if family.keep is None else [(p, family.keep) for p in family.per_weight()]
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
        if self.temperature_search is not None:
            found = {**self.temperature_search.state_dict(), "now": self.target.temperature}
            checkpoint["lightning_bnn"]["temperature"] = found

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the same layers."""
        super().on_load_checkpoint(checkpoint)
        layers = checkpoint.get("lightning_bnn", {}).get("per_example")
        if self._per_example is not None and layers is not None:
            self._per_example.keep(layers)
        found = checkpoint.get("lightning_bnn", {}).get("temperature")
        if self.temperature_search is not None and found is not None:
            self.temperature_search.load_state_dict(found)
            self._set_temperature(found["now"])

    def on_fit_start(self) -> None:
        """Begin a search for a temperature, unless a checkpoint or this trainer has begun it."""
        new = self._random_state is None and self.global_step == 0
        super().on_fit_start()
        if self.temperature_search is None:
            return
        if not self.trainer.enable_validation:
            raise ConfigurationError(
                f"{_SEARCH} has no validation data. Pass val_dataloaders= (or a data module with "
                "val_dataloader) to fit, or a number as temperature=."
            )
        if new:
            self.temperature_search = TemperatureSearch()
            self._set_temperature(self.temperature_search.temperature)

    def on_train_end(self) -> None:
        """Say what was found, and warn of a fit that has learned nothing."""
        super().on_train_end()
        if self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if self.temperature_search is not None:
            self._end_search(self.temperature_search)
        self._warn_of_collapse()

    @torch.no_grad()
    def _warn_of_collapse(self) -> None:
        """Warn if the weights are at their prior, and the training data are not predicted."""
        flat = self.family.at_prior(self.prior)
        if flat is None or not is_suspicious(at_prior := self.family.layout.views(flat)):
            return
        posterior, wins, losses, seen = self.posterior(), 0, 0, 0
        with training_batches(self.trainer, seed=self.global_step) as batches:
            for batch in batches:
                inputs, targets = self.split(batch)
                predictive = posterior.predict(inputs, draws=self.predict_draws)
                more = concordant_pairs(predictive, targets)
                wins, losses = wins + more[0], losses + more[1]
                seen += self.batch_size(batch) or 1
                if seen >= _LOOKED_AT:
                    break
        if (text := explain_collapse(at_prior, wins, losses)) is not None:
            rank_zero_warn(text)

    def on_train_start(self) -> None:
        """Find N, and let all ranks draw the same noise."""
        super().on_train_start()
        state = self.trainer.strategy.broadcast(self.noise.get_extra_state())
        self.noise.set_extra_state(state)
        # no earlier: it loads the training data, which a resumed fit then begins anew
        if self.temperature_search is not None and steps_of_fit(self.trainer) == math.inf:
            raise ConfigurationError(
                f"{_SEARCH} has no known length. Pass max_epochs= or max_steps= to the trainer, or "
                "a number as temperature=."
            )
        if self._finds_scale and self.peak_lr is not None and self.global_step == 0:
            self.family.begin(starting_scale(self.peak_lr, steps_of_fit(self.trainer)))


def starting_scale(peak: float, steps: float) -> float:
    """σ0, the standard deviation with which a fit of the default Adam and schedule begins.

    Adam moves log σ by at most its rate in a step, so by at most about ½ peak · steps in a fit. The
    σ of a weight on which the data are silent rises that far, and a fit has its best predictions if
    that is to about 0.14: more noise than the means had time to get used to costs as much as
    too little. Hence σ0 = exp(-2 - ½ peak · steps), within 0.001 and 0.01; the longer a fit, the
    less its end depends on it. NLL on rows cut from the training data (one seed) by
    log σ0 + ½ peak · steps, to the nearest column:

    ========================  =====  =====  =====  =====  =====  =====  =====
    data                       -5.1   -4.0   -2.8   -1.7   -0.6   +0.6   +4.8
    ========================  =====  =====  =====  =====  =====  =====  =====
    CIFAR-10, CNN              1.40   1.26   1.11
    MNIST, 2x200                                    .139   .164   .172   .254
    boston, 1x50                                    .317   .438   .544
    naval, 1x50                                     .075   .290   .474
    yacht, 1x50                                    -1.94         -1.21
    ========================  =====  =====  =====  =====  =====  =====  =====

    Args:
        peak: The peak of the schedule.
        steps: The length of the fit.

    Example:
        >>> [round(starting_scale(0.005, steps), 4) for steps in (100, 1500, 10_000)]
        [0.01, 0.0032, 0.001]
    """
    return min(max(math.exp(-2 - min(peak * steps / 2, 10.0)), 1e-3), _SCALE)


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


def _evidence(log_likelihood: Tensor, kl: Tensor) -> Evidence:
    """The bound from independent draws of both of its parts."""
    variance = (log_likelihood.var() + kl.to(log_likelihood).var()) / len(kl)
    return Evidence(float(log_likelihood.mean() - kl.mean()), float(variance.sqrt()), "ELBO")


def _mean(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).mean()


def _flat(layout: FlatLayout, masks: Mapping[str, Tensor], device: torch.device) -> Tensor:
    keep = torch.ones(layout.size, dtype=torch.bool, device=device)
    views = layout.views(keep)
    for name, mask in masks.items():
        views[name].copy_(mask)
    return keep
