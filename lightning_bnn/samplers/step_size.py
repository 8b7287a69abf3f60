r"""A learning rate for each chain, found by the noise of its gradients and its temperature.

The noise of minibatch gradients heats a chain with momenta above T by about the share
:math:`N \eta v / (2 a T)`, where v is the variance of a coordinate of the minibatch gradient and a
the friction, and a step that is too long for the curvature heats it, too. So the largest rate that
can be trusted is one at which the kinetic temperature is a little above T: by the share

.. math:: g = \min(5\,\%, \tfrac{N}{10 d})

of it. The heat goes where the data determine the weights, in at most N of d directions, so that the
mean over many more weights than examples has to be nearer to T for those to be not too hot.

1. A chain stands still while its first gradients are compared. Half of the mean squared difference
   of two successive gradients is v, wherever the chain is, and gives the rate at which it heats by
   g: :math:`\eta = 2 a g T / (N v)`. It begins with no more than moves the weights by 3 % of
   their size in a step.
2. Over windows of steps v is measured again, and the mean kinetic temperature is read. Where that
   is precise (two standard errors are below g) and its excess is above 1.4 g or below 0.6 g beyond
   these, the rate is that of the formula times a factor, multiplied by the ratio of g to the
   excess. A chain that heats up beyond 1.5 T, and all chance, within a window goes back to where
   the window began, with a quarter of the rate; in each good window after that it may rise again.
3. After ``steps`` steps the rate is held. It is lowered, never raised, if a window shows that it
   heats by more than 1.6 g: the noise of gradients may grow while a chain finds its place.

Everything is counted and decided by chain, so that a chain moves as it would alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["StepSizes"]

_EXCESS = 0.05
_LOW, _HIGH, _HELD = 0.6, 1.4, 1.6  # of the excess that is aimed at
_LOST, _CHANCE = 0.5, 12.0  # the excess at which a window is given up, and in standard deviations
_GUESS = 20  # steps in which a chain stands still
_PAIR = 5  # of so many gradients the first two are compared
_MOVE, _SMALL = 0.03, 0.1  # the first steps, as a share of the weights' size, and a small such size


class StepSizes:
    """The learning rates of chains, and how they are found.

    Args:
        chains: K.
        weights: d, the number of weights of a chain.
        friction: a, of the sampler: a velocity is forgotten in 1/a steps.

    Attributes:
        rates: The learning rate of each chain, (K,).
        steps: The number of steps over which a chain's rate may rise; set it before the first.
        taken: The steps of each chain so far.

    Example:
        >>> sizes = StepSizes(chains=2, weights=10_000, friction=0.1)
        >>> sizes.steps = 2000
        >>> noise = torch.tensor([0.001, 0.01])     # a world in which the excess is as it should be
        >>> for _ in range(2000):
        ...     windows, lost = sizes.update(noise, 1 + 50_000 * noise * sizes.rates, 1.0, 10_000)
        >>> [round(rate, 4) for rate in sizes.rates.tolist()], sizes.adapting
        ([0.001, 0.0001], False)
    """

    def __init__(self, chains: int, weights: int, friction: float) -> None:
        self.steps = 0
        self.weights = weights
        self.friction = friction
        self.taken = [0] * chains
        self.rates = torch.zeros(chains, dtype=torch.float64)
        # sums over the window
        self._noise, self._pairs, self._excess = torch.zeros_like(self.rates.expand(3, -1))
        # what the formula is multiplied by: for the heat that it does not explain, and after a loss
        self._trust, self._caution = torch.ones(2, chains, dtype=torch.float64)
        self._count = torch.zeros(chains, dtype=torch.int64)  # readings; negative: not yet read

    @property
    def adapting(self) -> bool:
        """Whether the rate of a chain may still rise."""
        return min(self.taken) < self.steps

    def begins(self, active: Sequence[bool]) -> bool:
        """Whether a chain that takes the next step gets its first rate by it."""
        return any(moves and t == _GUESS - 1 for t, moves in zip(self.taken, active, strict=True))

    def compares(self, chain: int) -> tuple[bool, bool]:
        """Whether a chain's next gradient is to be kept, and whether it is to be compared."""
        place = self.taken[chain] % _PAIR
        return place == 0, place == 1

    def goal(self, num_data: float) -> float:
        """g, the excess that is aimed at, as a share of T."""
        return min(_EXCESS, max(1e-3, 0.1 * num_data / self.weights))

    def window(self, goal: float) -> int:
        """The steps of a window: as many as its mean needs to be precise, but four of them fit.

        A reading has the variance 2/d, and readings 1/(2a) steps apart are nearly independent.
        """
        precise = 2 / (self.weights * (goal / 6) ** 2) / (2 * self.friction)
        return math.ceil(max(5 / self.friction, min(precise, self.steps / 4 - self._skip)))

    @property
    def _skip(self) -> int:
        """The steps after a change until velocities are of the rate as it is."""
        return math.ceil(2 / self.friction)

    def update(
        self,
        noise: Tensor,
        readings: Tensor,
        temperature: float,
        num_data: float,
        active: Sequence[bool] | None = None,
        squares: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Look at a step of every chain, and set the rates of the next.

        Args:
            noise: Half of the mean square of the difference of two gradients, (K,), of chains whose
                gradient was to be compared.
            readings: The kinetic temperature of each chain over T, (K,).
            temperature: T.
            num_data: N.
            active: Which chains took the step; all by default.
            squares: The mean square of each chain's weights, (K,), for its first rate.

        Returns:
            Which chains begin a new window, and which of them because they were lost, (K,) both.
        """
        state, device = vars(self), noise.device
        state |= {k: v.to(device) for k, v in state.items() if isinstance(v, Tensor)}
        moves = [True] * len(self.taken) if active is None else list(active)

        def mask(*chosen: bool) -> Tensor:
            return torch.tensor(chosen, device=device)

        compared = mask(*(m and self.compares(k)[1] for k, m in enumerate(moves)))
        self.taken = [steps + moved for steps, moved in zip(self.taken, moves, strict=True)]
        reading = mask(*(m and t > _GUESS for t, m in zip(self.taken, moves, strict=True)))
        first = mask(*(m and t == _GUESS for t, m in zip(self.taken, moves, strict=True)))
        rising = mask(*(t <= self.steps for t in self.taken))

        self._noise = torch.where(compared, self._noise + noise.double(), self._noise)
        self._pairs = self._pairs + compared
        now = readings.double() - 1
        lost = reading & ~(now < max(_LOST, _CHANCE * math.sqrt(2 / self.weights)))
        self._count = torch.where(first, -self._skip, self._count + reading)
        self._excess = torch.where(reading & (self._count > 0), self._excess + now, self._excess)
        goal = self.goal(num_data)
        full = reading & (self._count >= self.window(goal)) & ~lost

        readings_taken = self._count.clamp(min=1)
        excess = self._excess / readings_taken
        error = 2 * (2 / (self.weights * 2 * self.friction * readings_taken)).sqrt()
        limit = torch.where(rising, _HIGH * goal, _HELD * goal)
        precise = error < goal  # else it would say little but chance
        hot = precise & (excess - error > limit)
        cold = precise & rising & (excess + error < _LOW * goal)
        by_heat = goal / excess.clamp(min=goal / 4)
        by_heat = torch.where(hot, by_heat.clamp(min=0.25), torch.where(cold, by_heat, 1.0))
        self._trust = torch.where(full, self._trust * by_heat, self._trust)
        risk = torch.where(full & ~hot, (4 * self._caution).clamp(max=1), self._caution)
        self._caution = torch.where(lost, self._caution / 4, risk)
        # N η v/2a = g T, v the variance of a coordinate of the gradient
        variance = (self._noise / self._pairs.clamp(min=1)).clamp(min=1e-30)
        formula = 2 * self.friction * goal * temperature / (num_data * variance)
        formula = formula * self._trust * self._caution
        known = self._pairs > 0
        bounded = torch.minimum(torch.maximum(formula, self.rates / 4), self.rates * 4)
        risen = torch.where(known, bounded, self.rates * by_heat)
        too_large = hot | (known & (self.rates > _HELD * formula))
        held = torch.where(too_large, torch.minimum(risen, self.rates), self.rates)
        self.rates = torch.where(full, torch.where(rising, risen, held), self.rates)
        if squares is not None:  # where there is no noise, the formula knows no bound
            size = squares.double().clamp(min=_SMALL**2)
            formula = torch.minimum(formula, _MOVE**2 * size * num_data / temperature)
        self.rates = torch.where(first, formula, torch.where(lost, self.rates / 4, self.rates))

        begins = first | full | lost
        self._count = torch.where(full | lost, -self._skip, self._count)
        for name in ("_excess", "_noise", "_pairs"):
            state[name] = torch.where(begins, 0.0, state[name])
        return begins, lost

    def state_dict(self) -> dict[str, Any]:
        """All that the next decision depends on."""
        return {**vars(self), "taken": list(self.taken)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where the saved chains were."""
        vars(self).update({**state_dict, "taken": list(state_dict["taken"])})
