"""Flat weights by slices: their gradient, gathered by hand, is autograd's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bnn.flat import KeptMemory, energies_in_chunks, split_weights
from lightning_bnn.priors import BoundPrior, Laplace, Normal
from lightning_bnn.selection import FlatLayout

PRIORS: dict[str, Any] = {
    "one": Normal(0.0, 0.3),
    "by fan-in": Normal(0.0, 0.3, fan_in=True),
    "by name": {"*.bias": Normal(0.0, 2.0), "*": Normal(0.0, 0.5)},
    "not around 0": Normal(0.4, 0.3),
    "partly": {"*.bias": Laplace(0.0, 2.0), "*": Normal(0.0, 0.5)},
}


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("name", PRIORS)
def test_gradient_equals_autograds(name: str, unused: bool, leading: tuple[int, ...]) -> None:
    """In float64, each row by its own factor; also where one slice takes no part."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    own = dict(net.named_parameters())
    layout, prior = FlatLayout(own), BoundPrior(PRIORS[name], net, own)
    torch.manual_seed(0)
    flat = torch.randn(*leading, layout.size, dtype=torch.float64, requires_grad=True)
    factors = torch.rand(leading, dtype=torch.float64) + 0.5

    def value(weights: Any, energy: Any) -> Any:
        used = list(weights.values())[unused:]
        return sum((w.sin() * 3).sum() for w in used) + (factors * energy).sum()

    expected = torch.autograd.grad(value(layout.views(flat), prior.energy(flat)), flat)
    found = torch.autograd.grad(value(*split_weights(flat, layout, prior, KeptMemory())), flat)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 2.0**16])
def test_a_scale_saves_small_gradients_of_half_precision(factor: float) -> None:
    def run(rows: slice, weights: Tensor) -> Tensor:
        return (weights.half().float() * 1e-9).sum(1)

    for scale in (1.0, 2.0**16):
        weights = torch.ones(3, 2, requires_grad=True)
        (factor * energies_in_chunks(run, 2, KeptMemory(), weights, scale=scale).sum()).backward()
        expected = torch.full((3, 2), 1e-9 * factor if scale > 1 else 0.0)
        torch.testing.assert_close(weights.grad, expected, rtol=2e-3, atol=0)
