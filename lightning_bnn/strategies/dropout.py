r"""MC dropout: a network trained with dropout, whose masks are draws of a posterior.

Dropout before a layer with weights W multiplies its inputs by noise m of mean 1, one number
for each input feature k: the layer has the weights W diag(m). That is a distribution over weights,
which is fitted by minimising, in units of the mean energy,

.. math::
    \mathbb{E}_m\Big[-\tfrac1n\sum_i\log p(y_i\mid x_i, W\,\mathrm{diag}(m))\Big]
    + \tfrac1N\Big(\mathbb{E}_m[-\log p(W\,\mathrm{diag}(m))] - \sum_l K_l\,H(p_l)\Big),

with a mask for each example (Gal and Ghahramani, 2016, *Dropout as a Bayesian Approximation*). For
a Gaussian prior N(0, s²) the second term is :math:`\|W\|^2/(2s^2(1-p))`, because E m² = 1/(1 − p).
All other weights, and those of a network that has dropout layers of its own, are point estimates
under the prior. What the kinds are:

* ``bernoulli``, ``gaussian``: noise of a fixed rate p (:mod:`lightning_bnn.dropout`), with
  the variance p/(1 − p);
* ``concrete``: the rate :math:`p_l` of each layer is learned (Gal, Hron and Kendall, 2017,
  *Concrete Dropout*). :math:`K_l` is the number of input features and
  :math:`H(p) = -p\log p - (1-p)\log(1-p)` the entropy of a mask. Training relaxes it,

  .. math:: m = (1 - z)/(1 - p), \quad z = \mathrm{sigmoid}\big((\mathrm{logit}\,p
      + \mathrm{logit}\,u)/t\big), \quad t = 0.1,

  and predictions draw it, as z is 0 or 1 with chance p but for p (1 − p)(1 − 2p) π² t²/6, which at
  p = 0.1 is 0.0012.

The paper writes the prior's part as :math:`(1-p)\|M\|^2/(2s^2)`, M the weights of a mask of
zeros and ones; M = W/(1 − p) makes it the same. It is the KL from q(W), with each row
of weights replaced by a narrow Gaussian, up to a constant that does not depend on W or p, and not
only proportional to it: no factor of two is left to choose.

Variational dropout, with a rate for each weight, is a family of :class:`VariationalBNN`:
:class:`~lightning_bnn.families.VariationalDropout`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from lightning_bnn.checks import check_option, check_probability
from lightning_bnn.dropout import (
    DropoutLayer,
    Noise,
    Places,
    add_noise,
    check_called,
    input_features,
    inserted_layers,
    multiply,
    noise_shape,
    own_layers,
    place_of,
    places_of,
)
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import DropoutPosterior
from lightning_bnn.posteriors.prior import GivenPrior, chosen_prior, starting_network
from lightning_bnn.priors import BoundPrior, Normal
from lightning_bnn.random import NoiseGenerator
from lightning_bnn.selection import Choice, FlatLayout, select, trainable_names
from lightning_bnn.stacked import StackedModule
from lightning_bnn.strategies.base import DataOptions, OptimizerFactory, Strategy
from lightning_bnn.strategies.schedule import NamedSchedule, SchedulerFactory
from lightning_bnn.target import Target

__all__ = ["Kind", "MCDropoutBNN"]

Kind = Literal["bernoulli", "gaussian", "concrete", "variational"]

_RATE = 0.1
_RELAXED = 0.1  # t of the concrete distribution
_LEAST = 1e-6  # as small as a weight counts where a prior asks for its spread


class MCDropoutBNN(Strategy):
    """Dropout as a Lightning module: trained with masks, and predicting with masks.

    A network that has dropout layers of its own (see :func:`lightning_bnn.mc_dropout`) is trained
    with these. In any other, dropout is inserted before each Linear and Conv layer but the first
    layer of the network: so that noise is a draw of their weights, and no part of the data is lost.

    Args:
        net: Any module; the strategy works on a copy.
        likelihood: How outputs of the network give targets.
        prior: One prior for all weights, or a mapping from name patterns to priors. A posterior is
            one, too (see :class:`~lightning_bnn.PosteriorPrior`).
        rate: p, the chance that a number is dropped; by default 0.1, and for a network's own
            layers theirs. With ``"concrete"`` where the learned rates begin.
        kind: ``"bernoulli"``, ``"gaussian"`` or ``"concrete"`` (see the module); the last inserts
            its layers, and leaves the network's own out.
        layers: Before which Linear and Conv layers dropout is inserted, as a choice of their
            weights: a name pattern such as ``"fc*"``, a class, a submodule or a list (see
            :func:`lightning_bnn.selection.select`). The network's own dropout layers are then left
            out.
        num_data: The number of training examples; found from the training data if left out.
        optimizer: Makes the optimizer from parameters; by default Adam, at the rate of
            :func:`lightning_bnn.strategies.schedule.peak_rate`.
        scheduler: ``"auto"``, ``"cosine"``, None or what makes a learning-rate scheduler from the
            optimizer (see :class:`~lightning_bnn.strategies.base.Strategy`).
        scheduler_interval: Whether a scheduler of your own steps each ``"epoch"`` or ``"step"``.
        predict_draws: Draws of the posterior in validation, test and prediction; None: 32.
        seed: Seed of the noise; by default ``seed_everything`` decides it.
        **data: ``split``, ``output`` and ``monitor`` (see :class:`DataOptions`).

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> bnn = MCDropoutBNN(net, Gaussian(0.1), rate=0.2, num_data=100)
        >>> bnn.rates
        {'2': 0.2}
        >>> bnn.loss((torch.randn(8, 2), torch.randn(8, 1))).backward()
        >>> bnn.posterior().predict(torch.randn(4, 2)).mean.shape
        torch.Size([4, 1])
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        prior: GivenPrior | None = None,
        rate: float | None = None,
        kind: Kind = "bernoulli",
        layers: Choice = None,
        num_data: int | None = None,
        optimizer: OptimizerFactory | None = None,
        scheduler: NamedSchedule | SchedulerFactory | None = "auto",
        scheduler_interval: Literal["epoch", "step"] = "epoch",
        predict_draws: int | None = None,
        seed: int | None = None,
        **data: Unpack[DataOptions],
    ) -> None:
        if isinstance(net, nn.Module):
            select(net)  # says what is wrong with networks that have nothing to train
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
        check_option("kind", kind, ("bernoulli", "gaussian", "concrete", "variational"))
        if kind == "variational":
            raise ConfigurationError(
                "kind='variational' learns a Gaussian of each weight: pass "
                "family=VariationalDropout() (from lightning_bnn.families) to VariationalBNN, with "
                "estimator='local' for noise of each example."
            )
        rate = None if rate is None else check_probability("rate", rate)
        self.kind = kind
        self.layers = _choose_layers(self.net, kind, layers, rate)
        trainable = trainable_names(self.net)
        prior = chosen_prior(prior, trainable)
        own = dict(self.net.named_parameters())
        dropped = {layer.weight: own[layer.weight] for layer in self.layers if layer.weight}
        points = {name: own[name] for name in trainable if name not in dropped}
        self.prior = BoundPrior(prior, self.net, dropped) if dropped else None
        self.point_prior = BoundPrior(prior, self.net, points) if points else None
        self._dropped, self._points = FlatLayout(dropped), FlatLayout(points)
        coupled = self.prior is not None and self.prior.coupling is not None
        self.features: Tensor | None
        self.register_buffer("features", self._find_features() if coupled else None, False)
        self.target = Target(self.likelihood, self.prior, num_data, point_prior=self.point_prior)
        logits = torch.tensor([math.log(each.rate / (1 - each.rate)) for each in self.layers])
        if kind == "concrete":
            self._check_concrete()
            self.logits: Tensor = nn.Parameter(logits)
        else:
            self.register_buffer("logits", logits, persistent=False)
        self.noise = NoiseGenerator(seed)
        self._places: Places | None = None
        self._whole = StackedModule(self.net)

    def _find_features(self) -> Tensor:
        """By which input feature each of the dropped weights is multiplied, a number for each."""
        modules = {layer.weight: self.net.get_submodule(layer.name) for layer in self.layers}
        parts: list[Tensor] = []
        for name in self._dropped.names:
            first = 0 if not parts else int(parts[-1].max()) + 1
            parts.append(first + input_features(modules[name]).flatten())
        return torch.cat(parts)

    def _check_concrete(self) -> None:
        """Raise unless the part of the bound that depends on rates is in closed form."""
        owners: dict[str | None, str] = {}
        for layer in self.layers:
            if (other := owners.setdefault(layer.weight, layer.name)) != layer.name:
                raise ConfigurationError(
                    f"{other!r} and {layer.name!r} have the same weight {layer.weight!r}, which "
                    "would have two rates. Pass layers= without it, or kind='bernoulli'."
                )
        for *_, density, _, _ in self.prior.segments() if self.prior is not None else ():
            if not isinstance(density, Normal):
                raise ConfigurationError(
                    "kind='concrete' learns rates under a Gaussian prior of the weights that are "
                    f"dropped; got {density!r}. Pass prior=Normal(), or another kind."
                )

    # ---------------------------------------------------------------- the objective

    def loss(self, batch: Any) -> Tensor:
        """The bound on the mean energy, estimated on a batch with a mask for each example."""
        inputs, targets = self.split(batch)
        outputs = self._run(inputs)
        self.check("train", outputs, targets)
        energy = self.target.data_energy(outputs[None], targets)[0]
        kl = self.kl()
        self._last = (energy.detach(), kl.detach())
        if (noise := self.target.noise_energy(outputs[None])) is not None:
            kl = kl + noise[0]
        return self.target.add_prior(energy, kl)

    def kl(self) -> Tensor:
        """E[−log p] of all weights in nats, less the entropy of masks whose rates are learned.

        Of a prior that is no Gaussian it is that of a Gaussian of the weights' two moments.
        """
        own, terms = dict(self.net.named_parameters()), []
        if self.point_prior is not None:
            terms.append(self.point_prior.energy(_flat(own, self._points)))
        if self.prior is not None:
            mean = _flat(own, self._dropped)
            spread = self._spread(mean)
            terms.append(self.prior.expected_energy(mean, spread, mean))
            if self.features is not None:  # weights of one feature have one mask
                step = spread * mean.sign()
                between = self.prior.correlation_energy(step, groups=self.features)
                assert between is not None
                terms.append(between)
        if isinstance(self.logits, nn.Parameter):
            units = self.logits.new_tensor([layer.units for layer in self.layers])
            terms.append(-(units * mask_entropy(self.logits)).sum())
        return torch.stack(terms).sum()

    def _spread(self, mean: Tensor) -> Tensor:
        """The standard deviations of dropped weights: the noise has the variance p/(1 − p)."""
        odds = {layer.weight: e for layer, e in zip(self.layers, self.logits.exp(), strict=True)}
        sizes = zip(self._dropped.names, self._dropped.sizes, strict=True)
        factors = torch.cat([odds[name].expand(size) for name, size in sizes]).sqrt().to(mean)
        return mean.abs().clamp(min=_LEAST) * factors  # above 0: priors divide by it

    def _run(self, inputs: Any) -> Tensor:
        """Outputs of the network with noise for each example."""
        if self._places is None:
            self._places = self._look(inputs)
        places: Places = self._places
        # examples differ between ranks, and so must their noise
        seed = (self.noise.stream.integer() + self.global_rank) % 2**63
        generator: torch.Generator | None = None

        def change(index: int, call: int, values: Tensor) -> Tensor:
            nonlocal generator
            if generator is None:
                generator = torch.Generator(values.device).manual_seed(seed)
            layer, axis = self.layers[index], place_of(places[index], call).axis
            shape = noise_shape(layer, values.shape, axis)
            if axis is not None:
                shape[axis] = values.shape[axis]
            dtype = torch.promote_types(values.dtype, torch.float32)
            uniform = torch.rand(shape, dtype=dtype, device=values.device, generator=generator)
            if isinstance(self.logits, nn.Parameter):
                return multiply(values, relaxed_mask(uniform, self.logits[index]))
            return multiply(values, *layer.factors(uniform))

        with add_noise(self.net, self.layers, change):
            return self._whole.single({}, inputs)

    def _look(self, inputs: Any) -> Places:
        """Where examples lie in what each layer gets; by default along the first axis."""
        try:
            places = places_of(self.net, self.layers, inputs)
        except Exception:  # of a network's own code: any. Run as it is, it raises its own.
            return [[] for _ in self.layers]
        check_called(self.net, self.layers, places)
        return places

    # ---------------------------------------------------------------- what is said and logged

    @property
    def rates(self) -> dict[str, float]:
        """The rate of each dropout layer as it stands, by the name of its module."""
        if not isinstance(self.logits, nn.Parameter):
            return {layer.name: layer.rate for layer in self.layers}
        rates = self.logits.detach().double().sigmoid().tolist()
        return {layer.name: rate for layer, rate in zip(self.layers, rates, strict=True)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch, checked and logged with its parts."""
        loss = super().training_step(batch, batch_idx)
        energy, kl = self._last
        self.log_dict({"train_nll": energy, "kl": kl}, batch_size=self.batch_size(batch))
        return loss

    def on_train_start(self) -> None:
        """Find N, and let all ranks have the same stream of noise."""
        super().on_train_start()
        state = self.trainer.strategy.broadcast(self.noise.get_extra_state())
        self.noise.set_extra_state(state)

    def on_train_epoch_end(self) -> None:
        """Log the rates."""
        super().on_train_epoch_end()
        rates = {f"dropout_rate/{name}": rate for name, rate in self.rates.items()}
        self.log_dict(rates, sync_dist=True)

    def _parameter_summary(self) -> str:
        """Beside what is done with the parameters, the rate of each dropout layer."""
        shown = ", ".join(f"{name or 'all'} {rate:.3g}" for name, rate in self.rates.items())
        where = "before the layers" if self.prior is not None else "in its own layers"
        learned = ", to be learned" if self.kind == "concrete" else ""
        sizes = {name: parameter.numel() for name, parameter in self.net.named_parameters()}
        trained = sum(sizes[name] for name in self.trained)
        return (
            f"{type(self).__name__} trains {trained:,} of the {sum(sizes.values()):,} parameters "
            f"of {type(self.net).__name__} under {self.kind} dropout {where}, with the rates "
            f"{shown}{learned}."
        )

    @property
    def trained(self) -> list[str]:
        """The names of the network's parameters that are not frozen."""
        return trainable_names(self.net)

    @property
    def inferred(self) -> list[str]:
        """The weights of layers before which dropout is inserted; else all that are trained."""
        return self._dropped.names or self.trained

    @property
    def point_estimates(self) -> list[str]:
        """The others."""
        inferred = set(self.inferred)
        return [name for name in self.trained if name not in inferred]

    @torch.no_grad()
    def prior_scales(self) -> dict[str, Tensor]:
        """By name, the learned scales of the prior as they fit now, (1,)."""
        own = dict(self.net.named_parameters())
        scales: dict[str, Tensor] = {}
        if self.prior is not None and self.prior.learned is not None:
            mean = _flat(own, self._dropped)
            scales |= self.prior.fitted_scales(mean, self._spread(mean))
        if self.point_prior is not None and self.point_prior.learned is not None:
            scales |= self.point_prior.fitted_scales(_flat(own, self._points))
        return {name: scale[None] for name, scale in scales.items()}

    # ---------------------------------------------------------------- what it leaves behind

    def forward(self, inputs: Any) -> Tensor:
        """The network without dropout; for predictions use :meth:`posterior`."""
        with add_noise(self.net, self.layers, lambda index, call, values: values):
            return self._whole.single({}, inputs)

    def posterior(self) -> DropoutPosterior:
        """The network with its masks as it stands now; later training does not change it."""
        rates = self.rates
        layers = [replace(layer, rate=rates[layer.name]) for layer in self.layers]
        return DropoutPosterior(self.net, self.likelihood, layers)


# ---------------------------------------------------------------- concrete dropout


def relaxed_mask(uniform: Tensor, logit: Tensor) -> Tensor:
    """(1 − z)/(1 − p) of a concrete z, differentiable in logit p.

    Example:
        >>> relaxed_mask(torch.tensor([0.2, 0.5, 0.8]), torch.zeros(()))
        tensor([2.0000e+00, 1.0000e+00, 1.9073e-06])
    """
    drop = (logit.to(uniform.dtype) + torch.logit(uniform, eps=1e-7)) / _RELAXED
    return torch.sigmoid(-drop) * (1 + logit.exp())


def mask_entropy(logit: Tensor) -> Tensor:
    """H(p) = −p log p − (1 − p) log(1 − p) in nats, from logit p.

    Example:
        >>> mask_entropy(torch.zeros(1))
        tensor([0.6931])
    """
    return F.softplus(logit) - logit * torch.sigmoid(logit)


def _choose_layers(
    net: nn.Module, kind: Kind, choice: Choice, rate: float | None
) -> list[DropoutLayer]:
    """The dropout layers of a network; those of its own that are not among them are left out."""
    own = own_layers(net)
    noise: Noise = "gaussian" if kind == "gaussian" else "bernoulli"
    if kind != "concrete" and choice is None:
        rates = [each.rate if rate is None else rate for each in own]
        used = [replace(each, rate=p) for each, p in zip(own, rates, strict=True) if p > 0]
        if kind == "gaussian":
            if alpha := next((each for each in used if each.noise == "alpha"), None):
                raise ConfigurationError(
                    f"{alpha.name!r} is an AlphaDropout layer, whose noise is Bernoulli's; with "
                    "kind='gaussian' put nn.Dropout in its place, or pass kind='bernoulli'."
                )
            used = [replace(each, noise=noise) for each in used]
        if used:
            return used
    for each in own:
        vars(net.get_submodule(each.name))["p"] = 0.0
    return inserted_layers(net, choice, _RATE if rate is None else rate, noise)


def _flat(tensors: Mapping[str, Tensor], layout: FlatLayout) -> Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in layout.names])
