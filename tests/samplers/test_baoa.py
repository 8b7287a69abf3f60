"""BAOA: the rule, and that its weights are those of BAOAB."""

from __future__ import annotations

import math

import torch

from lightning_bnn.samplers import BAOA

RATE, N, FRICTION, T = 0.1, 40, 0.3, 2.0
KEPT = math.exp(-FRICTION)
SCALE = math.sqrt((1 - math.exp(-2 * FRICTION)) * RATE * T / N)


def gradient(w: torch.Tensor) -> torch.Tensor:
    return torch.sin(2 * w) + 0.5 * w


def test_the_rule_and_baoab() -> None:
    start = torch.tensor([1.0, -2.0], dtype=torch.float64)
    weight = start.clone().requires_grad_()
    sampler = BAOA([weight], lr=RATE, num_data=N, friction=FRICTION, temperature=T)
    w, v = start.clone(), torch.zeros(2, dtype=torch.float64)
    # BAOAB from the velocity that half a kick makes zero
    x, p = start.clone(), -RATE / 2 * gradient(start)
    for noise in torch.randn(4, 2, dtype=torch.float64):
        sampler.noise = lambda group, weights, key="noise", noise=noise: [noise]
        weight.grad = gradient(weight.detach())
        sampler.step()
        v = v - RATE * gradient(w)
        w = w + v / 2
        v = KEPT * v + SCALE * noise
        w = w + v / 2
        torch.testing.assert_close(weight.detach(), w, rtol=0, atol=1e-14)
        torch.testing.assert_close(sampler.state[weight]["velocity"], v, rtol=0, atol=1e-14)
        p = p - RATE / 2 * gradient(x)
        x = x + p / 2
        p = KEPT * p + SCALE * noise
        x = x + p / 2
        p = p - RATE / 2 * gradient(x)
        torch.testing.assert_close(weight.detach(), x, rtol=0, atol=1e-14)
