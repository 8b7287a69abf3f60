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
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer

from lightning_bnn.errors import ConfigurationError, DataError, NonFiniteError
from lightning_bnn.flat import KeptMemory, split_weights
from lightning_bnn.initialise import Start, start_members
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import network_tensors
from lightning_bnn.posteriors import DrawsPosterior, Posterior
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import BoundPrior, Normal, Prior, check_prior
from lightning_bnn.random import NormalStream, member_seed
from lightning_bnn.samplers import HMC, SGHMC, Sampler
from lightning_bnn.samplers.warm_up import WarmUp
from lightning_bnn.selection import Choice, FlatLayout, select, trainable_names
from lightning_bnn.stacked import Mode, StackedModule
from lightning_bnn.strategies.base import OptimizerFactory, SchedulerFactory, Strategy, batch_size
from lightning_bnn.strategies.chains import (
    SamplerFactory,
    chain_numbers,
    check_sampler,
    clip_by_chain,
    flatten_chains,
    make_sampler,
)
from lightning_bnn.target import Target

if TYPE_CHECKING:
    from lightning_bnn.callbacks import SampleCollector

__all__ = ["SGMCMC"]


class SGMCMC(Strategy):
    """Stochastic gradient MCMC, or full-batch HMC, as a Lightning module.

    Args:
        net: Any module; the strategy works on a copy.
        likelihood: How outputs of the network give targets.
        prior: One prior for all weights, or a mapping from name patterns to priors.
        sampler: Makes the sampler, such as ``partial(SGHMC, lr=1e-3)``, which is the default.
            N, T and the seeds are added by the strategy.
        chains: How many chains run side by side, or their numbers: ``chains=[3]`` runs alone what
            would be the fourth of ``chains=8``.
        bayesian: Which weights are sampled (see :func:`lightning_bnn.selection.select`). The
            others, and what the likelihood learns, are trained in the warm-up and then held.
        start: Where chains start. ``"around"``: at the network's weights, all chains but number
            0 perturbed; ``"reset"``: at new initial values; a posterior, such as a fitted
            ensemble: at its draws; a list of networks; or a function that builds one.
        spread: The size of the perturbation, as a share of each tensor's root mean square.
        warm_up: Steps with another optimizer before sampling begins; a new trainer begins with
            them again.
        warm_up_optimizer: Makes that optimizer; by default ``partial(Adam, lr=1e-3)``.
        num_data: The number of training examples; found from the training data if left out.
        temperature: T; 1 is the Bayes posterior.
        scheduler: Makes a learning-rate schedule from the sampler, stepped each step once
            sampling has begun: one of :mod:`lightning_bnn.samplers` or any of PyTorch's.
        mode: How the chains run: ``"stacked"``, ``"loop"``, or ``"auto"``: whichever is faster
            on the first batch.
        predict_draws: Draws of the posterior in validation, test and prediction.
        seed: The root of all chains' seeds; by default ``seed_everything`` decides it.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> bnn = SGMCMC(nn.Linear(2, 1), Gaussian(0.1), Normal(0.0, 1.0), chains=4, num_data=100)
        >>> bnn.energies((torch.randn(8, 2), torch.randn(8, 1))).shape
        torch.Size([4])
        >>> len(bnn.posterior())
        4
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        prior: Prior | Mapping[str, Prior] | None = None,
        sampler: SamplerFactory | None = None,
        chains: int | Sequence[int] = 1,
        bayesian: Choice = None,
        start: Start = "around",
        spread: float = 0.1,
        warm_up: int = 0,
        warm_up_optimizer: OptimizerFactory | None = None,
        num_data: int | None = None,
        temperature: float = 1.0,
        scheduler: SchedulerFactory | None = None,
        mode: Mode = "auto",
        predict_draws: int = 16,
        seed: int | None = None,
    ) -> None:
        names = select(net, bayesian) if isinstance(net, nn.Module) else []
        super().__init__(
            net, likelihood, num_data, warm_up_optimizer, scheduler, "step", predict_draws
        )
        self.chain_numbers = chain_numbers(chains)
        check_sampler(sampler)
        if warm_up < 0:
            raise ConfigurationError(f"warm_up= is a number of steps, at least 0; got {warm_up}.")
        if spread < 0:
            raise ConfigurationError(f"spread= is at least 0; got {spread}.")
        if seed is not None and seed < 0:
            raise ConfigurationError(f"seed= is at least 0; got {seed}.")
        self.sampler_factory = sampler or partial(SGHMC, lr=1e-3)
        self.warm_up = warm_up
        self.seed = int(torch.randint(2**62, ()).item()) if seed is None else int(seed)
        self.collector: SampleCollector | None = None
        prior = Normal() if prior is None else prior
        trainable = trainable_names(self.net)
        check_prior(prior, trainable)
        learned = [name for name, _ in self.likelihood.named_parameters()]
        if learned and not warm_up:
            raise ConfigurationError(
                f"{type(likelihood).__name__} learns {learned}, which SG-MCMC does not sample: it "
                "is trained in the warm-up and then held. Pass warm_up=, or a likelihood with "
                "nothing to learn."
            )

        stacked = start_members(self.net, start, self.chain_numbers, self.seed, spread)
        own = dict(self.net.named_parameters())
        if not warm_up and start in ("around", "reset"):
            # nothing would train what is not sampled: every chain keeps the network's own
            for name in set(trainable) - set(names):
                stacked[name] = own[name].detach().expand_as(stacked[name])
        self._layout = FlatLayout({name: own[name] for name in names})
        self.weights = nn.Parameter(flatten_chains(stacked, self._layout))
        self.prior = BoundPrior(prior, self.net, {name: own[name] for name in names})
        self.target = Target(self.likelihood, self.prior, num_data, temperature)
        # the other trainable weights of each chain: point estimates
        points = {name: own[name] for name in trainable if name not in names}
        self._points = FlatLayout(points)
        self.points = nn.Parameter(flatten_chains(stacked, self._points)) if points else None
        self.point_prior = BoundPrior(prior, self.net, points) if points else None
        if self.points is not None and not warm_up:
            self.points.requires_grad_(False)
        # every chain has buffers of its own, such as the running statistics of BatchNorm
        self._buffer_names = [name for name in network_tensors(self.net) if name not in own]
        for index, name in enumerate(self._buffer_names):
            self.register_buffer(f"chain_buffer_{index}", stacked[name].clone())
        for parameter in own.values():
            parameter.requires_grad_(False)  # the chains' weights stand in for it
        self._stack = StackedModule(self.net, mode)
        self._memory, self._point_memory = KeptMemory(), KeptMemory()
        self._streams: list[NormalStream] | None = None
        for parameter in self.likelihood.parameters():
            # shared by all chains, whose losses are summed: the mean gradient, whatever K is
            parameter.register_hook(lambda gradient: gradient / self.chains)
        self._saved: dict[str, Any] | None = None
        self._closures = 0
        self._warming_up = False
        self._energy_is_exact = False
        self._accepted: tuple[Tensor, int] | None = None
        self._last_energies: Tensor | None = None
        self._sampled_at: int | None = None
        self._sampled = False

    @property
    def chains(self) -> int:
        """K, the number of chains."""
        return len(self.chain_numbers)

    # ---------------------------------------------------------------- the energy

    def energies(self, batch: Any) -> Tensor:
        """The mean energy of every chain, (K,), estimated on a batch."""
        inputs, targets = self.split(batch)
        weights, prior_energy = split_weights(self.weights, self._layout, self.prior, self._memory)
        if self.points is not None and self.point_prior is not None:
            points, point_energy = split_weights(
                self.points, self._points, self.point_prior, self._point_memory
            )
            weights, prior_energy = {**weights, **points}, prior_energy + point_energy
        outputs = self._stack({**weights, **self._chain_buffers()}, inputs)
        self.check("train", outputs[0], targets)
        if self.chains == 1:
            data_energy = self.target.data_energy(outputs[0], targets)[None]
        else:
            data_energy = vmap(lambda one: self.target.data_energy(one, targets))(outputs)
        return data_energy + prior_energy / self.target.num_data

    def loss(self, batch: Any) -> Tensor:
        """The sum of all chains' mean energies: each chain's gradient is its own."""
        return self.energies(batch).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The summed energies of a batch, each chain's checked."""
        full_batch = self._optimizer_sampler.full_batch and not self._warming_up
        if full_batch:
            self._check_full(batch)
        energies = self.energies(batch)
        self._last_energies = energies.detach()
        # HMC calls this at trial moves too; it may reject them, so only its start must be finite
        if self._closures == 0 or not full_batch:
            self._stop_if_a_chain_is_not_finite(energies, batch, batch_idx)
            self.log("train_loss", energies.mean(), prog_bar=True, batch_size=batch_size(batch))
        return energies.sum()

    def _chain_buffers(self) -> dict[str, Tensor]:
        return {
            name: self.get_buffer(f"chain_buffer_{index}")
            for index, name in enumerate(self._buffer_names)
        }

    def _stop_if_a_chain_is_not_finite(self, energies: Tensor, batch: Any, batch_idx: int) -> None:
        if torch.isfinite(energies.detach()).all():
            return
        finite = energies.isfinite().tolist()
        bad = [str(k) for k, good in zip(self.chain_numbers, finite, strict=True) if not good]
        culprit = self._blame(
            batch,
            "The data are finite, so the chain has diverged: lower the sampler's lr (or the "
            "temperature), warm up first, or clip gradients.",
        )
        raise NonFiniteError(
            f"The energy of chain {', '.join(bad)} is not finite at step {self.global_step} (epoch "
            f"{self.current_epoch}, batch {batch_idx}). {culprit} All draws and checkpoints before "
            "it can be read; those of the last steps may be of the chain as it went astray, which "
            "train_loss shows."
        )

    def _check_full(self, batch: Any) -> None:
        """Raise unless this is the energy of all examples, and of the weights alone."""
        name = type(self._optimizer_sampler).__name__
        size = batch_size(self.split(batch)[0])
        expected = self.target.num_data
        if size is not None and size * self.trainer.world_size != expected:
            raise DataError(
                f"{name} needs the energy of all {expected} training examples in each step; the "
                f"batch has {size}. Set batch_size={expected}."
            )
        if self._energy_is_exact:
            return
        with torch.no_grad():
            before = {key: buffer.clone() for key, buffer in self._chain_buffers().items()}
            first, second = self.energies(batch), self.energies(batch)
            changed = [k for k, v in self._chain_buffers().items() if not torch.equal(v, before[k])]
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
        known = self.target._num_data
        seeds = [member_seed(self.seed, number) for number in self.chain_numbers]
        sampler = make_sampler(
            self.sampler_factory,
            self.weights,
            num_data=1 if known is None else known,  # set again when the data are known
            temperature=self.target.temperature,
            seed=seeds,
        )
        if self._streams is not None:
            sampler.streams = self._streams  # a second fit goes on with the noise, not again
        self._streams = sampler.streams
        optimizer: Optimizer = sampler
        if self.warm_up:
            parameters = [p for p in self.parameters() if p.requires_grad]
            first = (self._optimizer or self._default_optimizer)(parameters)
            self._refuse_weight_decay(first)
            # a trainer that fits again goes on sampling
            taken = self.trainer.global_step if self._trainer is not None else 0
            optimizer = WarmUp(first, sampler, self.warm_up, taken)
        self._optimizer_sampler = sampler
        self._compare_with_saved()
        if self._scheduler is None:
            return optimizer
        schedule = {"scheduler": self._scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """One step, of the warm-up or of the sampler."""
        sampler = self._optimizer_sampler
        self._warming_up = getattr(optimizer.optimizer, "warming_up", False)
        if sampler.calls_closure_again and not self._warming_up:
            self._refuse_accumulation()
        sampler.num_data = self.target.num_data
        next_step = self.global_step + 1
        sampler.measure = next_step % max(1, getattr(self.trainer, "log_every_n_steps", 0)) == 0
        sampler.measured_temperature = None
        self._closures = 0

        def closure() -> Any:
            result = optimizer_closure() if optimizer_closure is not None else None
            self._closures += 1
            full_batch = sampler.full_batch and not self._warming_up
            return self._all_ranks_energies() if full_batch else result

        # draws of HMC before its step size is settled are not of the posterior
        settling = sampler.param_groups[0]["explore"] or getattr(sampler, "adapting", False)
        self._sampled = not self._warming_up and not settling
        scheduler = self.lr_schedulers() if self._scheduler is not None else None
        self._sampled_at = None if scheduler is None else scheduler.last_epoch  # type: ignore[union-attr]
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        self._closures = 0
        self._log_sampler(sampler)

    def _log_sampler(self, sampler: Sampler) -> None:
        if not self._sampled:
            return
        if sampler.measured_temperature is not None:
            self.log("temperature", sampler.measured_temperature.mean().float())
        if isinstance(sampler, HMC) and sampler.acceptance is not None:
            self.log("acceptance", sampler.acceptance.mean().float())
            self.log("divergences", sampler.divergences.sum().float())
            total, count = self._accepted or (torch.zeros(self.chains), 0)
            self._accepted = total + sampler.acceptance.cpu().float(), count + 1

    def _refuse_accumulation(self) -> None:
        if self.trainer.accumulate_grad_batches > 1:
            raise ConfigurationError(
                f"{type(self._optimizer_sampler).__name__} computes the gradient of a step more "
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

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each chain's gradient by itself."""
        if not gradient_clip_val:
            return
        parts = [p for p in (self.weights, self.points) if p is not None]
        gradients = [part.grad for part in parts if part.grad is not None]
        clip_by_chain(gradients, gradient_clip_val, gradient_clip_algorithm)
        shared = [p.grad for p in self.likelihood.parameters() if p.grad is not None]
        if shared:
            rows = [gradient.view(1, -1) for gradient in shared]
            clip_by_chain(rows, gradient_clip_val, gradient_clip_algorithm)

    @property
    def sampling(self) -> bool:
        """Whether the last step was one of sampling: not of warm-up, not of exploration."""
        return self._sampled

    @property
    def ended_cycle(self) -> bool:
        """Whether the last step was the last of a cycle of a cyclical schedule."""
        scheduler = self.lr_schedulers() if self._scheduler is not None else None
        if self._sampled_at is None or not hasattr(scheduler, "ends_cycle"):
            return False
        return self._sampled and bool(scheduler.ends_cycle(self._sampled_at))  # type: ignore[union-attr]

    # ---------------------------------------------------------------- what it leaves behind

    def current_draws(self) -> dict[str, Tensor]:
        """The weights and buffers of all chains as they stand, with a leading axis of chains.

        They are views: copy what must outlive the next step.
        """
        points = {} if self.points is None else self._points.views(self.points.detach())
        return {**self._layout.views(self.weights.detach()), **points, **self._chain_buffers()}

    def forward(self, inputs: Any) -> Tensor:
        """The outputs of every chain's network, (K, batch, ...)."""
        return self._stack(self.current_draws(), inputs)

    def posterior(self) -> Posterior:
        """The collected draws of all chains; before there are any, the weights as they stand."""
        if self.collector is not None and len(self.collector):
            return self.collector.posterior()
        current = self.current_draws()
        draws = [{name: t[k] for name, t in current.items()} for k in range(self.chains)]
        return DrawsPosterior(self.net, self.likelihood, draws, chains=self.chains)

    def member_posteriors(self) -> Mapping[int, Posterior]:
        """By number, the draws of each chain."""
        posterior = self.posterior()
        assert isinstance(posterior, DrawsPosterior)
        return {number: posterior.chain(k) for k, number in enumerate(self.chain_numbers)}

    # ---------------------------------------------------------------- fits and checkpoints

    def setup(self, stage: str) -> None:
        """Forget the draws of an earlier fit, if this one collects none."""
        from lightning_bnn.callbacks import SampleCollector

        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        if stage == "fit" and not any(isinstance(one, SampleCollector) for one in callbacks):
            self.collector = None

    def on_fit_start(self) -> None:
        """Check what the sampler needs of the trainer."""
        super().on_fit_start()
        self._energy_is_exact, self._accepted = False, None
        if self._optimizer_sampler.calls_closure_again:
            self._refuse_accumulation()
        if self.weights.dtype in (torch.bfloat16, torch.float16):
            warnings.warn(
                f"The weights are {self.weights.dtype}, in which most steps of a sampler are too "
                "small to be seen. Use precision='bf16-mixed', which keeps weights in float32.",
                stacklevel=2,
            )

    def on_train_end(self) -> None:
        """Warn of chains of HMC that stood still."""
        if self._accepted is None:
            return
        rates = self._accepted[0] / self._accepted[1]
        stuck = [k for k, r in zip(self.chain_numbers, rates.tolist(), strict=True) if r < 0.1]
        if stuck:
            warnings.warn(
                f"HMC accepted less than one in ten transitions in the chains {stuck}: their draws "
                "are mostly copies. Lower the sampler's lr, or let adapt_steps= find it.",
                stacklevel=2,
            )

    def on_train_start(self) -> None:
        """Find N, and let all ranks draw the same noise."""
        super().on_train_start()
        for stream in self._optimizer_sampler.streams:
            stream.load_state_dict(self.trainer.strategy.broadcast(stream.state_dict()))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add how the chains run: the other way would differ in the last bits."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lightning_bnn"]["chains_mode"] = self._stack.mode
        checkpoint["lightning_bnn"]["chains"] = self._facts()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Run the chains as the saved ones did."""
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint.get("lightning_bnn", {}).get("chains_mode")
        if saved is not None and self._stack.mode == "auto":
            self._stack.mode = saved
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            self._saved = checkpoint.get("lightning_bnn", {}).get("chains")
            if hasattr(self, "_optimizer_sampler"):
                self._compare_with_saved()

    def _facts(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {
            "sampler": type(self._optimizer_sampler).__name__,
            "chains": self.chain_numbers,
            "warm_up": self.warm_up,
        }

    def _compare_with_saved(self) -> None:
        for name, value in (self._saved or {}).items():
            if self._facts()[name] != value:
                raise ConfigurationError(
                    f"The checkpoint was made with {name}={value!r}, this strategy has "
                    f"{self._facts()[name]!r}. Make them the same to go on, or start from the "
                    "checkpoint's weights in a new run."
                )
        self._saved = None

    def _predict(self, inputs: Any) -> Predictive:
        """With no more draws than there are: each once."""
        assert self._snapshot is not None
        count = self.predict_draws
        if isinstance(self._snapshot, DrawsPosterior):
            count = min(count, len(self._snapshot))
        return self._snapshot.predict(inputs, draws=count)
