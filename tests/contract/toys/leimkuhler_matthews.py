r"""Leimkuhler and Matthews' overdamped Langevin scheme.

.. math:: w \leftarrow w - \eta g + \sqrt{\tfrac{\eta T}{2N}}\,(\xi_n + \xi_{n+1})

The noise of each step is used twice, which makes averages of second order in η. (Leimkuhler and
Matthews, 2013, *Rational Construction of Stochastic Numerical Methods for Molecular Sampling*.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.samplers import Sampler


class LeimkuhlerMatthews(Sampler):
    """Overdamped Langevin dynamics with noise that is averaged over two steps."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        num_data: int | None = None,
        temperature: float = 1.0,
        seed: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr}, num_data, temperature, seed)

    def update(self, group: Any, weights: list[Tensor], gradients: list[Tensor]) -> None:
        scale = self.noise_scale(group, group["lr"] / 2)
        torch._foreach_add_(weights, gradients, alpha=-group["lr"])
        for weight, fresh in zip(weights, self.noise(group, weights), strict=True):
            state = self.state[weight]
            state.setdefault("noise", fresh.clone())
            weight.add_(state["noise"] + fresh, alpha=scale)
            state["noise"].copy_(fresh)


CONTRACT = "sampler", LeimkuhlerMatthews
