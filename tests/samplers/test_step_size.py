"""Chains find their learning rates by the temperature they show, each for itself."""

import copy

import pytest
import torch

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.random import member_seed
from lightning_bnn.samplers import BAOA, SGHMC, SGLD, SGNHT
from lightning_bnn.samplers.step_size import StepSizes

DATA, WEIGHTS = 1000, 400
CURVATURE = torch.logspace(-2, 0, WEIGHTS)


def make(kind, chains, steps, noise, start=0.1):
    """Chains on a quadratic mean energy whose gradients carry noise of a known size, by chain."""
    ids = chains if isinstance(chains, list) else list(range(chains))
    weights = torch.full((len(ids), WEIGHTS), start).requires_grad_()
    seeds = [member_seed(0, number) for number in ids]
    sampler = kind([weights], num_data=DATA, seed=seeds)
    sampler.adapt_steps = steps
    generators = [torch.Generator().manual_seed(100 + number) for number in ids]
    sizes = [noise[number] for number in ids]

    def step():
        pairs = zip(sizes, generators, strict=True)
        rough = [size * torch.randn(WEIGHTS, generator=one) for size, one in pairs]
        weights.grad = CURVATURE * weights.detach() + torch.stack(rough)
        sampler.step()

    return sampler, weights, step


@pytest.mark.parametrize("kind", [SGHMC, BAOA])
def test_the_rate_is_that_at_which_noise_heats_by_the_goal(kind):
    """In closed form the excess is N η v/(2a) for small steps; the goal is 5 %, kept to 3 to 7 %.

    A window's mean has a standard deviation of a sixth of the goal, so that the last decision is
    wrong by half of it with probability 0.003 for each of two chains, and a held rate that is too
    large is lowered.
    """
    noise = [0.05, 0.1]
    sampler, _, step = make(kind, 2, 3000, noise)
    for _ in range(4000):
        step()
    friction = sampler.param_groups[0]["friction"]
    excess = DATA * sampler.step_sizes.rates * torch.tensor(noise).square() / (2 * friction)
    assert not sampler.adapting
    assert ((excess > 0.02) & (excess < 0.1)).all(), excess
    readings = []
    for _ in range(1000):
        step()
        readings.append(sampler.measured_temperature)
    mean = torch.stack(readings).mean(0)
    assert ((mean > 1.0) & (mean < 1.1)).all(), mean


def test_a_chain_finds_its_rate_as_it_would_alone():
    noise = [0.01, 0.1, 0.02]
    together, weights, step = make(SGHMC, 3, 600, noise)
    alone, own, step_alone = make(SGHMC, [1], 600, noise)
    for _ in range(900):
        step()
        step_alone()
    assert torch.equal(weights[1], own[0])
    assert torch.equal(together.step_sizes.rates[1], alone.step_sizes.rates[0])


def test_without_noise_of_gradients_the_rate_stays_stable():
    sampler, weights, step = make(SGHMC, 2, 2000, [0.0, 0.0])
    for _ in range(4000):
        step()
    assert weights.isfinite().all()
    # stable for ηλ < 2(2 − a); a rate that had lost the chain was taken back
    assert (sampler.step_sizes.rates < 4).all()
    assert (sampler.step_sizes.rates > 0.01).all()


def test_a_lost_chain_goes_back_to_where_its_window_began():
    sampler, weights, step = make(SGHMC, 2, 10**6, [0.01, 0.01])
    for _ in range(200):
        step()
    back = [copy.deepcopy(one) for one in sampler._back]
    rates = sampler.step_sizes.rates.clone()
    sampler.state[weights]["velocity"][0] *= 100
    other = weights[1].detach().clone()
    step()
    assert torch.equal(weights[0], back[0][0])
    assert sampler.step_sizes.rates[0] == rates[0] / 4
    assert (sampler.state[weights]["velocity"][0] == 0).all()
    assert not torch.equal(weights[1], other)
    assert sampler.step_sizes.rates[1] == rates[1]


def world(sizes, noise, hotter=1.0):
    """A step in a world where the excess is the closed form's times a factor."""
    noise = torch.as_tensor(noise)
    sizes.update(noise, 1 + hotter * 50_000 * noise * sizes.rates, 1.0, 10_000)


def test_a_held_rate_is_lowered_but_never_raised():
    for changed in ({"hotter": torch.tensor([2.0, 0.5])}, {"noise": [0.002, 0.0005]}):
        sizes = StepSizes(chains=2, weights=10_000, friction=0.1)
        sizes.steps = 1000
        for _ in range(1000):
            world(sizes, [0.001, 0.001])
        held = sizes.rates.clone()
        assert torch.allclose(held, torch.tensor(0.001).double())
        for _ in range(1000):
            world(sizes, **{"noise": [0.001, 0.001], **changed})
        assert sizes.rates[0] < 0.7 * held[0]
        assert sizes.rates[1] == held[1]


def test_heat_that_the_noise_does_not_explain_lowers_the_rate():
    sizes = StepSizes(chains=2, weights=10_000, friction=0.1)
    sizes.steps = 2000
    for _ in range(2000):
        world(sizes, [0.001, 0.001], hotter=torch.tensor([3.0, 0.25]))
    assert torch.allclose(sizes.rates, torch.tensor([0.001 / 3, 0.004]).double(), rtol=0.4)


def test_few_weights_are_judged_by_the_noise_of_their_gradients():
    """The kinetic temperature of three weights says little in 100 steps; gradients say enough.

    300 pairs of gradients of three weights give v to 5 %, the last window's 20 pairs to 18 %: a
    rate beyond 0.4 to 2.5 times the closed form has a probability below 1e-4.
    """
    weights = torch.zeros(1, 3).requires_grad_()
    sampler = SGHMC([weights], num_data=DATA, seed=[1])
    sampler.adapt_steps = 500
    generator = torch.Generator().manual_seed(0)
    for _ in range(1500):
        weights.grad = weights.detach() + 0.1 * torch.randn(1, 3, generator=generator) + 0.3
        sampler.step()
    expected = 2 * 0.1 * 0.05 / (DATA * 0.1**2)
    assert 0.4 < float(sampler.step_sizes.rates) / expected < 2.5


def test_many_weights_for_few_data_are_kept_cooler():
    assert StepSizes(1, weights=1000, friction=0.1).goal(1000) == 0.05
    assert StepSizes(1, weights=100_000, friction=0.1).goal(10_000) == pytest.approx(0.01)
    assert StepSizes(1, weights=10**9, friction=0.1).goal(10_000) == 1e-3


@pytest.mark.parametrize("at", [5, 300, 700])
def test_resume_is_exact(at):
    noise = [0.01, 0.1]
    first, weights, step = make(SGHMC, 2, 600, noise)
    for _ in range(at):
        step()
    state, kept = copy.deepcopy(first.state_dict()), weights.detach().clone()
    second, own, _ = make(SGHMC, 2, 1, noise)
    own.data.copy_(kept)
    second.load_state_dict(state)
    for _ in range(200):
        step()
        own.grad = CURVATURE * own.detach() + (
            weights.grad - CURVATURE * own.detach()
        )  # the same gradient as the first has seen
        second.step()
    assert torch.equal(weights, own)
    assert torch.equal(first.step_sizes.rates, second.step_sizes.rates)


@pytest.mark.parametrize("kind", [SGLD, SGNHT])
def test_a_sampler_that_cannot_judge_its_rate_asks_for_one(kind):
    with pytest.raises(ConfigurationError, match="needs a learning rate"):
        kind([torch.zeros(2, requires_grad=True)], lr=None, num_data=10)


def test_a_rate_is_found_at_a_temperature_above_0_for_one_group():
    weight = torch.zeros(2, requires_grad=True)
    with pytest.raises(ConfigurationError, match="temperature above 0"):
        SGHMC([weight], num_data=10, temperature=0.0)
