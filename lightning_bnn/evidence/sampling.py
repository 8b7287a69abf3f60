r"""The evidence by sampling: annealed importance sampling and thermodynamic integration.

Both go from the prior to the posterior through :math:`\pi_\beta(w)\propto p(D\mid w)^\beta p(w)`,
which is the tempered likelihood of temperature 1/β (see :mod:`lightning_bnn.target`), on the rungs
:math:`\beta_j=(j/J)^4`. K independent chains of HMC climb side by side, each from a draw of the
prior. Let :math:`\ell(w)=\log p(D\mid w)`.

*Annealed importance sampling* (Neal, 2001): with :math:`w_j` where a chain stands on rung j,

.. math:: \log v = \sum_{j=0}^{J-1} (\beta_{j+1}-\beta_j)\,\ell(w_j), \qquad
          \mathrm E[v] = p(D),

whatever J is. The error is that of the mean of the K numbers v, by the delta method, or, if it is
larger, that of K numbers whose logarithms are Gaussian with the variance of the log v: of few
chains none may have met the tail that the mean is made of.

*Thermodynamic integration*: :math:`\log p(D)=\int_0^1 \mathrm E_\beta[\ell]\,d\beta`, by the
trapezoidal rule with the correction of Friel, Hurn and Wyse (2014), as the slope of the integrand
is :math:`\mathrm{Var}_\beta[\ell]`:

.. math:: \sum_j \tfrac{\Delta_j}2\big(\mathrm E_j[\ell]+\mathrm E_{j+1}[\ell]\big)
          -\tfrac{\Delta_j^2}{12}\big(\mathrm{Var}_{j+1}[\ell]-\mathrm{Var}_j[\ell]\big).

Its error is made of that of Monte Carlo, by the K chains, and that of discretisation, by the
difference to the same sum over every second rung. Chains that lag behind their rung are not in it.

The step size of a rung is found in a climb before, by its acceptance, and held: were it that of the
climb itself, the mean of v would not be exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.bank import Bank, View
from lightning_bnn.checks import check_whole
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.lightning import move_data_to_device, rank_zero_warn
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.likelihoods.base import check_likelihood
from lightning_bnn.network import copy_network, network_tensors, plain_network
from lightning_bnn.posteriors import Evidence
from lightning_bnn.posteriors.prior import GivenPrior, chosen_prior
from lightning_bnn.priors import BoundPrior
from lightning_bnn.random import member_seed, random_seed
from lightning_bnn.samplers import HMC
from lightning_bnn.selection import Choice, select, trainable_names
from lightning_bnn.strategies.base import batch_size
from lightning_bnn.target import Keys, Split, Target, make_split

__all__ = ["annealed_importance", "thermodynamic_integration"]

_POWER = 4  # of the ladder: most rungs are where the data count little
_ACCEPTANCE, _GAIN, _SETTLE = 0.8, 1.0, 20  # of the climb that finds step sizes
_FEW = 10  # chains that have nearly all of the weight


def annealed_importance(
    net: nn.Module,
    likelihood: Likelihood,
    data: Iterable[Any],
    prior: GivenPrior | None = None,
    chains: int = 64,
    rungs: int = 200,
    transitions: int = 1,
    leapfrog_steps: int = 10,
    bayesian: Choice = None,
    chunk: int | None = None,
    split: Split | Keys | None = None,
    seed: int | None = None,
) -> Evidence:
    """The log evidence of a small network by annealed importance sampling.

    It costs about 2 · rungs · transitions · leapfrog_steps gradients of all data, for all chains.
    To have a posterior keep it: ``posterior.evidence = annealed_importance(...)``.

    Args:
        net: The network, whose own values matter only where weights are not Bayesian.
        likelihood: How outputs of the network give targets; what it has learned is held.
        data: All training data, in batches that fit in memory together.
        prior: A proper prior of the weights; by default ``Normal()``.
        chains: K, how many climb.
        rungs: J. More make the weights of the chains alike.
        transitions: Of HMC on each rung.
        leapfrog_steps: Of each transition.
        bayesian: Which weights vary (see :func:`lightning_bnn.selection.select`).
        chunk: The most chains that run at a time; by default all.
        split: How a batch gives inputs and targets, where it is no pair of them.
        seed: Of the noise; by default ``seed_everything`` decides it.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> x, y = torch.ones(1, 1), torch.zeros(1, 1)
        >>> found = annealed_importance(nn.Linear(1, 1, bias=False), Gaussian(1.0), [(x, y)],
        ...                             chains=64, rungs=20, seed=0)
        >>> abs(found.value - -0.5 * math.log(4 * math.pi)) < 4 * found.error      # N(0; 0, 2)
        True
    """
    climb = _Climb(
        net, likelihood, data, prior, chains, leapfrog_steps, bayesian, chunk, split, seed
    )
    powers = _powers(rungs, least=1)
    found = climb(powers[:-1], check_whole("transitions", transitions, 1))
    log_weights = powers.diff() @ found[:, -1]
    relative = (log_weights - log_weights.max()).exp()
    effective = float(relative.sum().square() / relative.square().sum())
    if effective < min(_FEW, chains / 4):
        rank_zero_warn(
            f"{effective:.1f} of {chains} chains have nearly all the weight of this evidence, "
            "which is then likely to be too small, and its error as well. Pass more rungs= or "
            "transitions=."
        )
    value = log_weights.logsumexp(0) - math.log(chains)
    spread = max(float(relative.var() / relative.mean().square()), _lognormal(log_weights.var()))
    return Evidence(float(value), math.sqrt(spread / chains), "AIS")


def _lognormal(variance: Tensor) -> float:
    """The relative variance of numbers whose logarithms are Gaussian."""
    return math.expm1(min(float(variance), 700.0))


def thermodynamic_integration(
    net: nn.Module,
    likelihood: Likelihood,
    data: Iterable[Any],
    prior: GivenPrior | None = None,
    chains: int = 16,
    rungs: int = 40,
    transitions: int = 20,
    leapfrog_steps: int = 10,
    bayesian: Choice = None,
    chunk: int | None = None,
    split: Split | Keys | None = None,
    seed: int | None = None,
) -> Evidence:
    """The log evidence of a small network by thermodynamic integration.

    Args:
        net: As for :func:`annealed_importance`, like all that follows.
        likelihood: How outputs of the network give targets.
        data: All training data, in batches.
        prior: A proper prior of the weights.
        chains: K, how many climb.
        rungs: J, an even number. More make the error of discretisation smaller.
        transitions: Of HMC on each rung; the first half is left out.
        leapfrog_steps: Of each transition.
        bayesian: Which weights vary.
        chunk: The most chains that run at a time; by default all.
        split: How a batch gives inputs and targets.
        seed: Of the noise; by default ``seed_everything`` decides it.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> x, y = torch.ones(1, 1), torch.zeros(1, 1)
        >>> found = thermodynamic_integration(nn.Linear(1, 1, bias=False), Gaussian(1.0), [(x, y)],
        ...                                   rungs=10, seed=0)
        >>> abs(found.value - -0.5 * math.log(4 * math.pi)) < 4 * found.error      # N(0; 0, 2)
        True
    """
    climb = _Climb(
        net, likelihood, data, prior, chains, leapfrog_steps, bayesian, chunk, split, seed
    )
    powers = _powers(rungs, least=4)
    if rungs % 2:
        raise ConfigurationError(
            f"rungs= is an even number, for an error by half of them; got {rungs}."
        )
    count = check_whole("transitions", transitions, 2)
    found = climb(powers, count)[:, count // 2 :]  # (J + 1, transitions, K)
    means, variances = found.mean(1), found.flatten(1).var(1)

    def integral(step: int) -> tuple[Tensor, Tensor]:
        """Each chain's trapezoidal sum over the rungs in steps, and the correction for all."""
        widths, some, spread = powers[::step].diff(), means[::step], variances[::step]
        sums = 0.5 * (widths[:, None] * (some[1:] + some[:-1])).sum(0)
        return sums, -(widths.square() * spread.diff()).sum() / 12

    by_chain, correction = integral(1)
    half, coarse = integral(2)
    value = float(by_chain.mean() + correction)
    monte_carlo = float(by_chain.std() / math.sqrt(chains))
    return Evidence(value, math.hypot(monte_carlo, value - float(half.mean() + coarse)), "TI")


def _powers(rungs: int, least: int) -> Tensor:
    """β of the rungs 0 to J."""
    count = check_whole("rungs", rungs, least)
    return (torch.arange(count + 1, dtype=torch.float64) / count) ** _POWER


class _Powered(Target):
    """The target p(D|w)^β p(w)."""

    power = 1.0

    def data_energy(self, *arguments: Any, **options: Any) -> Tensor:
        return self.power * super().data_energy(*arguments, **options)


def _view(view: View, rows: slice) -> View:
    """All chains see the same."""
    return view


class _Climb:
    """K chains on their way from the prior to the posterior; calling it goes up twice."""

    def __init__(
        self, net: nn.Module, likelihood: Likelihood, data: Iterable[Any],
        prior: GivenPrior | None, chains: int, leapfrog_steps: int, bayesian: Choice,
        chunk: int | None, split: Split | Keys | None, seed: int | None,
    ) -> None:  # fmt: skip
        self.net = copy_network(plain_network(net)).eval()
        check_likelihood(likelihood)
        if likelihood.has_prior or any(p.requires_grad for p in likelihood.parameters()):
            raise ConfigurationError(
                f"The evidence by sampling is of weights under a prior, and {likelihood!r} learns "
                "or has a prior of its own, which is no density that is normalised. Pass one with "
                "the noise as it was found, such as Gaussian(0.1)."
            )
        self.chains = check_whole("chains", chains, 2)
        self.leapfrog_steps = check_whole("leapfrog_steps", leapfrog_steps, 1)
        names, own = select(self.net, bayesian), dict(self.net.named_parameters())
        tensors = {name: own[name] for name in names}
        self.prior = BoundPrior(chosen_prior(prior, trainable_names(self.net)), self.net, tensors)
        device = tensors[names[0]].device
        batches = map(make_split(split), (move_data_to_device(one, device) for one in data))
        self.batches = [(batch, batch_size(batch[1]) or 0) for batch in batches]
        self.num_data = sum(size for _, size in self.batches)
        if not self.num_data:
            raise DataError("There is no evidence without data: the loader gave no example.")
        stacked = {
            name: one.detach().expand(self.chains, *one.shape).clone()
            for name, one in network_tensors(self.net).items()
        }
        self.bank = Bank(self.net, stacked, range(self.chains), names, chunk=chunk)
        self.net.requires_grad_(False)
        self.target = _Powered(likelihood, self.prior, self.num_data)
        for (inputs, targets), _ in self.batches:
            with torch.no_grad():
                likelihood.check(self.bank(inputs)[0], targets)
        self.seed = random_seed() if seed is None else check_whole("seed", seed, 0)

    def __call__(self, powers: Tensor, transitions: int) -> Tensor:
        """ℓ after each transition on each rung, (rungs, transitions, K), in float64."""
        rates: list[float] = []
        sampler = self._start("find", 1.0)
        self.target.power = 0.0
        sampler.step(self._closure(sampler))  # which may try any step
        rate = float(sampler.lr_scale.median())

        def adapt(sampler: HMC) -> None:
            nonlocal rate
            assert sampler.acceptance is not None
            acceptance = float(sampler.acceptance.mean())
            rate *= math.exp(2 * _GAIN * (acceptance - _ACCEPTANCE))  # log h by half as much
            sampler.param_groups[0]["lr"] = rate

        sampler = self._start("adapt", rate)
        for _ in range(_SETTLE):
            sampler.step(self._closure(sampler))
            adapt(sampler)
        for power in powers.tolist():
            self.target.power = power
            for _ in range(transitions):
                sampler.step(self._closure(sampler))
                adapt(sampler)
            rates.append(rate)
        sampler = self._start("climb", rates[0])
        found = []
        for power, held in zip(powers.tolist(), rates, strict=True):
            self.target.power = power
            sampler.param_groups[0]["lr"] = held
            for _ in range(transitions):
                sampler.step(self._closure(sampler))
                found.append(self._log_likelihood())
        return torch.stack(found).view(len(powers), transitions, self.chains).cpu()

    def _start(self, purpose: str, rate: float) -> HMC:
        """Put all chains at draws of the prior."""
        generator = torch.Generator().manual_seed(member_seed(self.seed, 0, purpose))
        with torch.no_grad():
            self.bank.weights.copy_(self.prior.sample(self.chains, generator))
        seeds: Sequence[int] = [
            member_seed(self.seed, chain, purpose) for chain in range(self.chains)
        ]
        first = None if purpose == "find" else rate
        return HMC(  # type: ignore[abstract]  # it has a step of its own
            [self.bank.weights], first, self.num_data, self.leapfrog_steps, adapt_steps=0,
            seed=seeds,
        )  # fmt: skip

    def _closure(self, sampler: HMC) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            sampler.zero_grad()
            total = torch.zeros(())
            for (inputs, targets), size in self.batches:
                energies = self.bank.energies(self.target, partial(_view, View(inputs, targets)))
                energies = energies * (size / self.num_data)
                energies.sum().backward()
                total = total.to(energies.device) + energies.detach()
            return total

        return closure

    @torch.no_grad()
    def _log_likelihood(self) -> Tensor:
        power, self.target.power = self.target.power, 1.0
        total = torch.zeros(())
        for (inputs, targets), size in self.batches:
            energies = self.target.data_energy(self.bank(inputs), targets).double()
            total = total.to(energies.device) - size * energies
        self.target.power = power
        return total
