"""SGHMC: the rule, and its readings."""

from __future__ import annotations

import torch

from lightning_bnn.samplers import SGHMC


def test_the_rule() -> None:
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64, requires_grad=True)
    gradient = torch.tensor([0.5, 0.25], dtype=torch.float64)
    sampler = SGHMC([weight], lr=0.1, num_data=40, friction=0.3, temperature=2.0)
    sampler.measure = True
    w, v = weight.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for noise in torch.randn(3, 2, dtype=torch.float64):
        sampler.noise = lambda group, weights, key="noise", noise=noise: [noise]
        weight.grad = gradient.clone()
        sampler.step()
        v = 0.7 * v - 0.1 * gradient + (2 * 0.3 * 0.1 * 2.0 / 40) ** 0.5 * noise
        w = w + v
        torch.testing.assert_close(weight.detach(), w, rtol=0, atol=1e-15)
        reading = (1 - 0.3 / 2) * 40 * v.square().sum() / (0.1 * 2)
        torch.testing.assert_close(sampler.measured_temperature, reading.reshape(1))
