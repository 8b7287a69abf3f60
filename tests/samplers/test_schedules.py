"""Schedules: their formulas, the flags that samplers and collectors read, and resume."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.samplers import SGLD, Cyclical, Polynomial


def sampler() -> SGLD:
    first, second = torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)
    return SGLD([{"params": [first], "lr": 0.4}, {"params": [second]}], lr=0.1, num_data=10, seed=0)


def rates(optimizer: SGLD, schedule: Any, steps: int) -> list[list[float]]:
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return seen


def test_polynomial_is_its_formula() -> None:
    optimizer = sampler()
    seen = rates(optimizer, Polynomial(optimizer, offset=3.0, power=0.7), 6)
    for step, pair in enumerate(seen):
        assert pair == pytest.approx([rate * (3 + step) ** -0.7 for rate in (0.4, 0.1)], rel=1e-14)


def test_cyclical_is_its_formula() -> None:
    optimizer = sampler()
    seen = rates(optimizer, Cyclical(optimizer, cycle_length=5), 12)
    for step, pair in enumerate(seen):
        factor = (math.cos(math.pi * (step % 5) / 5) + 1) / 2
        assert pair == pytest.approx([0.4 * factor, 0.1 * factor], rel=1e-14)
        assert min(pair) > 0


@pytest.mark.parametrize(("length", "share", "count"), [(5, 0.4, 2), (100, 0.07, 7), (1, 0.0, 0)])
def test_cyclical_tells_who_explores(length: int, share: float, count: int) -> None:
    optimizer = sampler()
    schedule = Cyclical(optimizer, cycle_length=length, exploration=share)
    for step in range(2 * length + 1):
        explores = step % length < count
        assert [group["explore"] for group in optimizer.param_groups] == [explores] * 2
        assert schedule.samples_at(step) is not explores
        assert schedule.ends_cycle(step) is (step % length == length - 1)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    "make", [lambda o: Polynomial(o, offset=2.0), lambda o: Cyclical(o, 5)], ids=["poly", "cycle"]
)
@pytest.mark.parametrize("optimizer_first", [True, False])
def test_resume(make: Any, optimizer_first: bool) -> None:
    optimizer = sampler()
    schedule = make(optimizer)
    rates(optimizer, schedule, 7)
    file = io.BytesIO()
    torch.save([optimizer.state_dict(), schedule.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = sampler()
    other_schedule = make(other)
    parts = [other, other_schedule]
    order = (0, 1) if optimizer_first else (1, 0)
    for index in order:
        parts[index].load_state_dict(saved[index])
    explores = [group["explore"] for group in optimizer.param_groups]
    assert [group["explore"] for group in other.param_groups] == explores
    assert rates(other, other_schedule, 6) == rates(optimizer, schedule, 6)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda o: Polynomial(o, offset=0.0), "offset="),
        (lambda o: Polynomial(o, power=-1.0), "power="),
        (lambda o: Cyclical(o, 2.5), "cycle_length="),
        (lambda o: Cyclical(o, 10, exploration=-0.1), "exploration="),
        (lambda o: Cyclical(o, 10, exploration=0.97), "no step that samples"),
    ],
)
def test_bad_options(make: Any, word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        make(sampler())
