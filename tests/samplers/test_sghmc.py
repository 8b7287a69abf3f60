"""SGHMC: the rule, its limit SGLD, and its readings."""

from __future__ import annotations

import torch

from lightning_bnn.samplers import SGHMC, SGLD


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


def test_full_friction_is_sgld() -> None:
    ends = []
    for make in (SGLD, lambda *a, **k: SGHMC(*a, friction=1.0, **k)):
        weight = torch.ones(50, dtype=torch.float64, requires_grad=True)
        sampler = make([weight], lr=0.1, num_data=40, seed=3)
        for _ in range(5):
            weight.grad = weight.detach().clone()
            sampler.step()
        ends.append(weight.detach())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-14)
