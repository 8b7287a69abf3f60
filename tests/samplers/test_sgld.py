"""SGLD: the rule."""

from __future__ import annotations

import torch

from lightning_bnn.samplers import SGLD


def test_the_rule() -> None:
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    weight.grad = torch.tensor([0.5, 0.25], dtype=torch.float64)
    noise = torch.tensor([0.3, -0.7], dtype=torch.float64)
    sampler = SGLD([weight], lr=0.1, num_data=40, temperature=2.0)
    sampler.noise = lambda group, weights, key="noise": [noise]
    expected = weight.detach() - 0.1 * weight.grad + (2 * 0.1 * 2.0 / 40) ** 0.5 * noise
    sampler.step()
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-15)
