r"""Sampling a network's posterior by (stochastic gradient) MCMC, many chains as one program.

Every chain k moves on the mean energy of its own weights,

.. math::
    \bar U(w_k) = -\tfrac1n\sum_i\log p(y_i\mid x_i,w_k) - \tfrac1N\log p(w_k),

by a sampler of :mod:`lightning_bnn.samplers`, and its draws are distributed as
:math:`\exp(-U/T)`. The weights of all K chains are one (K, P) parameter, run through the network
as a stack (see :mod:`lightning_bnn.stacked`) or in a loop, whichever is faster; the loss is the
sum over chains, so no chain touches another, and each has noise of its own. What T, the learning
rate η and N mean, and how they map to the ε of Welling and Teh (ε = 2η/N), is in
:mod:`lightning_bnn.samplers.base`.

Draws are kept by a :class:`~lightning_bnn.callbacks.SampleCollector`.

**Phases.** Left to itself, a fit of S steps has these, by shares of S that Lightning knows:

1. *Warm-up*, 0.6 S: Adam, with a warm-up and a cosine of its rate, carries each chain to the
   posterior. (For HMC 0.25 S, with as many steps of Adam in each as a transition has gradients.) At
   its end a chain goes back to its best weights by validation; where its validation NLL has not
   improved for a fifth of the warm-up, that end is now, for this chain alone.
2. *Adaptation*, a quarter of the rest: each chain finds its step size by the temperature it shows
   (:mod:`lightning_bnn.samplers.step_size`; HMC by its acceptance). Then it is held.
3. *Burn-in*, ended by the collector when the chains agree, or a third of the rest is over.
4. *Sampling*, with draws as far apart as their autocorrelation says.

One or two chains (not of HMC) go through them in up to four cycles: each warm-up carries them to
another place, and draws are taken in the last half of what follows it. A sampler whose rate is
given has none of this but what ``warm_up`` says, and the collector's part; HMC also adapts then.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Unpack

from lightning_bnn.bank import check_ids
from lightning_bnn.checks import check_number, check_whole
from lightning_bnn.errors import ConfigurationError, DataError, NonFiniteError
from lightning_bnn.initialise import Start, is_untrained, start_at_prior, start_members
from lightning_bnn.lightning import (
    StochasticWeightAveraging,
    TrainerStatus,
    WeightAveraging,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import DrawsPosterior, Posterior, prior_scales
from lightning_bnn.posteriors.prior import GivenPrior, starting_network
from lightning_bnn.predictive import Predictive
from lightning_bnn.random import NormalStream, member_seed, random_seed
from lightning_bnn.samplers import SGHMC, MomentumSampler, Sampler
from lightning_bnn.samplers.warm_up import WarmUp
from lightning_bnn.selection import Choice, select, trainable_names
from lightning_bnn.stacked import Mode
from lightning_bnn.strategies.bank_strategy import BankStrategy
from lightning_bnn.strategies.base import DataOptions, OptimizerFactory, SchedulerFactory
from lightning_bnn.strategies.best_weights import BestWeights
from lightning_bnn.strategies.schedule import schedule_factor, steps_of_fit
from lightning_bnn.target import Tempers, prior_power

__all__ = ["SGMCMC"]

SamplerFactory = Callable[[Iterable[nn.Parameter]], Sampler]

_WARM_UP, _WARM_UP_LONG = 0.6, 0.25  # the share of a cycle; where a step has many gradients
_ADAPT = 0.25  # the share of what is left of it
_PATIENCE = 0.2  # the share of a warm-up without a better validation NLL that ends it
_CYCLES, _SHORTEST = 4, 400  # at most so many cycles, of at least so many steps
_SAMPLES = 0.5  # the share of a cycle's rest that is sampled
_UNKNOWN = 1000  # steps of warm-up, and of adaptation, where the length of a fit is not known
_LARGE = 2**17  # weights of all chains
_HOT = 1.5  # times T: a chain that is hotter does not sample the posterior


class DrawCollector(Protocol):
    """What collects draws for a strategy, such as a SampleCollector."""

    def __len__(self) -> int:
        """The number of draws so far."""

    def posterior(self) -> Posterior:
        """The posterior of all draws so far."""


class SGMCMC(BankStrategy):
    """Stochastic gradient MCMC, or full-batch HMC, as a Lightning module.

    Args:
        net: Any module; the strategy works on a copy.
        likelihood: How outputs of the network give targets.
        prior: One prior for all weights, or a mapping from name patterns to priors. A posterior is
            one, too (see :class:`~lightning_bnn.PosteriorPrior`).
        sampler: Makes the sampler, such as ``partial(SGHMC, lr=1e-3)``; by default ``SGHMC``, of
            which each chain finds its own rate. N, T and the seeds are added by the strategy.
        chains: How many chains run side by side, or their numbers: ``chains=[3]`` runs alone what
            would be the fourth of ``chains=8``.
        bayesian: Which weights are sampled (see :func:`lightning_bnn.selection.select`). The
            others, and what the likelihood learns, are trained in the warm-up and then held.
        start: Where chains start. ``"reset"``: at new initial values; ``"around"``: at the
            network's weights, all chains but number 0 perturbed: not over-dispersed, so that R-hat
            may miss modes which no chain has seen; ``"auto"``: the former if the network looks
            untrained and a warm-up comes first, else the latter, and draws of the posterior where
            that is the prior; a posterior, such as a fitted
            ensemble: at its draws; a list of networks; or a function that builds one.
        spread: The size of the perturbation, as a share of each tensor's root mean square.
        warm_up: Steps with another optimizer before sampling begins; a new trainer begins with
            them again. None: as above; 0 where the sampler's rate is given.
        warm_up_optimizer: Makes that optimizer; by default Adam.
        cycles: How often the phases are gone through. None: as above; 1 where the sampler's rate
            is given.
        num_data: The number of training examples; found from the training data if left out.
        temperature: T; 1 is the Bayes posterior.
        tempers: What T is the temperature of (see :mod:`lightning_bnn.target`): the
            ``"posterior"``, (p(D|w) p(w))^(1/T), or the ``"likelihood"``, p(D|w)^(1/T) p(w), which
            is the default of ``VariationalBNN``.
        scheduler: Makes a learning-rate schedule from the sampler, stepped each step once
            sampling has begun: one of :mod:`lightning_bnn.samplers` or any of PyTorch's.
        mode: How the chains run: ``"stacked"``, ``"loop"``, or ``"auto"``: whichever is faster
            on the first batch.
        predict_draws: Draws of the posterior in validation, test and prediction; None: all that
            there are, up to 128.
        seed: The root of all chains' seeds; by default ``seed_everything`` decides it.
        **data: ``split``, ``output`` and ``monitor`` (see
            :class:`~lightning_bnn.strategies.base.DataOptions`).

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.priors import Normal
        >>> bnn = SGMCMC(nn.Linear(2, 1), Gaussian(0.1), Normal(0.0, 1.0), chains=4, num_data=100)
        >>> bnn.energies((torch.randn(8, 2), torch.randn(8, 1))).shape
        torch.Size([4])
        >>> len(bnn.posterior())
        4
    """

    noun = "chains"
    defaults = {"sampler": "SGHMC()", "prior": "Normal()"}  # noqa: RUF012

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        prior: GivenPrior | None = None,
        sampler: SamplerFactory | None = None,
        chains: int | Sequence[int] = 4,
        bayesian: Choice = None,
        start: Start | Literal["auto"] = "auto",
        spread: float = 0.1,
        warm_up: int | None = None,
        warm_up_optimizer: OptimizerFactory | None = None,
        cycles: int | None = None,
        num_data: int | None = None,
        temperature: float = 1.0,
        tempers: Tempers = "posterior",
        scheduler: SchedulerFactory | None = None,
        mode: Mode = "auto",
        predict_draws: int | None = None,
        seed: int | None = None,
        **data: Unpack[DataOptions],
    ) -> None:
        names = select(net, bayesian) if isinstance(net, nn.Module) else []
        net = starting_network(net, prior)
        super().__init__(
            net, likelihood, num_data, warm_up_optimizer, scheduler, "step", predict_draws, **data
        )
        ids = check_ids(chains, self.noun)
        check_sampler(sampler)
        self.sampler_factory = sampler or SGHMC
        self.finds_rate = _finds_rate(self.sampler_factory, len(ids), temperature)
        automatic = None if self.finds_rate else 0
        self.warm_up = automatic if warm_up is None else check_whole("warm_up", warm_up, 0)
        self.cycles = None if cycles is None else check_whole("cycles", cycles, 1)
        spread = check_number("spread", spread, positive=False)
        self.seed = random_seed() if seed is None else check_whole("seed", seed, 0)
        self.collector: DrawCollector | None = None
        self._collected: Mapping[str, Any] | None = None  # by a collector, as a checkpoint has it
        self._has_moved = False
        learned = [name for name, _ in self.likelihood.named_parameters()]
        if learned and self.warm_up == 0:
            raise ConfigurationError(
                f"{type(likelihood).__name__} learns {learned}, which SG-MCMC does not sample: it "
                "is trained in the warm-up and then held. Pass warm_up=, or a likelihood with "
                "nothing to learn."
            )
        auto = isinstance(start, str) and start == "auto"
        if isinstance(start, str) and start == "auto":
            start = "reset" if self.warm_up != 0 and is_untrained(self.net) else "around"
        stacked = start_members(self.net, start, ids, self.seed, spread)
        if auto:
            stacked = start_at_prior(self.net, prior, stacked, ids, self.seed)
        if self.warm_up == 0 and start in ("around", "reset"):
            # nothing would train what is not sampled: every chain keeps the network's own
            own = dict(self.net.named_parameters())
            for name in set(trainable_names(self.net)) - set(names):
                stacked[name] = own[name].detach().expand_as(stacked[name])
        power = prior_power(tempers, temperature, own="posterior")
        self._build_bank(
            stacked, prior, ids, names, num_data, temperature, mode=mode, prior_power=power
        )
        if self.bank.points is not None and self.warm_up == 0:
            self.bank.points.requires_grad_(False)
        if self.warm_up is None:
            self.best = BestWeights(len(ids))
        for parameter in self.likelihood.parameters():
            # shared by all chains, whose losses are summed: the mean gradient, whatever K is
            parameter.register_hook(lambda gradient: gradient / self.chains)
        self._sampler: Sampler | None = None
        self._streams: list[NormalStream] | None = None
        self._closures = 0
        self._warming_up = False
        self._energy_is_exact = False
        self._accepted: tuple[Tensor, int] | None = None
        self._last_energies: Tensor | None = None
        self._sampled_at: int | None = None
        self._sampled = False
        self._planned = False
        self._heat: dict[str, tuple[Tensor, int]] = {}  # Σ of temperatures, (K,), and their number

    @property
    def chains(self) -> int:
        """K, the number of chains."""
        return len(self.bank)

    @property
    def sampler(self) -> Sampler:
        """The sampler of the fit."""
        if self._sampler is None:
            raise ConfigurationError("There is no sampler yet: it is made when Trainer.fit starts.")
        return self._sampler

    # ---------------------------------------------------------------- the energy

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The summed energies of a batch, each chain's checked."""
        if self.sampler.full_batch:  # in the warm-up, too: not to learn of it when that is over
            self._check_full(batch)
        energies = self.energies(batch)
        self._last_energies = energies.detach()
        # an exact sampler calls this at trial moves too; it may reject them, so only its start
        # must be finite
        if self._closures == 0 or self._warming_up or not self.sampler.full_batch:
            self.watch(energies.detach(), batch, batch_idx)
        if self._closures == 0 or not self.sampler.full_batch:
            self.log_energies(energies.detach(), batch)
        return energies.sum()

    def on_diverged(self, rows: list[int], where: str, batch: Any) -> None:
        """Stop: a chain that has diverged has no draws of the posterior."""
        culprit = self.blame(batch)
        if "hold NaN" not in culprit:
            known = "" if batch is None else "The data are finite, so the chain has diverged: "
            culprit = (
                f"{known}lower the sampler's lr (or the "
                "temperature), warm up first, or clip gradients."
            )
        raise NonFiniteError(
            f"The energy of chain {', '.join(str(self.ids[row]) for row in rows)} is not finite "
            f"{where}. {culprit} All draws and checkpoints before it can be read; those of the "
            "last steps may be of the chain as it diverged, which train_loss shows."
        )

    def _check_full(self, batch: Any) -> None:
        """Raise unless this is the energy of all examples, and of the weights alone."""
        name = type(self.sampler).__name__
        size = self.batch_size(self.split(batch)[0])
        expected = self.target.num_data
        if size is not None and size * self.trainer.world_size != expected:
            raise DataError(
                f"{name} accepts or rejects by the energy of all {expected} training examples, and "
                f"needs them in each step; the batch has {size}. Set batch_size={expected} of the "
                "DataLoader; for data that are too many for that take SGHMC, the default sampler, "
                "which goes by minibatches."
            )
        if self._energy_is_exact:
            return
        with torch.no_grad():
            before = {key: buffer.clone() for key, buffer in self.bank.own_tensors().items()}
            first, second = self.energies(batch), self.energies(batch)
            after = self.bank.own_tensors()
            changed = [key for key in before if not torch.equal(after[key], before[key])]
        differs = bool(((first - second).abs() > 1e-6 * first.abs()).any())
        if changed or differs:
            what = f"changes {changed[0]!r}" if changed else "is random, as with dropout"
            raise ConfigurationError(
                f"{name} accepts or rejects by the energy of the weights, and computing it {what}. "
                "Take such layers out (LayerNorm and GroupNorm work in place of BatchNorm), or use "
                "SGHMC."
            )
        self._energy_is_exact = True

    # ---------------------------------------------------------------- stepping

    def configure_optimizers(self) -> Any:
        """The sampler, after a warm-up if one was asked for, and its schedule."""
        sampler = make_sampler(
            self.sampler_factory,
            self.weights,
            # set again when the data are known
            num_data=self.target.num_data if self.target.knows_num_data else 1,
            temperature=self.target.temperature,
            seed=[member_seed(self.seed, number) for number in self.ids],
        )
        if self._streams is not None:
            sampler.streams = self._streams  # a second fit goes on with the noise, not again
        # a trainer that fits again goes on sampling
        taken = self.trainer.global_step if self._trainer is not None else 0
        if taken and self._sampler is not None:
            sampler.take_over(self._sampler)
        self._sampler, self._streams = sampler, sampler.streams
        optimizer: Optimizer = sampler
        if self.warm_up != 0:
            parameters = [
                p
                for p in (*self.bank.parameters(), *self.likelihood.parameters())
                if p.requires_grad
            ]
            first = (self._optimizer or self._default_optimizer)(parameters)
            self._refuse_weight_decay(first)
            shape = schedule_factor if self._optimizer is None and self.warm_up is None else None
            optimizer = WarmUp(
                first, sampler, self.warm_up or 0, taken, shape=shape, repeats=self._repeats
            )
        self._compare_with_saved()
        return self._with_schedule(optimizer, self._scheduler, "step")

    def _may_fuse(self, parameters: list[nn.Parameter]) -> bool:
        """A fused optimizer rounds the last numbers of a tensor otherwise than the others.

        A chain beside others would then differ in the last bit from the chain alone. Of many
        weights, where it gains much, that is put up with: products of matrices do the same.
        """
        total = sum(parameter.numel() for parameter in parameters)
        return total >= _LARGE or all(p[0].numel() % 16 == 0 for p in parameters if p.dim() > 1)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """One step, of the warm-up or of the sampler."""
        sampler = self.sampler
        warm_up = optimizer.optimizer if isinstance(optimizer.optimizer, WarmUp) else None
        self._warming_up = warm_up is not None and warm_up.warming_up
        if warm_up is not None and warm_up.position >= warm_up.steps:
            self._end_warm_up(~warm_up.ended)
        if sampler.calls_closure_again and (self._repeats > 1 or not self._warming_up):
            self._refuse_accumulation()
        sampler.num_data = self.target.num_data
        next_step = self.global_step + 1
        sampler.measure = next_step % max(1, getattr(self.trainer, "log_every_n_steps", 0)) == 0
        sampler.measure_positions = sampler.measure and sampler.reads_after_step
        sampler.measured_temperature = sampler.configurational_temperature = None
        self._closures = 0

        def closure() -> Any:
            result = optimizer_closure() if optimizer_closure is not None else None
            self._closures += 1
            full_batch = sampler.full_batch and not self._warming_up
            return self._all_ranks_energies() if full_batch else result

        # draws before a step size is settled are not of the posterior
        settling = sampler.param_groups[0]["explore"] or sampler.adapting
        if warm_up is not None and warm_up.cycle is not None:
            rest = warm_up.cycle - warm_up.steps
            settling |= warm_up.position < warm_up.cycle - _SAMPLES * rest
        self._sampled = not self._warming_up and not settling
        scheduler = self.lr_schedulers() if self._scheduler is not None else None
        self._sampled_at = None if scheduler is None else scheduler.last_epoch  # type: ignore[union-attr]
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        self._closures = 0
        self._log_sampler(sampler)

    # ---------------------------------------------------------------- phases

    def _plan(self) -> None:
        """Divide the fit into its phases by its length, once its data and state are loaded.

        A callback may ask for them before the strategy's own ``on_train_start``.
        """
        again = self._planned or self.global_step > 0  # what resumes has its plan, or samples on
        self._planned = True
        if again:
            return
        warm_up = self._warm_up_optimizer()
        total = steps_of_fit(self.trainer)
        length, steps = total, 0
        if warm_up is not None:
            cycles = self.cycles
            if cycles is None:
                # what accepts or rejects may stay in one place for all of a fit
                few = self.chains <= 2 and self.finds_rate and not self.sampler.full_batch
                few &= total < math.inf
                cycles = max(1, min(_CYCLES, int(total) // _SHORTEST)) if few else 1
            if cycles > 1 and total == math.inf:
                raise ConfigurationError(
                    f"cycles={cycles} divide a fit whose length is not known. Pass max_epochs= or "
                    "max_steps= to the trainer."
                )
            length = total if cycles == 1 else total // cycles
            steps = warm_up.steps if self.warm_up is not None else self._warm_up_steps(length)
            warm_up.steps, warm_up.cycle = steps, int(length) if cycles > 1 else None
        if self.sampler.plans_adaptation:
            left = _UNKNOWN / _ADAPT if length == math.inf else length - steps
            self.sampler.adapt_steps = max(1, round(_ADAPT * left))

    def _warm_up_optimizer(self) -> WarmUp | None:
        """What takes the steps of a fit that has a warm-up."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        return optimizer if isinstance(optimizer, WarmUp) else None

    @property
    def _repeats(self) -> int:
        """The steps of the automatic warm-up's optimizer in one step: what the sampler's costs."""
        return self.sampler.gradients_per_step if self.warm_up is None else 1

    def _warm_up_steps(self, length: float) -> int:
        """The steps of a warm-up: whole epochs, after which validation comes, if it has some."""
        if length == math.inf:
            return _UNKNOWN
        share = _WARM_UP if self._repeats == 1 else _WARM_UP_LONG
        steps, epoch = share * length, steps_of_fit(self.trainer) / self._epochs()
        steps = round(round(steps / epoch) * epoch if steps >= 3 * epoch else steps)
        return int(max(1, min(steps, length - 2)))  # a step to adapt in, and one to draw

    def _epochs(self) -> float:
        """The epochs of the fit, as many as its steps are."""
        batches = self.trainer.num_training_batches
        each = math.ceil(batches / self.trainer.accumulate_grad_batches)
        return max(1.0, steps_of_fit(self.trainer) / max(1, each))

    def scored_rows(self) -> list[int] | None:
        """All chains while they are warmed up, before there are draws to predict with."""
        warm_up = self._warm_up_optimizer()
        first = warm_up is not None and warm_up.taken <= warm_up.steps
        drawn = self.collector is not None and len(self.collector)
        enough = self.predict_draws is None or self.predict_draws >= self.chains
        return list(range(self.chains)) if first and not drawn and enough else None

    def on_validation_epoch_end(self) -> None:
        """Log the validation metrics, and end the warm-up of chains that improve no more."""
        super().on_validation_epoch_end()
        # the sanity check of a resumed fit comes before its training data are known
        fitting = self._is_fitting() and not self.trainer.sanity_checking
        warm_up = self._warm_up_optimizer() if fitting else None
        if self.best is None or warm_up is None or not 0 < warm_up.taken <= warm_up.steps:
            return
        over = warm_up.taken == warm_up.steps
        if not (over or self._may_stagger()):
            return
        rounds = _PATIENCE * warm_up.steps * self._epochs() / steps_of_fit(self.trainer)
        tired = self.best.rounds_since_best >= max(3, math.ceil(rounds))
        self._end_warm_up(~warm_up.ended & (over | tired))

    def _may_stagger(self) -> bool:
        """Whether chains may begin to sample one by one: nothing that moves them is shared."""
        shared = any(parameter.requires_grad for parameter in self.likelihood.parameters())
        return not shared and isinstance(self.sampler, MomentumSampler) and self._scheduler is None

    def _end_warm_up(self, chains: Tensor) -> None:
        """Let chains begin to sample, from their best weights by validation."""
        warm_up = self._warm_up_optimizer()
        assert warm_up is not None
        if not chains.any():
            return
        if self.best is not None and warm_up.taken <= warm_up.steps:
            with torch.inference_mode(False), torch.no_grad():
                self.best.take(self.bank, chains & (self.best.rounds_since_best > 0))
        warm_up.end(chains)
        if self.best is not None and warm_up.ended.all():
            self.best.forget()

    def _log_sampler(self, sampler: Sampler) -> None:
        if not self._sampled:
            return
        readings = {
            "temperature": sampler.measured_temperature,
            "configurational_temperature": sampler.configurational_temperature,
        }
        for name, reading in readings.items():
            if reading is None:
                continue
            total, count = self._heat.get(name, (torch.zeros_like(reading), 0))
            self._heat[name] = total.to(reading.device) + reading, count + 1
            if sampler.measure:
                self.log(name, reading.mean().float())
        if sampler.measure and sampler.step_sizes is not None:
            self.log("step_size", sampler.step_sizes.rates.mean().float())
        for name, reading in sampler.readings().items():
            self.log(name, reading)
        if sampler.acceptance is not None:
            total, count = self._accepted or (torch.zeros_like(sampler.acceptance), 0)
            self._accepted = total + sampler.acceptance, count + 1

    def _refuse_accumulation(self) -> None:
        if self.trainer.accumulate_grad_batches > 1:
            raise ConfigurationError(
                f"{type(self.sampler).__name__} computes the gradient of a step more "
                "than once, and cannot go with accumulate_grad_batches. Leave it out."
            )

    def _all_ranks_energies(self) -> Tensor:
        assert self._last_energies is not None
        if self.trainer.world_size == 1:
            return self._last_energies
        return self.trainer.strategy.reduce(self._last_energies.clone(), reduce_op="mean")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """The schedule begins when the warm-up ends."""
        if not self._warming_up:
            super().lr_scheduler_step(scheduler, metric)

    @property
    def sampling(self) -> bool:
        """Whether the last step was one of sampling: not of warm-up, not of exploration."""
        return self._sampled

    def phase(self) -> dict[str, str]:
        """What comes before sampling, and exploration in it, in the progress bar."""
        warm_up = self._warm_up_optimizer()
        if warm_up is not None and warm_up.warming_up:
            return {"phase": f"warm-up {warm_up.position}/{warm_up.steps}"}
        if self.sampler.adapting:
            return {"phase": "adapting"}
        return {"phase": "exploring"} if self.sampler.param_groups[0]["explore"] else {}

    @property
    def settling_steps(self) -> int:
        """The steps of a fit before the first that can give a draw: warm-up and adaptation."""
        self._plan()
        warm_up = self._warm_up_optimizer()
        steps = 0 if warm_up is None else warm_up.steps
        return steps + (0 if self._sampler is None else self._sampler.adapt_steps)

    @property
    def in_cycles(self) -> bool:
        """Whether the fit goes through its phases several times."""
        self._plan()
        warm_up = self._warm_up_optimizer()
        return warm_up is not None and warm_up.cycle is not None

    @property
    def sampling_steps(self) -> float:
        """The steps of the fit that are planned to give draws; infinite if that is not known."""
        self._plan()
        warm_up, total = self._warm_up_optimizer(), steps_of_fit(self.trainer)
        if warm_up is not None and warm_up.cycle is not None:
            return _SAMPLES * (warm_up.cycle - warm_up.steps) * (total // warm_up.cycle)
        return max(0.0, total - self.settling_steps)

    @property
    def measured_temperatures(self) -> dict[str, Tensor]:
        """The mean temperatures of each chain while it was sampled, (K,); none before that.

        ``"temperature"`` is the kinetic one where there are momenta, with
        ``"configurational_temperature"`` beside it.
        """
        return {name: total / count for name, (total, count) in self._heat.items()}

    @property
    def ended_cycle(self) -> bool:
        """Whether the last step was the last of a cycle of a cyclical schedule."""
        scheduler = self.lr_schedulers() if self._scheduler is not None else None
        if self._sampled_at is None or not hasattr(scheduler, "ends_cycle"):
            return False
        return self._sampled and bool(scheduler.ends_cycle(self._sampled_at))  # type: ignore[union-attr]

    # ---------------------------------------------------------------- what it leaves behind

    def posterior(self) -> Posterior:
        """The collected draws of all chains; before there are any, the weights as they stand.

        After a fit, or from a checkpoint, a warning says so if no draws were collected.
        """
        if self.collector is not None and len(self.collector):
            return self.collector.posterior()
        if self._collected is not None:
            return DrawsPosterior.from_collected(self._collected, self.net, self.likelihood)
        running = self._trainer is not None and self.trainer.state.status == TrainerStatus.RUNNING
        if self._has_moved and not (running and self._is_fitting()):
            rank_zero_warn(
                f"SGMCMC has no collected draws: this posterior is the last state of the "
                f"{self.chains} chains alone. Train with a SampleCollector among the callbacks; "
                "draws that were written to its dirpath are read by Posterior.load."
            )
        current = self.current_draws()
        draws = [{name: t[k] for name, t in current.items()} for k in range(self.chains)]
        return DrawsPosterior(self.net, self.likelihood, draws, chains=self.chains)

    def prior_scales(self, seed: int = 0) -> dict[str, Tensor]:
        """By name, a draw of each learned scale of the prior to each collected draw, (draws,).

        The chains sample the weights with the scales integrated out; given the weights, the scales
        are drawn from their conditional. Together they are draws of the joint posterior. Scales of
        point estimates are those that fit the chains now, (K,).

        Args:
            seed: Seed of the draws.

        Example:
            >>> from lightning_bnn.likelihoods import Gaussian
            >>> from lightning_bnn.priors import Learned, Normal
            >>> chains = SGMCMC(nn.Linear(3, 1), Gaussian(0.1), Normal(scale=Learned()), chains=2)
            >>> {name: scale.shape for name, scale in chains.prior_scales().items()}
            {'weight': torch.Size([2]), 'bias': torch.Size([2])}
        """
        scales: dict[str, Tensor] = {}
        if self.prior.learned is not None:
            posterior = self.posterior()
            assert isinstance(posterior, DrawsPosterior)
            scales = prior_scales(posterior, self.prior, seed=seed)
        if self.point_prior is not None and self.bank.points is not None:
            scales |= self.point_prior.fitted_scales(self.bank.points.detach())
        return scales

    def member_posteriors(self) -> Mapping[int, Posterior]:
        """By number, the draws of each chain."""
        posterior = self.posterior()
        assert isinstance(posterior, DrawsPosterior)
        return {number: posterior.chain(k) for k, number in enumerate(self.ids)}

    # ---------------------------------------------------------------- fits and checkpoints

    def setup(self, stage: str) -> None:
        """Forget the draws of an earlier fit, if this one collects none."""
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, WeightAveraging | StochasticWeightAveraging):
                raise ConfigurationError(
                    f"{type(callback).__name__} averages the states of a chain, which is no draw "
                    "of the posterior, and may change the sampler's lr. Leave it out: a "
                    "SampleCollector keeps draws."
                )
        super().setup(stage)
        if stage == "fit":
            self._collected = None
            if not any(callback is self.collector for callback in callbacks):
                self.collector = None

    def on_fit_start(self) -> None:
        """Check what the sampler needs of the trainer."""
        super().on_fit_start()
        self._energy_is_exact, self._accepted = False, None
        if self._random_state is None:  # no checkpoint was loaded
            self._heat = {}
        self._planned = False
        if self.sampler.calls_closure_again:
            self._refuse_accumulation()
        if self.weights.dtype in (torch.bfloat16, torch.float16):
            warnings.warn(
                f"The weights are {self.weights.dtype}, in which most steps of a sampler are too "
                "small to be seen. Use precision='bf16-mixed', which keeps weights in float32.",
                stacklevel=2,
            )

    def on_train_end(self) -> None:
        """Say what was found; warn of chains that were too hot or stood still."""
        super().on_train_end()
        self._tell()
        if self._accepted is None:
            return
        rates = self._accepted[0] / self._accepted[1]
        if (message := self.sampler.found()) is not None:
            shown = ", ".join(f"{rate:.2f}" for rate in rates.tolist())
            rank_zero_info(f"{message} for the chains {self.ids}, and accepted {shown} on average.")
        stuck = [k for k, r in zip(self.ids, rates.tolist(), strict=True) if r < 0.1]
        if stuck:
            warnings.warn(
                f"{type(self.sampler).__name__} accepted less than one in ten transitions in the "
                f"chains {stuck}: their draws are mostly copies. Lower the sampler's lr, or let "
                "adapt_steps= find it.",
                stacklevel=2,
            )

    def _tell(self) -> None:
        """Say at which step sizes and temperatures the chains were sampled."""
        if "temperature" not in self._heat:
            return
        wanted, means = self.target.temperature, self.measured_temperatures
        measured = means["temperature"].tolist()
        if self.sampler.step_sizes is not None:
            rates = ", ".join(f"{rate:.2g}" for rate in self.sampler.step_sizes.rates.tolist())
            shown = {name: ", ".join(f"{v:.2f}" for v in mean) for name, mean in means.items()}
            positions = shown.get("configurational_temperature")
            rank_zero_info(
                f"SGMCMC found the step sizes {rates} for the chains {self.ids}. At T = {wanted:g} "
                f"the temperature of their momenta was {shown['temperature']}"
                + (f", that of their positions {positions}." if positions else ".")
            )
        # of few weights or readings the mean may be high by chance
        chance = 3 * math.sqrt(2 / (self.weights.shape[1] * self._heat["temperature"][1]))
        readings = zip(self.ids, measured, strict=True)
        hot = {k: round(v, 2) for k, v in readings if v * (1 - chance) > _HOT * wanted}
        if hot and wanted > 0 and self.sampler.reads_after_step:  # others say so only once settled
            rank_zero_warn(
                f"The chains sampled at another temperature than T = {wanted:g}, on average (by "
                f"chain) {hot}: their draws are too wide. The noise of minibatch gradients heats "
                "them, or the steps are too long. Lower the sampler's lr, or leave it out (SGHMC "
                "and BAOA then find it); larger batches help as much."
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add draws that came with a checkpoint and that no collector of the trainer has."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lightning_bnn"]["collected"] = self._collected
        checkpoint["lightning_bnn"]["heat"] = dict(self._heat)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Know the draws that were collected up to the checkpoint."""
        super().on_load_checkpoint(checkpoint)
        self._has_moved = True
        heat = checkpoint.get("lightning_bnn", {}).get("heat", {})
        self._heat = {name: (total.cpu(), count) for name, (total, count) in heat.items()}
        if not self._is_fitting():  # a collector of the trainer has its own way to go on
            states = checkpoint.get("callbacks", {}).values()
            kept = [s for s in states if isinstance(s, dict) and {"draws", "stream"} <= s.keys()]
            with_draws = [state for state in kept if state.get("steps")]
            kept_on = checkpoint.get("lightning_bnn", {}).get("collected")
            self._collected = {"dirpath": None, **with_draws[0]} if with_draws else kept_on

    def on_train_start(self) -> None:
        """Find N, and let all ranks draw the same noise."""
        super().on_train_start()
        self._has_moved = True
        self._plan()
        for stream in self.sampler.streams:
            stream.load_state_dict(self.trainer.strategy.broadcast(stream.state_dict()))

    def facts(self) -> dict[str, Any]:
        """What must be the same for a run to resume, as far as it is known yet."""
        known = {} if self._sampler is None else {"sampler": type(self._sampler).__name__}
        return {**super().facts(), **known, "warm_up": self.warm_up, "cycles": self.cycles}

    def _predict(self, inputs: Any) -> Predictive:
        """With no more draws than there are: each once."""
        assert self._snapshot is not None
        count = min(self.draws_of(self._snapshot), self._snapshot.default_draws)
        return self._snapshot.predict(inputs, draws=count)


def check_sampler(sampler: Any) -> None:
    """Raise unless it can make a sampler; what the strategy adds must not be in it already."""
    if sampler is not None and not callable(sampler):
        raise ConfigurationError(
            f"sampler= makes a sampler, as partial(SGLD, lr=1e-3) does; got {sampler!r:.80}."
        )
    given = getattr(sampler, "keywords", {})
    for name, harmless in (("temperature", 1.0), ("num_data", None), ("seed", None)):
        if name in given and given[name] != harmless:
            raise ConfigurationError(
                f"sampler= has {name}={given[name]!r}; the strategy sets it. Pass {name}= to "
                "SGMCMC instead."
            )


def make_sampler(factory: Any, weights: nn.Parameter, **added: Any) -> Sampler:
    """The sampler of the chains' weights, with what the strategy adds."""
    try:
        sampler = factory([weights], **added)
    except TypeError as error:
        raise ConfigurationError(
            f"sampler= could not be called with parameters and {sorted(added)}: {error}. Pass "
            "partial(SGHMC, lr=1e-3) or the like; a function of your own must hand **options on."
        ) from error
    if not isinstance(sampler, Sampler):
        raise ConfigurationError(
            "sampler= makes one of lightning_bnn.samplers, as partial(SGLD, lr=1e-3) does; "
            f"got {type(sampler).__name__}. For an ordinary optimizer see warm_up_optimizer=."
        )
    return sampler


def _finds_rate(factory: Any, chains: int, temperature: float) -> bool:
    """Whether the samplers that a factory makes find their learning rates by themselves."""
    probe = nn.Parameter(torch.zeros(chains, 1))
    seeds = list(range(chains))
    return make_sampler(factory, probe, num_data=1, temperature=temperature, seed=seeds).finds_rate
