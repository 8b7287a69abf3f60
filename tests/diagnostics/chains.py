"""Chains whose answer is known, and posteriors made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.signal import lfilter
from torch import Tensor, nn

from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import DrawsPosterior

BURN_IN = 200


def autoregressive(correlation: float, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """AR(1) series along axis 1 with standard normal margins."""
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=(shape[0], shape[1] + BURN_IN, *shape[2:]))
    noise *= np.sqrt(1 - correlation**2)
    return lfilter([1.0], [1.0, -correlation], noise, axis=1)[:, BURN_IN:]


def independent_draws(net: nn.Module, count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(p.shape, generator=generator) for name, p in net.named_parameters()}
        for _ in range(count)
    ]


def chained(
    net: nn.Module, likelihood: Likelihood, draws: Sequence[Any], chains: int
) -> DrawsPosterior:
    """Draw i is of chain i % chains."""
    return DrawsPosterior(net, likelihood, draws, chains=chains)


def interleave(*chains: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [draw for step in zip(*chains, strict=True) for draw in step]
