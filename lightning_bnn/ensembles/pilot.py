r"""The noise of targets from a pilot, which is the first part of a fit.

Randomised MAP moves targets by noise of the likelihood's size, which has to be known. Where it is
not (``Gaussian(learn=True)``), each member finds it for itself, in two fifths of the steps:

1. A fifth of the examples, chosen by member and example, do not count. On the others the member
   is trained as any member of an ensemble, with its own learned noise.
2. The residuals of the fifth, as they pass in the batches, have the mean square
   :math:`\sigma_m^2` plus what the network gets wrong. Of five parts of the pilot the lowest mean
   square counts, so that a member which begins to overfit does not spoil it.
3. :math:`\sigma_m` is held: the noise of its targets, and the scale of its likelihood. The member
   goes on from where it is, with all examples, and its optimizer and schedule begin anew.

No validation data are needed, all examples count in the end, and a member finds alone what it finds
beside others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.mixtures import full_precision
from lightning_bnn.random.hashing import stream_seeds, uniforms

__all__ = ["HELD_OUT", "NoisePilot", "held_out", "pilot_steps"]

_STREAM = 4
HELD_OUT = 0.2  # the share of the examples
_OF_FIT, _UNKNOWN = 0.4, 1000  # by rows cut from training data: a quarter finds too much noise
_PARTS = 5


def pilot_steps(total: float) -> int:
    """The steps of the pilot of a fit: two fifths, or 1,000 where its length is not known.

    Example:
        >>> pilot_steps(400), pilot_steps(math.inf)
        (160, 1000)
    """
    return _UNKNOWN if math.isinf(total) else max(1, round(_OF_FIT * total))


def held_out(seeds: Tensor, indices: Tensor) -> Tensor:
    """Which examples do not count in each member's pilot, (M, B).

    Args:
        seeds: One seed for each member, (M,) int64.
        indices: The examples' indices in the data set: (B,) for all members, or (M, B).

    Example:
        >>> held_out(torch.tensor([1, 2]), torch.arange(10_000)).double().mean(1).round(decimals=1)
        tensor([0.2000, 0.2000], dtype=torch.float64)
    """
    return uniforms(stream_seeds(seeds, _STREAM), indices)[..., 0] < HELD_OUT


class NoisePilot:
    """The residuals of each member on what is held out, and the noise that was found by them.

    Args:
        members: M.
        scales: D, the number of scales of the likelihood: 1, or one for each output.

    Attributes:
        steps: How long it takes; 0 before it is known.
        noise: The noise that was found, (M, D); None before.

    Example:
        >>> pilot = NoisePilot(members=1, scales=1)
        >>> pilot.steps = 2
        >>> for step, residual in enumerate((2.0, 0.5)):
        ...     pilot.add(slice(0, 1), torch.full((1, 8, 1), residual), torch.ones(1, 8).bool())
        ...     pilot.end_step(step)
        >>> pilot.end()
        tensor([[0.5000]], dtype=torch.float64)
    """

    def __init__(self, members: int, scales: int) -> None:
        self.steps = 0
        self.noise: Tensor | None = None
        # the sum of squared residuals by scale, and how many they are, in each part
        self._sums = torch.zeros(_PARTS, members, scales + 1, dtype=torch.float64)
        self._fresh = torch.zeros_like(self._sums[0])

    @property
    def running(self) -> bool:
        """Whether the noise is still to be found."""
        return self.noise is None

    def add(self, rows: slice, residuals: Tensor, held: Tensor) -> None:
        """Add the residuals of a batch.

        Args:
            rows: The members.
            residuals: Targets less outputs, (rows, B, D), or (rows, B, ...) for one scale.
            held: Which examples are held out, (rows, B).
        """
        squares = full_precision(residuals).square()
        self._fresh = self._fresh.to(squares)  # no step waits for its device
        scales = self._sums.shape[-1] - 1
        inner = squares.flatten(2) if squares.dim() > 2 else squares[..., None]
        if scales > 1:  # the last axis is that of the outputs
            inner = inner.unflatten(2, (-1, scales)).mean(2)
        else:
            inner = inner.mean(2, keepdim=True)
        self._fresh[rows, :-1] += torch.where(held[..., None], inner, 0.0).sum(1)
        self._fresh[rows, -1] += held.sum(1)

    def end_step(self, step: int, reduce: Callable[[Tensor], Tensor] = lambda sums: sums) -> None:
        """Count what was added in a step to its part of the pilot.

        Args:
            step: The step, from 0.
            reduce: Sums over processes.
        """
        part = min(_PARTS - 1, step * _PARTS // max(1, self.steps))
        self._sums = self._sums.to(self._fresh)
        self._sums[part] += reduce(self._fresh)
        self._fresh = torch.zeros_like(self._fresh)

    def end(self) -> Tensor:
        """The lowest root mean square of any part, (M, D); infinite where nothing was held out."""
        sums = self._sums.cpu().double()
        means = sums[..., :-1] / sums[..., -1:]
        return means.nan_to_num(math.inf, math.inf).amin(0).sqrt()

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the fit depends on."""
        return {
            "steps": self.steps,
            "noise": self.noise,
            "sums": self._sums.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where the saved pilot was."""
        self.steps, self.noise = state["steps"], state["noise"]
        self._sums = state["sums"].cpu().clone()
