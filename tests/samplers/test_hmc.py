"""HMC as an optimizer: the rule, chains, resume, closures, errors. Truth is in tests/truth."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.errors import ConfigurationError, NonFiniteError
from lightning_bnn.random import NormalStream, member_seed
from lightning_bnn.samplers.hmc import HMC, DualAveraging, dual_averaging
from tests.trainers import quiet_trainer

COUNT = 20
PRECISION = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
SEEDS = [member_seed(4, chain) for chain in range(4)]


def mean_energy(weight: Tensor, bias: Tensor) -> Tensor:
    """Of weights (..., 2) and a bias (...), one energy for each set of them."""
    quadratic = 0.5 * torch.einsum("...i,ij,...j->...", weight, PRECISION, weight)
    return quadratic + 0.5 * (bias - weight[..., 0]) ** 2 + 0.1 * bias**4


def closure_of(sampler: HMC, weight: Tensor, bias: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        sampler.zero_grad()
        energies = mean_energy(weight, bias)
        energies.sum().backward()
        return energies

    return closure


def make(seeds: int | list[int], **options: Any) -> tuple[HMC, Tensor, Tensor]:
    """A sampler over two groups, with parameters that start at one."""
    shape = (len(seeds),) if isinstance(seeds, list) else ()
    weight = torch.ones((*shape, 2), dtype=torch.float64, requires_grad=True)
    bias = torch.ones(shape, dtype=torch.float64, requires_grad=True)
    groups = [{"params": [weight]}, {"params": [bias], "lr": 0.15}]
    defaults: dict[str, Any] = {
        "lr": 0.2, "num_data": COUNT, "leapfrog_steps": 4, "adapt_steps": 0, "seed": seeds
    }  # fmt: skip
    return HMC(groups, **{**defaults, **options}), weight, bias


@pytest.mark.parametrize("leapfrog_steps", [1, 3])
def test_a_transition_is_the_rule_of_the_docstring(leapfrog_steps: int) -> None:
    """With the same noise, by NumPy; T, N and η of each group in their places."""
    options = {"leapfrog_steps": leapfrog_steps, "temperature": 0.01, "jitter": 0.0, "lr": 0.02}
    sampler, weight, bias = make(7, **options)
    rates = np.array([0.02, 0.02, 0.15])
    noise = NormalStream(7).fill_(torch.empty(3, dtype=torch.float64)).numpy()
    where, velocity = np.ones(3), np.sqrt(rates * 0.01 / COUNT) * noise

    def energy(at: np.ndarray) -> float:
        return float(mean_energy(torch.tensor(at[:2]), torch.tensor(at[2])))

    def gradient(at: np.ndarray) -> np.ndarray:
        head = PRECISION.numpy() @ at[:2] - np.array([at[2] - at[0], 0.0])
        return np.array([*head, at[2] - at[0] + 0.4 * at[2] ** 3])

    start = energy(where) + (velocity**2 / (2 * rates)).sum()
    for _ in range(leapfrog_steps):
        velocity = velocity - rates / 2 * gradient(where)
        where = where + velocity
        velocity = velocity - rates / 2 * gradient(where)
    end = energy(where) + (velocity**2 / (2 * rates)).sum()
    sampler.step(closure_of(sampler, weight, bias))
    expected = min(1.0, math.exp((start - end) * COUNT / 0.01))
    assert abs(float(sampler.acceptance) - expected) < 1e-10
    assert expected == 1.0  # so the end is accepted
    assert np.abs(np.array([*weight.tolist(), bias.item()]) - where).max() < 1e-12


@pytest.mark.parametrize("lr", [0.2, None])
def test_stacked_chains_move_as_they_would_alone(lr: float | None) -> None:
    """Two groups, jitter, adaptation and the search for a first step included."""
    together, weights, biases = make(SEEDS, adapt_steps=10, lr=lr)
    alone = [make(seed, adapt_steps=10, lr=lr) for seed in SEEDS]
    rejected = 0
    for _ in range(25):
        before = weights.detach().clone()
        together.step(closure_of(together, weights, biases))
        same = (weights == before).all(1)
        assert torch.equal(same, (weights == before).any(1))  # put back to the bit, or moved
        rejected += int(same.sum())
        for each in alone:
            each[0].step(closure_of(*each))
    assert 0 < rejected < 100
    torch.testing.assert_close(weights, torch.stack([w for _, w, _ in alone]), rtol=0, atol=1e-10)
    torch.testing.assert_close(biases, torch.stack([b for _, _, b in alone]), rtol=0, atol=1e-10)
    scales = torch.cat([one.lr_scale for one, _, _ in alone])
    torch.testing.assert_close(together.lr_scale, scales, rtol=1e-9, atol=0)
    assert len(scales.unique()) == 4


@pytest.mark.parametrize("lr", [0.2, None])
@pytest.mark.parametrize("stop", [3, 8])
def test_resume_is_bit_exact(stop: int, lr: float | None) -> None:
    """In the middle of the adaptation and after it, from a rate that was given or found."""
    sampler, weight, bias = make(SEEDS, adapt_steps=6, lr=lr)
    closure = closure_of(sampler, weight, bias)
    for _ in range(stop):
        sampler.step(closure)
    sampler.divergences += 3
    file = io.BytesIO()
    torch.save([sampler.state_dict(), weight.detach(), bias.detach()], file)
    for _ in range(8):
        sampler.step(closure)

    file.seek(0)
    state, *parameters = torch.load(file, weights_only=True)
    other, *theirs = make([6, 7, 8, 9], adapt_steps=7, lr=lr)
    other.load_state_dict(state)
    with torch.no_grad():
        for one, saved in zip(theirs, parameters, strict=True):
            one.copy_(saved)
    assert other.adapting == (stop < 6)
    for _ in range(8):
        other.step(closure_of(other, *theirs))
    assert torch.equal(theirs[0], weight)
    assert torch.equal(theirs[1], bias)
    assert torch.equal(other.lr_scale, sampler.lr_scale)
    assert torch.equal(other.divergences, sampler.divergences)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e6])
def test_a_divergence_is_rejected_counted_and_leaves_the_others_alone(bad: float) -> None:
    """Chain 2 meets a bad energy, and a gradient that is NaN, wherever it goes."""

    def run(spoilt: bool) -> tuple[HMC, Tensor]:
        sampler, weights, biases = make(SEEDS)
        inner = closure_of(sampler, weights, biases)
        start = weights.detach()[2].clone()

        def closure() -> Tensor:
            energies = inner().detach().clone()
            if spoilt and not torch.equal(weights[2], start):
                energies[2] = bad
                weights.grad[2] = math.nan
            return energies

        for _ in range(10):
            sampler.step(closure)
        return sampler, weights.detach()

    (spoilt, weights), (_, expected) = run(True), run(False)
    assert torch.equal(weights[2], torch.ones(2, dtype=torch.float64))
    others = torch.tensor([0, 1, 3])
    assert torch.equal(weights[others], expected[others])
    assert spoilt.divergences.tolist() == [0, 0, 10, 0]
    assert spoilt.acceptance[2] == 0


def test_a_bad_energy_on_the_way_rejects_though_the_end_is_good() -> None:
    sampler, weight, bias = make(5)
    inner, calls = closure_of(sampler, weight, bias), []

    def closure() -> Tensor:
        calls.append(inner())
        return torch.tensor(math.nan) if len(calls) == 3 else calls[-1]

    sampler.step(closure)
    assert weight.tolist() == [1.0, 1.0]
    assert sampler.acceptance.tolist() == [0.0]
    assert sampler.divergences.tolist() == [1]


def test_divergences_of_the_adaptation_do_not_count() -> None:
    sampler, weight, bias = make(5, lr=1e6, adapt_steps=3)
    for _ in range(3):
        sampler.step(closure_of(sampler, weight, bias))
    assert sampler.acceptance.tolist() == [0.0]
    assert sampler.divergences.tolist() == [0]
    assert float(sampler.lr_scale) < 1


def test_closure_is_called_once_more_than_the_steps_and_its_first_value_returned() -> None:
    sampler, weight, bias = make(SEEDS, leapfrog_steps=6)
    values: list[Tensor] = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        values.append(closure_of(sampler, weight, bias)())
        return values[-1]

    assert sampler.step(closure) is values[0]
    assert len(values) == 7


def test_each_chain_follows_dual_averaging_and_then_holds_the_average() -> None:
    sampler, weight, bias = make(SEEDS, adapt_steps=8)
    state = DualAveraging(0, *torch.zeros(3, 4, dtype=torch.float64))
    for step in range(12):
        assert sampler.adapting == (step < 8)
        log_step = state.log_step if step < 8 else state.average
        assert torch.equal(sampler.lr_scale, (2 * log_step).exp())
        sampler.step(closure_of(sampler, weight, bias))
        if step < 8:
            state = dual_averaging(state, sampler.acceptance, 0.8)
    assert len(sampler.lr_scale.unique()) == 4
    assert not torch.equal(state.log_step, state.average)
    assert torch.equal(make(SEEDS)[0].lr_scale, torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("curvature", [1e-8, 1.0, 1e8])
def test_the_first_step_is_the_one_at_which_acceptance_crosses_four_fifths(
    curvature: float,
) -> None:
    """By NumPy, from the same momenta: h and the step before it lie on both sides.

    The mean energy is c·w²/2 and its leapfrog step is h² = η/N; whatever c is, h is found.
    """
    seeds = list(range(1, 9))
    weight = torch.full((8, 3), curvature**-0.5, dtype=torch.float64, requires_grad=True)
    sampler = HMC([weight], num_data=COUNT, adapt_steps=0, jitter=0.0, seed=seeds)

    def closure() -> Tensor:
        sampler.zero_grad()
        energies = 0.5 * curvature * weight.square().sum(1)
        energies.sum().backward()
        return energies

    begin = weight.detach().numpy().copy()
    streams = [NormalStream(seed) for seed in seeds]
    noise = [stream.fill_(torch.empty(3, dtype=torch.float64)) for stream in streams]
    momenta = torch.stack(noise).numpy()
    sampler.step(closure)

    def log_ratio(rate: np.ndarray) -> np.ndarray:
        rate = rate[:, None]
        velocity = np.sqrt(rate / COUNT) * momenta
        before = 0.5 * curvature * begin**2 + velocity**2 / (2 * rate)
        velocity = velocity - rate / 2 * curvature * begin
        end = begin + velocity
        velocity = velocity - rate / 2 * curvature * end
        after = 0.5 * curvature * end**2 + velocity**2 / (2 * rate)
        return COUNT * (before - after).sum(1)

    found, bar = sampler.lr_scale.numpy(), math.log(0.8)
    grew = found > 1  # h was doubled from 1/√N: the step before it is half of it
    last = np.where(grew, found / 4, found * 4)
    assert ((log_ratio(found) > bar) != (log_ratio(last) > bar)).all()
    assert (grew == (log_ratio(np.ones(8)) > bar)).all()


def test_a_search_without_end_is_given_up() -> None:
    """An energy that is the same everywhere accepts every step; the search stops by itself."""
    weight = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    sampler, calls = HMC([weight], num_data=COUNT, leapfrog_steps=2, seed=1), []

    def closure() -> Tensor:
        sampler.zero_grad()
        (0 * weight).sum().backward()
        calls.append(1)
        return torch.zeros(())

    sampler.step(closure)
    assert len(calls) == 1 + 60 + 2


def test_dual_averaging_by_hand() -> None:
    """Two updates of Hoffman and Gelman's equation 6, worked out."""
    state = DualAveraging(0, *torch.zeros(3, 1, dtype=torch.float64))
    state = dual_averaging(state, torch.tensor([0.5], dtype=torch.float64), 0.8)
    first = math.log(10) - 20 * 0.3 / 11
    assert abs(float(state.log_step) - first) < 1e-12
    assert float(state.average) == float(state.log_step)
    state = dual_averaging(state, torch.tensor([1.0], dtype=torch.float64), 0.8)
    second = math.log(10) - 20 * math.sqrt(2) * (11 / 12 * 0.3 / 11 - 0.2 / 12)
    assert abs(float(state.log_step) - second) < 1e-12
    share = 2**-0.75
    assert abs(float(state.average) - (share * second + (1 - share) * first)) < 1e-12


def test_the_temperature_is_read_where_a_transition_starts() -> None:
    sampler, weight, bias = make(SEEDS)
    sampler.measure = True
    sampler.step(closure_of(sampler, weight, bias))
    # all ones: w·g = 7 by the quadratic, 0 by the coupling, 0.4 by the quartic
    expected = torch.full((4,), COUNT * 7.4 / 3, dtype=torch.float64)
    torch.testing.assert_close(sampler.measured_temperature, expected)


def test_weights_without_gradient_stay() -> None:
    idle = torch.ones(2, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    sampler = HMC([idle, weight], lr=0.1, num_data=COUNT, seed=1)
    sampler.step(closure_of(sampler, weight, torch.tensor(0.0).double()))
    assert idle.tolist() == [1.0, 1.0]
    assert weight.tolist() != [1.0, 1.0]


# -------------------------------------------------------------------- Lightning


class PlainModule(pl.LightningModule):
    """A user's own module with automatic optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)
        nn.init.constant_(self.net.weight, 0.5)
        nn.init.zeros_(self.net.bias)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return 0.5 * (self.net(batch[0]) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        sampler = HMC(self.parameters(), lr=0.3, num_data=8, leapfrog_steps=3, seed=2)
        return [sampler], [torch.optim.lr_scheduler.ExponentialLR(sampler, 0.9)]


def test_automatic_optimization_equals_a_loop_by_hand() -> None:
    inputs = torch.randn(8, 3)
    fitted, by_hand = PlainModule(), PlainModule()
    trainer = quiet_trainer(max_epochs=5)
    trainer.fit(fitted, DataLoader(TensorDataset(inputs), batch_size=8))
    assert trainer.global_step == 5

    [sampler], [schedule] = by_hand.configure_optimizers()

    def closure() -> Tensor:
        sampler.zero_grad()
        loss = by_hand.training_step([inputs], 0)
        loss.backward()
        return loss

    for _ in range(5):
        sampler.step(closure)
        schedule.step()
    assert torch.equal(fitted.net.weight, by_hand.net.weight)
    assert not torch.equal(fitted.net.weight, PlainModule().net.weight)


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda closure: None, r"step\(closure\)"),
        (lambda closure: lambda: closure().sum(), r"shape \(4,\) .* got "),
        (lambda closure: lambda: print(closure()), r"shape \(4,\) .* got None"),
        (lambda closure: lambda: torch.zeros(4), "call backward"),
        (
            lambda closure: lambda: closure() + torch.tensor([0, 0, math.inf, 0]),
            "inf where chain 2",
        ),
    ],
)
def test_a_closure_that_cannot_work(spoil: Callable[[Any], Any], message: str) -> None:
    sampler, weight, bias = make(SEEDS)
    with pytest.raises((ConfigurationError, NonFiniteError), match=message):
        sampler.step(spoil(closure_of(sampler, weight, bias)))
    assert torch.equal(weight, torch.ones_like(weight))


def test_a_step_without_noise_is_refused() -> None:
    sampler, weight, bias = make(1)
    sampler.param_groups[0]["explore"] = True
    with pytest.raises(ConfigurationError, match="cyclical"):
        sampler.step(closure_of(sampler, weight, bias))
