"""PSGLD: the rule, the metric's start and end, and Γ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.samplers import PSGLD

ALPHA, RATE, N, T, DAMPING = 0.8, 0.1, 40, 2.0, 0.05


def make(weights: list[Tensor], **options: Any) -> PSGLD:
    own = {"lr": RATE, "num_data": N, "temperature": T, "decay": ALPHA, "damping": DAMPING}
    return PSGLD(weights, **{**own, "seed": 1, **options})


def energy(weight: Tensor) -> Tensor:
    return (torch.cos(weight) + 0.4 * weight**2).sum()


def closure_for(sampler: PSGLD, weight: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        sampler.zero_grad()
        loss = energy(weight)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("gamma", [False, True])
def test_the_rule(gamma: bool) -> None:
    """In float64, with a diagonal Hessian −cos w + 0.8, so that its estimate has no noise."""
    start = torch.tensor([1.0, -2.0, 0.3], dtype=torch.float64)
    weight = start.clone().requires_grad_()
    sampler = make([weight], gamma=gamma)
    w, v, d = start.clone(), torch.zeros(3), torch.zeros(3)
    for step, noise in enumerate(torch.randn(5, 3, dtype=torch.float64), start=1):
        sampler.noise = lambda group, weights, key="noise", noise=noise: [noise.clone()]
        sampler.step(closure_for(sampler, weight))
        g, h = -torch.sin(w) + 0.8 * w, -torch.cos(w) + 0.8
        # the running means, written out as weights that sum to one
        v = (v * ALPHA * (1 - ALPHA ** (step - 1)) + (1 - ALPHA) * g**2) / (1 - ALPHA**step)
        d = (d * ALPHA * (1 - ALPHA ** (step - 1)) + (1 - ALPHA) * g * h) / (1 - ALPHA**step)
        metric = 1 / (DAMPING + v.sqrt())
        drift = metric * g + (T / N * d * metric**2 / v.sqrt() if gamma else 0)
        w = w - RATE * drift + (2 * RATE * T * metric / N).sqrt() * noise
        # the difference quotient is good to about δ = 1.5e-8
        tolerance = 1e-7 if gamma else 1e-12
        torch.testing.assert_close(weight.detach(), w, rtol=0, atol=tolerance)


def test_gamma_is_the_derivative_of_the_metric() -> None:
    """With no memory G is a function of the weights, and Γ what autograd says."""
    w = torch.tensor([1.0, -2.0, 0.3], dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(energy(w), w, create_graph=True)
    metric = 1 / (DAMPING + g.square().sqrt())
    (derivative,) = torch.autograd.grad(metric.sum(), w)
    weight = w.detach().clone().requires_grad_()
    sampler = make([weight], gamma=True, decay=0.0)
    noise = torch.ones(3, dtype=torch.float64)
    sampler.noise = lambda group, weights, key="noise": [noise.clone()]
    sampler.step(closure_for(sampler, weight))
    with torch.no_grad():
        expected = w - RATE * (metric * g - T / N * derivative)
        expected += (2 * RATE * T * metric / N).sqrt() * noise
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=1e-7)


def test_probes_estimate_the_diagonal_of_a_full_hessian() -> None:
    """D over many steps at lr → 0 is the mean of g_i H_ii; other entries average out.

    20000 independent chains of 3 weights: a standard error below 1 % of |g| |H|.
    """
    matrix = torch.tensor([[2.0, 0.7, -0.4], [0.7, 1.5, 0.3], [-0.4, 0.3, 1.0]])
    weights = torch.tensor([1.0, -1.0, 0.5]).repeat(20_000, 1).requires_grad_()
    sampler = make([weights], lr=1e-12, gamma=True, decay=0.0)

    def closure() -> None:
        weights.grad = weights.detach() @ matrix

    closure()
    expected = weights.grad[0] * matrix.diag()
    sampler.step(closure)
    slope = sampler.state[weights]["slope"].mean(0)
    torch.testing.assert_close(slope, expected, rtol=0, atol=0.03)


def test_the_probe_leaves_no_trace() -> None:
    weight = torch.randn(50).requires_grad_()
    before = weight.detach().clone()
    sampler = make([weight], gamma=True, temperature=0.0, lr=1e-30)
    seen, random = [], []

    def closure() -> Tensor:
        seen.append(weight.detach().clone())
        random.append(torch.rand(3))
        return closure_for(sampler, weight)()

    after_one = torch.Generator().manual_seed(7)
    torch.rand(3, generator=after_one)
    torch.manual_seed(7)
    sampler.step(closure)
    assert torch.equal(weight, before)
    assert torch.equal(weight.grad, torch.autograd.grad(energy(weight), weight)[0])
    assert len(seen) == 2
    assert bool((seen[0] != seen[1]).all())
    assert torch.equal(random[0], random[1])  # dropout sees the same numbers twice
    assert torch.equal(torch.rand(3), torch.rand(3, generator=after_one))


def test_weights_come_back_when_the_second_call_fails() -> None:
    weight = torch.randn(5).requires_grad_()
    before = weight.detach().clone()
    sampler = make([weight], gamma=True)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return closure_for(sampler, weight)()

    with pytest.raises(RuntimeError, match="out of memory"):
        sampler.step(closure)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("gamma", [False, True])
def test_the_metric_is_held(gamma: bool) -> None:
    weight = torch.randn(5).requires_grad_()
    sampler = make([weight], freeze_after=3, gamma=gamma)
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        return closure_for(sampler, weight)()

    squares = []
    for _ in range(6):
        sampler.step(closure)
        squares.append(sampler.state[weight]["square"].clone())
    assert not torch.equal(squares[1], squares[2])
    assert torch.equal(squares[2], squares[5])
    assert len(calls) == (9 if gamma else 6)
    sampler.step()  # Γ is zero now, so no closure is needed


def test_a_gradient_of_zero_is_harmless_and_gamma_needs_a_closure() -> None:
    weight = torch.zeros(2, requires_grad=True)
    sampler = make([weight], gamma=True)

    def closure() -> None:
        weight.grad = torch.zeros(2)

    sampler.step(closure)
    assert bool(weight.isfinite().all())
    with pytest.raises(ConfigurationError, match=r"step\(closure\)"):
        sampler.step()
