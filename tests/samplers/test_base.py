"""What every sampler must do: one contract, driven for each of them."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.samplers import BAOA, HMC, PSGLD, SGHMC, SGLD, SGNHT, Cyclical, Sampler
from tests.contract.cases import SAMPLERS as CONTRACT

SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "SGLD": SGLD,
    "PSGLD": PSGLD,
    "PSGLD-frozen": partial(PSGLD, freeze_after=4),
    "PSGLD-gamma": partial(PSGLD, gamma=True, damping=0.1),
    "SGHMC": SGHMC,
    "SGNHT": SGNHT,
    "BAOA": BAOA,
}
SAMPLERS |= {name: make for name, make in CONTRACT.items() if name not in SAMPLERS}  # toys
each_sampler = pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)


def energy(weights: list[Tensor]) -> Tensor:
    """Not quadratic, and elementwise, so that stacking cannot change a bit."""
    return sum((0.5 * (w - 0.3) ** 2 + 0.1 * w**4).sum() for w in weights)


def closure_for(sampler: Sampler, weights: list[Tensor]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        sampler.zero_grad()
        loss = energy(weights)
        loss.backward()
        return loss

    return closure


def run(sampler: Sampler, weights: list[Tensor], steps: int, schedule: Any = None) -> None:
    closure = closure_for(sampler, weights)
    for _ in range(steps):
        sampler.step(closure)
        if schedule is not None:
            schedule.step()


def fresh(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(3, 4), (), (5,)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def grouped(make: Callable[..., Sampler], weights: list[Tensor], seed: int = 1) -> Sampler:
    groups = [
        {"params": weights[:2], "lr": 0.02, "temperature": 0.5},
        {"params": weights[2:]},
    ]
    return make(groups, lr=0.01, num_data=50, seed=seed)


@each_sampler
@pytest.mark.parametrize("way", ["state_dict", "pickle"])
def test_resume_is_exact(make: Callable[..., Sampler], way: str) -> None:
    weights = fresh()
    sampler = grouped(make, weights)
    schedule = Cyclical(sampler, cycle_length=5, exploration=0.4)
    run(sampler, weights, 7, schedule)

    if way == "state_dict":
        file = io.BytesIO()
        saved = (sampler.state_dict(), schedule.state_dict(), [w.detach() for w in weights])
        torch.save(saved, file)
        file.seek(0)
        state, schedule_state, values = torch.load(file, weights_only=True)
        others = [value.clone().requires_grad_() for value in values]
        other = grouped(make, others, seed=99)
        other_schedule = Cyclical(other, cycle_length=5, exploration=0.4)
        other.load_state_dict(state)
        other_schedule.load_state_dict(schedule_state)
    else:
        others, other = pickle.loads(pickle.dumps((weights, sampler)))
        other_schedule = Cyclical(other, cycle_length=5, exploration=0.4, last_epoch=6)
        assert other_schedule.last_epoch == schedule.last_epoch

    run(sampler, weights, 9, schedule)
    run(other, others, 9, other_schedule)
    for one, two in zip(weights, others, strict=True):
        assert torch.equal(one, two)


def test_working_memory_is_made_once_and_never_saved() -> None:
    weights = [torch.zeros(10_000, requires_grad=True)]
    sampler = PSGLD(weights, lr=0.01, num_data=50, seed=1)
    run(sampler, weights, 1)
    kept = [flat.data_ptr() for flat, _ in sampler._scratch.values()]
    run(sampler, weights, 1)
    assert kept == [flat.data_ptr() for flat, _ in sampler._scratch.values()] != []
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    assert len(file.getvalue()) < 4 * 10_000 * 2  # the metric, and a little
    assert not pickle.loads(pickle.dumps(sampler))._scratch


@each_sampler
def test_stacked_chains_are_the_single_ones(make: Callable[..., Sampler]) -> None:
    seeds = [11, 5, 8]
    starts = [[w.detach() + chain for w in fresh()] for chain in range(3)]
    stacked = [torch.stack(tensors).requires_grad_() for tensors in zip(*starts, strict=True)]
    run(make(stacked, lr=0.01, num_data=50, seed=seeds), stacked, 6)
    for chain, seed in enumerate(seeds):
        single = [start.clone().requires_grad_() for start in starts[chain]]
        run(make(single, lr=0.01, num_data=50, seed=seed), single, 6)
        for one, many in zip(single, stacked, strict=True):
            assert torch.equal(one, many[chain])


@each_sampler
def test_seeds_decide(make: Callable[..., Sampler]) -> None:
    def end(seed: int | None) -> Tensor:
        weights = fresh()
        run(make(weights, lr=0.01, num_data=50, seed=seed), weights, 3)
        return weights[0].detach()

    assert torch.equal(end(1), end(1))
    assert not torch.equal(end(1), end(2))
    torch.manual_seed(3)
    first = end(None)
    torch.manual_seed(3)
    assert torch.equal(first, end(None))


@each_sampler
def test_no_noise_when_cold_or_exploring(make: Callable[..., Sampler]) -> None:
    def end(seed: int, temperature: float, explore: bool) -> Tensor:
        weights = fresh()
        sampler = make(weights, lr=0.01, num_data=50, seed=seed, temperature=temperature)
        sampler.param_groups[0]["explore"] = explore
        run(sampler, weights, 3)
        return weights[0].detach()

    assert torch.equal(end(1, 0.0, False), end(2, 0.0, False))
    assert torch.equal(end(1, 0.0, False), end(2, 1.0, True))
    assert not torch.equal(end(1, 1.0, False), end(1, 0.0, False))


@each_sampler
def test_weights_without_a_gradient_stay(make: Callable[..., Sampler]) -> None:
    weights = fresh()
    idle = torch.ones(2, requires_grad=True)
    sampler = make([*weights, idle], lr=0.01, num_data=50, seed=1)
    run(sampler, weights, 3)
    assert torch.equal(idle, torch.ones(2))
    assert not sampler.state[idle]


@each_sampler
def test_closure_gives_the_loss_of_the_start(make: Callable[..., Sampler]) -> None:
    weights = fresh()
    sampler = make(weights, lr=0.01, num_data=50, seed=1)
    expected = energy(weights).detach()
    assert torch.equal(sampler.step(closure_for(sampler, weights)), expected)


@each_sampler
def test_an_ordinary_scheduler_and_float64(make: Callable[..., Sampler]) -> None:
    weights = fresh(torch.float64)
    sampler = make(weights, lr=0.01, num_data=50, seed=1)
    run(sampler, weights, 3, ExponentialLR(sampler, 0.5))
    assert sampler.param_groups[0]["lr"] == pytest.approx(0.01 / 8)
    assert all(bool(w.isfinite().all()) for w in weights)


@pytest.mark.parametrize("name", ["SGLD", "SGHMC", "SGNHT", "BAOA"])
def test_measured_temperature(name: str) -> None:
    """On a Gaussian target at T = 2, one reading for each chain.

    Readings over 20000 weights have a standard error of 1 %, their mean less: 5 % are five and
    more of them.
    """
    weights = [torch.randn(2, 20_000).mul_((2 / 50) ** 0.5).requires_grad_()]
    make = SAMPLERS[name]
    sampler = make(weights, lr=1e-3, num_data=50, temperature=2.0, seed=[1, 2])

    def closure() -> None:
        sampler.zero_grad()
        (0.5 * weights[0] ** 2).sum().backward()

    for _ in range(60):
        sampler.step(closure)
    assert sampler.measured_temperature is None
    sampler.measure = True
    readings = []
    for _ in range(10):
        sampler.step(closure)
        assert sampler.measured_temperature is not None
        readings.append(sampler.measured_temperature)
    assert readings[0].shape == (2,)
    assert torch.stack(readings).mean(0).tolist() == pytest.approx([2.0, 2.0], rel=0.05)


@pytest.mark.parametrize(
    ("general", "limit"),
    [(partial(SGHMC, friction=1.0), SGLD), (partial(SGNHT, coupling=0.0), SGHMC)],
    ids=["SGHMC with full friction", "SGNHT without coupling"],
)
def test_limiting_cases(general: Callable[..., Sampler], limit: Callable[..., Sampler]) -> None:
    ends = [fresh(torch.float64), fresh(torch.float64)]
    for make, weights in zip((general, limit), ends, strict=True):
        run(make(weights, lr=0.1, num_data=40, seed=3), weights, 5)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-14)


def test_numpy_numbers_are_stored_as_plain_ones() -> None:
    weights = fresh()
    sampler = SGLD(weights, lr=np.float64(0.1), num_data=np.int64(50), temperature=np.float32(1.0))
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["num_data"] == 50


def test_saved_n_wins_as_the_saved_lr_does() -> None:
    weights = fresh()
    state = SGLD(weights, lr=0.1, num_data=50, seed=1).state_dict()
    sampler = SGLD(weights, lr=0.2, num_data=60, seed=2)
    sampler.load_state_dict(state)
    assert (sampler.num_data, sampler.param_groups[0]["lr"]) == (50, 0.1)


@pytest.mark.parametrize(
    ("make", "options", "word"),
    [
        (SGLD, {"lr": 0.0}, "lr="),
        (SGLD, {"lr": math.nan}, "nan"),
        (SGLD, {"lr": "fast"}, "fast"),
        (SGLD, {"temperature": -0.1}, "temperature="),
        (SGLD, {"num_data": None}, "num_data="),
        (SGLD, {"num_data": 0}, "num_data="),
        (SGLD, {"seed": [1, 1]}, "share their noise"),
        (SGLD, {"seed": [1, 2]}, r"leading axis .* \(3, 4\)"),
        (PSGLD, {"decay": 1.0}, "decay="),
        (PSGLD, {"decay": -0.1}, "decay="),
        (PSGLD, {"damping": 0.0}, "damping="),
        (PSGLD, {"freeze_after": 0}, "freeze_after="),
        (SGHMC, {"friction": 0.0}, "friction="),
        (SGHMC, {"friction": 1.1}, "friction= is above 0 and at most 1; got 1.1"),
        (SGNHT, {"friction": 2}, "friction="),
        (SGNHT, {"coupling": -1}, "coupling="),
        (BAOA, {"friction": 0.0}, "friction="),
        (HMC, {"leapfrog_steps": 0}, "leapfrog_steps= .*got 0"),
        (HMC, {"adapt_steps": 2.5}, "adapt_steps= .*got 2.5"),
        (HMC, {"target_acceptance": 1.0}, "target_acceptance= between 0 and 1.* got 1.0"),
        (HMC, {"jitter": math.nan}, "jitter= is a number of at least 0; got nan"),
        (HMC, {"temperature": 0.0}, r"one temperature= above 0 .* got \[0.0\]"),
    ],
)
def test_bad_options(make: Callable[..., Sampler], options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        make(fresh(), **{"lr": 0.01, "num_data": 50, **options})


def test_bad_options_of_a_group() -> None:
    weights = fresh()
    with pytest.raises(ConfigurationError, match="lr="):
        SGLD([{"params": weights, "lr": -1.0}], lr=0.01, num_data=50)
    with pytest.raises(ConfigurationError, match=r"got \[0.5, 1.0\]"):
        grouped(HMC, weights)
    with pytest.raises(ConfigurationError, match="complex64"):
        SGLD([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], lr=0.1, num_data=5)


def test_bad_states() -> None:
    weights = fresh()
    sampler = SGLD(weights, lr=0.1, num_data=5, seed=1)
    with pytest.raises(ConfigurationError, match="another optimizer"):
        sampler.load_state_dict(torch.optim.SGD(weights, lr=0.1).state_dict())
    many = SGLD([torch.zeros(2, 3, requires_grad=True)], lr=0.1, num_data=5, seed=[1, 2])
    with pytest.raises(ConfigurationError, match="has 1 chains, this SGLD 2"):
        many.load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("sampler", [SGHMC, SGNHT, BAOA])
def test_velocities_follow_the_learning_rate(sampler: Any) -> None:
    """A schedule that falls to a thousandth within few steps leaves the temperature as it is.

    20,000 velocities: one reading has a standard error of 0.01, the bounds are eight of them.
    """
    weight = torch.zeros(20_000, dtype=torch.float64, requires_grad=True)
    chosen = sampler([weight], lr=1e-4, num_data=50, friction=0.05, seed=3)
    chosen.measure = True
    for step in range(120):
        weight.grad = torch.zeros_like(weight)
        if step >= 100:
            chosen.param_groups[0]["lr"] *= 0.7
        chosen.step()
        if step >= 99:
            assert 0.92 < float(chosen.measured_temperature) < 1.08, step


def test_a_learning_rate_of_zero_and_back() -> None:
    weight = torch.ones(3, requires_grad=True)
    sampler = SGHMC([weight], lr=0.1, num_data=10, seed=0)
    sampler.measure = True
    for rate in (0.1, 0.0, 0.1):
        sampler.param_groups[0]["lr"] = rate
        weight.grad = torch.ones(3)
        sampler.step()
    assert weight.isfinite().all()
    assert float(sampler.measured_temperature) > 0
