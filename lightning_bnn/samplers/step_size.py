r"""A learning rate for each chain, found by the temperature that the chain shows.

The noise of minibatch gradients heats a chain with momenta above T by about the share
:math:`N \eta v / (2 a T)`, where v is the variance of a coordinate of the minibatch gradient and a
the friction, and a step that is too long for the curvature heats it, too. So the largest rate that
can be trusted is one at which the kinetic temperature is a little above T: by the share

.. math:: g = \min(5\,\%, \tfrac{N}{10 d})

of it. The heat goes where the data determine the weights, in at most N of d directions, so that the
mean over many more weights than examples has to be nearer to T for those to be not too hot.

1. The first gradients of a chain give the rate at which their noise alone would heat it by g.
2. Over windows of steps the mean kinetic temperature is read, and the rate is multiplied by the
   ratio of g to the excess (by at most 4, at least 1/4), or left alone between 0.6 g and 1.4 g. A
   chain that heats up to 1.5 T within a window goes back to where the window began, with a quarter
   of the rate.
3. After ``steps`` steps the rate is held. It is lowered, never raised, if a window reads more than
   1.6 g above T: the noise of gradients may grow while a chain finds its place.

Everything is counted and decided by chain, so that a chain moves as it would alone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["StepSizes"]

_EXCESS = 0.05
_LOW, _HIGH, _HELD = 0.6, 1.4, 1.6  # of the excess that is aimed at
_LOST = 0.5  # the excess at which a window is given up
_GUESS = 10  # gradients that the first rate is made of


class StepSizes:
    """The learning rates of chains, and how they are found.

    Args:
        chains: K.
        weights: d, the number of weights of a chain.
        friction: a, of the sampler: a velocity is forgotten in 1/a steps.

    Attributes:
        rates: The learning rate of each chain, (K,).
        steps: The number of steps over which a chain's rate may rise; set it before the first.

    Example:
        >>> sizes = StepSizes(chains=2, weights=10_000, friction=0.1)
        >>> sizes.steps = 2000
        >>> squares = torch.full((2,), 0.01)
        >>> for _ in range(2000):               # a world in which the excess is 10 times the rate
        ...     windows, lost = sizes.update(squares, 1 + 10 * sizes.rates, 1.0, 10_000)
        >>> [round(rate, 3) for rate in sizes.rates.tolist()], sizes.adapting
        ([0.005, 0.005], False)
    """

    def __init__(self, chains: int, weights: int, friction: float) -> None:
        self.steps = 0
        self.weights = weights
        self.friction = friction
        self.rates = torch.zeros(chains, dtype=torch.float64)
        self._squares = torch.zeros(chains, dtype=torch.float64)  # Σ of mean squared gradients
        self._total = torch.zeros(chains, dtype=torch.float64)  # Σ of the window's excesses
        self._count = torch.zeros(chains, dtype=torch.int64)  # of them; negative: not yet read
        self._taken = torch.zeros(chains, dtype=torch.int64)  # steps of each chain

    @property
    def adapting(self) -> bool:
        """Whether the rate of a chain may still rise."""
        return bool((self._taken < self.steps).any())

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
        squares: Tensor,
        readings: Tensor,
        temperature: float,
        num_data: float,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Look at a step of every chain, and set the rates of the next.

        Args:
            squares: The mean square of the coordinates of each chain's gradient, (K,).
            readings: The kinetic temperature of each chain over T, (K,).
            temperature: T.
            num_data: N.
            active: Which chains took the step, (K,); all by default.

        Returns:
            Which chains begin a new window, and which of them because they were lost, (K,) both.
        """
        state = vars(self)
        for name in ("rates", "_squares", "_total", "_count", "_taken"):
            state[name] = state[name].to(squares.device)
        if active is None:
            active = torch.ones_like(self.rates, dtype=torch.bool)
        goal = self.goal(num_data)
        guessing = active & (self._taken < _GUESS)
        reading = active & ~guessing
        self._taken = self._taken + active
        rising = self._taken <= self.steps
        self._squares = torch.where(guessing, self._squares + squares.double(), self._squares)
        # the noise of gradients heats by g where N η v/2a = g T
        noise = (self._squares / self._taken.clamp(min=1)).clamp(min=1e-30)
        guess = 2 * self.friction * goal * temperature / (num_data * noise)
        self.rates = torch.where(guessing, guess, self.rates)

        now = readings.double() - 1
        lost = reading & ~(now < _LOST)
        self._count = torch.where(guessing, -self._skip, self._count + reading)
        self._total = torch.where(reading & (self._count > 0), self._total + now, self._total)
        full = reading & (self._count >= self.window(goal))
        excess = self._total / self._count.clamp(min=1)
        fine = torch.where(
            rising, (excess > _LOW * goal) & (excess < _HIGH * goal), excess < _HELD * goal
        )
        factor = (goal / excess.clamp(min=goal / 4)).clamp(min=0.25)
        factor = torch.where(lost, 0.25, torch.where(full & ~fine, factor, 1.0))
        self.rates = self.rates * factor
        begins = lost | full | (active & (self._taken == _GUESS))
        self._count = torch.where(lost | full, -self._skip, self._count)
        self._total = torch.where(lost | full, 0.0, self._total)
        return begins, lost

    def state_dict(self) -> dict[str, Any]:
        """All that the next decision depends on."""
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume where the saved chains were."""
        vars(self).update(state_dict)
