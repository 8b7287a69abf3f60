"""SGNHT: the rule with its thermostat, for each chain and group, and when it is held."""

from __future__ import annotations

import pytest
import torch

from lightning_bnn.samplers import SGNHT, Cyclical


def test_the_rule_for_each_chain_and_group() -> None:
    """Two chains, two groups with their own rate and temperature, in float64."""
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    weights = [randn(2, 3, 2).requires_grad_(), randn(2, 4).requires_grad_()]
    groups = [{"params": [weights[0]], "lr": 0.2, "temperature": 3.0}, {"params": [weights[1]]}]
    options = {"friction": 0.3, "coupling": 0.05}
    sampler = SGNHT(groups, lr=0.1, num_data=40, temperature=2.0, seed=[1, 2], **options)
    sampler.measure = True
    friction = torch.full((2,), 0.3, dtype=torch.float64)
    state = [[w.detach().clone(), torch.zeros_like(w), friction] for w in weights]
    for _ in range(4):
        noises = [randn(*w.shape) for w in weights]
        sampler.noise = lambda group, w, key="noise", noises=noises: [
            noises[0 if w[0] is weights[0] else 1]
        ]
        gradients = [randn(*w.shape) for w in weights]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        sampler.step()
        heat, total = torch.zeros(2), 0
        for index, (rate, temperature) in enumerate(((0.2, 3.0), (0.1, 2.0))):
            w, v, s = state[index]
            kept = (1 - s).reshape(2, *[1] * (w.dim() - 1))
            scale = (2 * 0.3 * rate * temperature / 40) ** 0.5
            v = kept * v - rate * gradients[index] + scale * noises[index]
            w = w + v
            size = w[0].numel()
            squares = v.square().reshape(2, -1).sum(1)
            s = s + 0.05 * ((1 - s / 2) * 40 * squares / (rate * temperature * size) - 1)
            state[index] = [w, v, s]
            heat, total = heat + (1 - s / 2) * 40 * squares / rate, total + size
            torch.testing.assert_close(weights[index].detach(), w, rtol=0, atol=1e-12)
            thermostat = sampler.param_groups[index]["thermostat"]
            torch.testing.assert_close(thermostat, s, rtol=0, atol=1e-12)
        torch.testing.assert_close(sampler.measured_temperature, heat / total)


def test_the_thermostat_is_held_when_cold_or_exploring() -> None:
    weight = torch.ones(5, requires_grad=True)
    sampler = SGNHT([weight], lr=0.1, num_data=40, temperature=0.0, seed=3)
    weight.grad = torch.ones(5)
    sampler.step()
    assert sampler.param_groups[0]["thermostat"].item() == pytest.approx(0.1)

    sampler = SGNHT([weight], lr=0.1, num_data=40, seed=3)
    schedule = Cyclical(sampler, cycle_length=4)
    moved = []
    for _ in range(4):
        sampler.step()
        schedule.step()
        moved.append(sampler.param_groups[0]["thermostat"].item() != pytest.approx(0.1))
    assert moved == [False, False, True, True]


def test_a_saved_state_does_not_move_on() -> None:
    weight = torch.ones(5, requires_grad=True)
    weight.grad = torch.ones(5)
    sampler = SGNHT([weight], lr=0.1, num_data=40, seed=3)
    sampler.step()
    state = sampler.state_dict()
    before = state["param_groups"][0]["thermostat"].clone()
    sampler.step()
    assert torch.equal(state["param_groups"][0]["thermostat"], before)


def test_half_precision_keeps_a_finer_thermostat() -> None:
    weight = torch.ones(5, dtype=torch.bfloat16, requires_grad=True)
    weight.grad = torch.ones(5, dtype=torch.bfloat16)
    sampler = SGNHT([weight], lr=0.1, num_data=40, seed=3)
    sampler.step()
    assert sampler.param_groups[0]["thermostat"].dtype == torch.float32
