r"""Hamiltonian Monte Carlo with accept/reject (Duane et al., 1987; Neal, 2011), on the full batch.

One transition draws velocities :math:`v \sim N(0, \eta T/N)`, takes L leapfrog steps

.. math:: v \leftarrow v - \tfrac{\eta}{2} g(w),\qquad w \leftarrow w + v,\qquad
          v \leftarrow v - \tfrac{\eta}{2} g(w),

and accepts the end with probability :math:`\min(1, \exp(-\tfrac NT \Delta\bar H))`, where
:math:`\bar H = \bar U + |v|^2/2\eta`; otherwise the chain stays where it was. The weights are
distributed as :math:`\exp(-U/T)` whatever η is: it decides only how fast.

η is the learning rate of the other samplers. In the usual symbols the leapfrog step is
:math:`h = \sqrt{\eta/N}` on the energy U, the momentum is p = v/h with variance T, and the mass is
one, so a trajectory has the length Lh. It is stable for ηλ < 4, λ the largest curvature of the mean
energy. With L = 1 it is SGLD at the learning rate η/2, corrected by accept/reject.

Nothing has to be tuned. Without a learning rate each chain finds its own: its first transition
doubles or halves h until one leapfrog step is accepted with probability 0.8. *Dual averaging*
(Hoffman and Gelman, 2014, section 3.2, with their constants) then moves log h until the acceptance
is the one asked for, and holds it. *Jitter* multiplies h in each transition by a uniform number
around 1: a trajectory of fixed length can end, for some direction of a Gaussian posterior, where it
began, and then never forgets. L is what a transition costs. The step fits the direction in which
the posterior is narrowest, so 50 steps go through one that is up to 50 times wider, and more than
that is walked in several transitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_bnn.checks import check_number, check_whole
from lightning_bnn.errors import ConfigurationError, NonFiniteError
from lightning_bnn.samplers.base import Closure, Group, Sampler

__all__ = ["HMC", "DualAveraging", "dual_averaging", "leapfrog", "log_acceptance"]

# An acceptance of exp(-1000): the trajectory has left the posterior for good.
_DIVERGED = -1000.0
_FIRST = math.log(0.8)  # the acceptance of one leapfrog step that the first step size is found by
_TRIALS = 60  # the most steps that are tried, each half or twice the one before
_ADAPT = 200  # transitions of adaptation, where nobody says how many


class DualAveraging(NamedTuple):
    """The state of the adaptation: log h relative to where it began, one entry for each chain."""

    transitions: int
    error: Tensor
    log_step: Tensor
    average: Tensor


def dual_averaging(
    state: DualAveraging, acceptance: Tensor, target: float, centre: float = math.log(10)
) -> DualAveraging:
    """The state after a transition with this probability of acceptance.

    Args:
        state: The state before it.
        acceptance: How likely each chain was to accept.
        target: How likely it should be.
        centre: The log h that is tried first and drawn to; large, for a start that is too small.

    Example:
        >>> state = DualAveraging(0, *torch.zeros(3, 1))
        >>> for _ in range(100):                     # a world in which the acceptance is 1 - h/10
        ...     state = dual_averaging(state, (1 - state.log_step.exp() / 10).clamp(min=0), 0.8)
        >>> round(float(state.average.exp()), 1)
        2.0
    """
    transitions = state.transitions + 1
    share = 1 / (transitions + 10)
    error = (1 - share) * state.error + share * (target - acceptance)
    log_step = centre - math.sqrt(transitions) / 0.05 * error
    recent = transitions**-0.75
    average = recent * log_step + (1 - recent) * state.average
    return DualAveraging(transitions, error, log_step, average)


def leapfrog(
    weights: Sequence[Tensor],
    velocities: Sequence[Tensor],
    rates: Sequence[Tensor],
    gradients: Sequence[Tensor],
    gradient: Callable[[], Sequence[Tensor]],
    steps: int,
) -> None:
    """Take leapfrog steps, changing weights and velocities in place.

    Args:
        weights: w.
        velocities: v, of the same shapes.
        rates: η for each tensor, of a shape that broadcasts.
        gradients: The gradient of the mean energy at the weights as they are.
        gradient: Computes it again, at the weights as they have become.
        steps: L.

    Example:
        >>> weight, velocity = torch.tensor([1.0]), torch.tensor([0.0])
        >>> leapfrog([weight], [velocity], [torch.tensor(0.01)], [weight], lambda: [weight], 63)
        >>> weight                                    # energy w²/2: a full turn, a time of 6.3
        tensor([0.9998])
    """

    def kick(share: float) -> None:
        for velocity, by_weight, rate in zip(velocities, gradients, rates, strict=True):
            velocity.addcmul_(by_weight, rate, value=-share)

    kick(0.5)
    for step in range(steps):
        for weight, velocity in zip(weights, velocities, strict=True):
            weight.add_(velocity)
        gradients = gradient()
        kick(1.0 if step + 1 < steps else 0.5)  # two half kicks between moves are one


def log_acceptance(start: Tensor, end: Tensor, num_data: float, temperature: float) -> Tensor:
    """The logarithm of the Metropolis ratio of two mean Hamiltonians, −∞ where it is NaN.

    Example:
        >>> log_acceptance(torch.tensor([1.0, 1.0]), torch.tensor([1.5, math.nan]), 10, 2.0)
        tensor([-2.5000,    -inf])
    """
    ratio = (start - end) * (num_data / temperature)
    return ratio.masked_fill(ratio.isnan(), -math.inf)


class HMC(Sampler):
    """Hamiltonian Monte Carlo: each ``step(closure)`` is one whole transition of every chain.

    The closure clears the gradients, computes the mean energy of *all* examples at the weights as
    they are, calls backward on it and returns it: a number for one chain, for K stacked chains
    the K energies (backward then goes through their sum). A step calls it L + 1 times (the first,
    to find a step size, up to 60 times more) and returns what the first call returned.

    Args:
        params: Parameters, or groups of them; groups may differ in ``lr``.
        lr: η = N h², with h the leapfrog step, where the adaptation starts from; by default each
            chain finds its own.
        num_data: N, the number of training examples.
        leapfrog_steps: L, the leapfrog steps of a transition.
        temperature: T, above 0; 1 is the Bayes posterior.
        adapt_steps: Transitions over which each chain's step adapts; 0: none. Draws before their
            end are not of the posterior. By default 200, in an SGMCMC strategy a quarter of the
            fit (of what its warm-up leaves).
        target_acceptance: The probability of acceptance that the adaptation aims at, and comes to
            from above: 0.9 is common after a few hundred transitions that aim at 0.8.
        jitter: The step of each transition lies within this share of h.
        seed: Seed of the noise, or one for each stacked chain.

    Attributes:
        acceptance: The probability with which each chain accepted the last transition.
        divergences: How often, since the end of the adaptation, a chain's trajectory met an
            energy that is not finite or rose beyond all chance of acceptance (by 1000 T). Such a
            transition is rejected; more than a few mean that ``lr`` is too large.
        measured_temperature: The configurational temperature where each transition starts;
            momenta that are drawn anew would say nothing.

    Example:
        >>> weight = torch.zeros(3, requires_grad=True)
        >>> sampler = HMC([weight], num_data=100, seed=0)
        >>> def closure():
        ...     sampler.zero_grad()
        ...     energy = (0.5 * weight**2).sum()                  # the mean energy
        ...     energy.backward()
        ...     return energy
        >>> energy = sampler.step(closure)
        >>> bool((weight != 0).all()), bool(sampler.acceptance > 0.5)
        (True, True)
    """

    full_batch = True
    calls_closure_again = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        num_data: int | None = None,
        leapfrog_steps: int = 50,
        temperature: float = 1.0,
        adapt_steps: int | None = None,
        target_acceptance: float = 0.8,
        jitter: float = 0.2,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(params, {"lr": 1.0 if lr is None else lr}, num_data, temperature, seed)
        check_number("jitter", jitter, positive=False)
        check_number("target_acceptance", target_acceptance)
        if not (target_acceptance < 1 and jitter < 1):
            raise ConfigurationError(
                "HMC takes target_acceptance= between 0 and 1, and jitter= from 0 to below 1; got "
                f"{target_acceptance} and {jitter}."
            )
        self.leapfrog_steps = check_whole("leapfrog_steps", leapfrog_steps, 1)
        self.plans_adaptation = adapt_steps is None
        self.adapt_steps = (
            _ADAPT if adapt_steps is None else check_whole("adapt_steps", adapt_steps, 0)
        )
        self.target_acceptance = target_acceptance
        self.jitter = jitter
        self.acceptance: Tensor | None = None
        self.divergences = torch.zeros(self.chains, dtype=torch.int64)
        self._adaptation = DualAveraging(0, *torch.zeros(3, self.chains, dtype=torch.float64))
        self._finds_rate = lr is None
        # a few transitions do not come back from ten times a step that was no guess
        self._centre = 0.0 if lr is None or adapt_steps is None else math.log(10)
        # log h where the adaptation starts, relative to lr; found in the first transition if None
        self._first = None if lr is None else torch.zeros(self.chains, dtype=torch.float64)
        self._check_temperature()

    @property
    def gradients_per_step(self) -> int:  # type: ignore[override]
        """L: what a transition costs."""
        return self.leapfrog_steps

    @property
    def adapting(self) -> bool:
        """Whether the next transition still serves the adaptation."""
        return self._adaptation.transitions < self.adapt_steps

    @property
    def finds_rate(self) -> bool:
        """Whether its learning rate was left to it."""
        return self._finds_rate

    @property
    def lr_scale(self) -> Tensor:
        """The factor on ``lr`` that was found, one for each chain."""
        state = self._adaptation
        log_step = state.log_step if self.adapting else state.average
        return (
            2 * (log_step if self._first is None else self._first.to(log_step) + log_step)
        ).exp()

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Take one transition in every chain; returns what the closure returned first."""
        if closure is None:
            raise ConfigurationError(
                "HMC moves several times in a step, so it needs a closure that computes the mean "
                "energy and its gradient anew: call step(closure)."
            )
        temperature = self._check_temperature()
        with torch.enable_grad():
            first = closure()
        energies = [self._energies(first)]
        if energies[0].device.type == "cpu":  # on others, reading would make the device wait
            self._check_start(energies[0])
        moving = [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]
        weights = [weight for weight, _ in moving]
        if not weights:
            raise ConfigurationError("HMC needs gradients: let the closure call backward.")
        gradients = self._gradients(weights)
        if self.measure:
            reading, count = self.read_temperature(self.param_groups[0], weights, gradients)
            self.measured_temperature = reading / count

        if self._first is None:
            self._first = self._first_steps(closure, moving, energies[0], gradients, temperature)
        normal = self.noise(self.param_groups[0], weights)
        to_jitter, to_accept = self._uniform(weights[0].device)
        scale = self.lr_scale.to(to_jitter.device) * (1 + self.jitter * (2 * to_jitter - 1)) ** 2
        rates = [self.along(group["lr"] * scale, w).to(w.dtype) for w, group in moving]
        velocities = self._velocities(normal, rates, temperature)

        def gradient() -> list[Tensor]:
            with torch.enable_grad():
                energies.append(self._energies(closure()))
            return self._gradients(weights)

        before = [weight.clone() for weight in weights]
        start = energies[0] + self._kinetic(velocities, rates)
        leapfrog(weights, velocities, rates, gradients, gradient, self.leapfrog_steps)
        end = energies[-1] + self._kinetic(velocities, rates)

        ratio = log_acceptance(start, end, self.num_data, temperature)
        diverged = ~torch.stack(energies).isfinite().all(0) | (ratio < _DIVERGED)
        accepted = (to_accept.log() < ratio) & ~diverged
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(torch.where(self.along(accepted, weight), weight, old))
        self._record(ratio.clamp(max=0).exp().masked_fill(diverged, 0), diverged)
        return first

    def take_over(self, earlier: Sampler) -> None:
        """Go on with the step sizes that an earlier HMC of the same chains has found."""
        if isinstance(earlier, HMC):
            self._first, self._adaptation = earlier._first, earlier._adaptation
            self.adapt_steps = earlier.adapt_steps

    def _first_steps(
        self,
        closure: Closure,
        moving: list[tuple[Tensor, Group]],
        energies: Tensor,
        gradients: list[Tensor],
        temperature: float,
    ) -> Tensor:
        """By chain, log h relative to ``lr`` at which one leapfrog step is accepted with 0.8.

        It is doubled, or halved, until the acceptance crosses that (Hoffman and Gelman, 2014,
        algorithm 4), always with the same momenta; chains that have found theirs wait.
        """
        weights = [weight for weight, _ in moving]
        before = [weight.clone() for weight in weights]
        gradients = [gradient.clone() for gradient in gradients]
        normal = [noise.clone() for noise in self.noise(self.param_groups[0], weights)]
        log_step, up = torch.zeros_like(energies), None
        searching = torch.ones_like(energies, dtype=torch.bool)

        tried = [energies]

        def gradient() -> list[Tensor]:
            with torch.enable_grad():
                tried.append(self._energies(closure()))
            return self._gradients(weights)

        for _ in range(_TRIALS):
            scale = (2 * log_step).exp()
            rates = [self.along(group["lr"] * scale, w).to(w.dtype) for w, group in moving]
            velocities = self._velocities(normal, rates, temperature)
            start = energies + self._kinetic(velocities, rates)
            leapfrog(weights, velocities, rates, gradients, gradient, 1)
            end = tried[-1] + self._kinetic(velocities, rates)
            ratio = log_acceptance(start, end, self.num_data, temperature)
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)
            accepted = ratio > _FIRST
            up = accepted if up is None else up
            searching = searching & (accepted == up)
            if not searching.any():
                break
            moved = log_step + torch.where(up, math.log(2), -math.log(2))
            log_step = torch.where(searching, moved, log_step)
        return log_step

    def _record(self, acceptance: Tensor, diverged: Tensor) -> None:
        self.acceptance = acceptance
        if self.adapting:
            state = self._adaptation
            tensors = (tensor.to(acceptance.device) for tensor in state[1:])
            state = DualAveraging(state.transitions, *tensors)
            target, centre = self.target_acceptance, self._centre
            self._adaptation = dual_averaging(state, acceptance, target, centre)
        else:
            self.divergences = self.divergences.to(diverged.device) + diverged

    def readings(self) -> dict[str, Tensor]:
        """The mean acceptance of the last transition, and all divergences so far."""
        if self.acceptance is None:
            return {}
        return {
            "acceptance": self.acceptance.mean().float(),
            "divergences": self.divergences.sum().float(),
            "step_size": self._rates().mean().float(),
        }

    def found(self) -> str | None:
        """The learning rates, if they were found or adapted, and the divergences."""
        if not self.finds_rate and self.adapt_steps == 0:
            return None
        rates = ", ".join(f"{rate:.2g}" for rate in self._rates().tolist())
        count = int(self.divergences.sum())
        return f"HMC found the step sizes {rates} (with {count or 'no'} divergences since)"

    def _rates(self) -> Tensor:
        """η of each chain, that of the first group of parameters."""
        return self.param_groups[0]["lr"] * self.lr_scale

    # ---------------------------------------------------------------- one value for each chain

    def _energies(self, value: Any) -> Tensor:
        """What the closure returned, in double precision."""
        if not isinstance(value, Tensor) or value.numel() != self.chains:
            raise ConfigurationError(
                "HMC accepts or rejects each chain by its own energy, so the closure returns a "
                f"tensor of shape ({self.chains},) with the mean energy of each chain; got {value}."
            )
        return value.detach().double().reshape(self.chains)

    def _velocities(
        self, normal: list[Tensor], rates: list[Tensor], temperature: float
    ) -> list[Tensor]:
        """Fresh velocities, of the variance ηT/N."""
        return [
            number * (rate * temperature / self.num_data).sqrt()
            for number, rate in zip(normal, rates, strict=True)
        ]

    def _kinetic(self, velocities: list[Tensor], rates: list[Tensor]) -> Tensor:
        pairs = zip(velocities, rates, strict=True)
        return self.row_squares([v.double() / (2 * rate.double()).sqrt() for v, rate in pairs])

    def _uniform(self, device: torch.device) -> Tensor:
        """Two uniform numbers for each chain, from the normal ones of its stream."""
        normal = torch.empty(self.chains, 2, dtype=torch.float64, device=device)
        for row, stream in zip(normal, self.streams, strict=True):
            stream.fill_(row)
        return torch.special.ndtr(normal).T

    # ---------------------------------------------------------------- checks

    def _check_temperature(self) -> float:
        temperatures = sorted({group["temperature"] for group in self.param_groups})
        if len(temperatures) > 1 or temperatures[0] <= 0:
            raise ConfigurationError(
                "HMC accepts by energy over temperature, so it takes one temperature= above 0 for "
                f"all parameters; got {temperatures}. To find a mode use an optimizer like Adam."
            )
        if any(group["explore"] for group in self.param_groups):
            raise ConfigurationError(
                "HMC has no steps without noise, so it cannot take the exploration part of a "
                "cyclical schedule. Use another schedule, or another sampler."
            )
        return float(temperatures[0])

    def _check_start(self, energies: Tensor) -> None:
        bad = (~energies.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise NonFiniteError(
                f"The mean energy is {energies[bad[0]].item()} where chain {bad[0]} stands, so no "
                "move from there can be judged. Start from weights with a finite energy: nearer "
                "to zero, or from a fit."
            )

    def _gradients(self, weights: list[Tensor]) -> list[Tensor]:
        return [weight.grad for weight in weights if weight.grad is not None]

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, with the adaptation and the count of divergences."""
        state = super().state_dict()
        state["adaptation"] = self._adaptation._asdict()
        state["first"], state["adapt_steps"] = self._first, self.adapt_steps
        state["divergences"] = self.divergences.clone()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume the saved sampler, to the last bit."""
        super().load_state_dict(state_dict)
        saved = state_dict["adaptation"]
        tensors = (saved[name].cpu() for name in DualAveraging._fields[1:])
        self._adaptation = DualAveraging(saved["transitions"], *tensors)
        first = state_dict.get("first")
        self._first = self._first if first is None else first.cpu()
        self.adapt_steps = state_dict.get("adapt_steps", self.adapt_steps)
        self.divergences = state_dict["divergences"].cpu().clone()
