"""Mixtures of posteriors: shares, each component's own noise, nesting, saving."""

import math
from collections import Counter

import pytest
import torch
from torch import nn

from lightning_bnn import DrawsPosterior, GaussianPosterior, MixturePosterior
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.network import network_tensors
from tests.posteriors.common import generator, weight_of


def point(value, likelihood=None):
    """A posterior of one draw: the weight of a line through the origin."""
    net = nn.Linear(1, 1, bias=False)
    draw = {"weight": torch.full((1, 1), float(value))}
    return DrawsPosterior(net, likelihood or Gaussian(0.1), [draw])


def gaussian(seed, scale=0.1):
    """A last layer that varies; all else is fixed, and differs from member to member."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    net(torch.randn(16, 3))
    mean = {"3.weight": torch.randn(1, 4), "3.bias": torch.randn(1)}
    sd = {name: torch.full_like(tensor, 0.5) for name, tensor in mean.items()}
    return GaussianPosterior(net, Gaussian(scale, learn=True), mean, sd)


def test_draws_are_shared_out_evenly():
    mixture = MixturePosterior([point(value) for value in range(4)])
    assert mixture.default_draws == 4
    assert weight_of(mixture, 4) == [0, 1, 2, 3]
    assert Counter(weight_of(mixture, 12)) == {0: 3, 1: 3, 2: 3, 3: 3}
    seen = Counter()
    for seed in range(40):
        chosen = Counter(weight_of(mixture, 6, seed))
        assert sorted(chosen.values()) == [1, 1, 2, 2]
        seen.update(value for value, count in chosen.items() if count == 2)
        assert len(set(weight_of(mixture, 2, seed))) == 2
    assert set(seen) == {0, 1, 2, 3}


def test_the_predictive_is_the_mixture_of_the_components():
    mixture = MixturePosterior([point(1.0), point(3.0)])
    predictive = mixture.predict(torch.ones(1, 1))
    assert predictive.mean.item() == 2
    assert predictive.epistemic.item() == 1
    assert predictive.aleatoric.item() == pytest.approx(0.01)


def test_every_component_keeps_its_own_noise():
    """Members that learned different noise: the aleatoric part is the mean of their variances."""
    members = [point(1.0, Gaussian(scale, learn=True)) for scale in (0.1, 0.7)]
    mixture = MixturePosterior(members)
    predictive = mixture.predict(torch.ones(3, 1), draws=10)
    assert predictive.aleatoric[0].item() == pytest.approx((0.1**2 + 0.7**2) / 2)
    assert predictive.epistemic[0].item() == pytest.approx(0.0, abs=1e-7)
    log_density = [-math.log(s) - 0.5 * math.log(2 * math.pi) for s in (0.1, 0.7)]
    expected = math.log(sum(map(math.exp, log_density)) / 2)
    assert predictive.log_prob(torch.ones(3, 1))[0].item() == pytest.approx(expected, rel=1e-5)


def test_fixed_tensors_of_a_component_go_with_its_draws():
    members = [gaussian(seed) for seed in range(2)]
    mixture = MixturePosterior(members)
    assert mixture.fixed == {}
    draws = mixture.sample(6, generator())
    assert list(draws) == list(network_tensors(mixture.net))
    for name, tensor in members[0].fixed.items():
        assert torch.equal(draws[name][:3], tensor.expand(3, *tensor.shape))
    for name, tensor in members[1].fixed.items():
        assert torch.equal(draws[name][3:], tensor.expand(3, *tensor.shape))


@pytest.mark.parametrize("nested", [False, True])
def test_members_are_moved_by_different_noise(nested):
    """Also where the depth differs: no two of them may share a seed."""
    one = gaussian(0)
    members = [one, one, one]
    if nested:
        members = [MixturePosterior([one, one]), one]
    mixture, inputs = MixturePosterior(members), torch.randn(2, 3)
    outputs = mixture.predict(inputs, draws=12).outputs
    assert len(torch.unique(outputs[:, 0, 0])) == 12
    others = mixture.predict(inputs, draws=12, seed=1).outputs
    assert not set(outputs.flatten().tolist()) & set(others.flatten().tolist())


def test_a_mixture_of_a_mixture_weighs_its_components():
    """{0, {1, 2}}: half of the draws are 0."""
    mixture = MixturePosterior([point(0), MixturePosterior([point(1), point(2)])])
    assert Counter(weight_of(mixture, 8)) == {0: 4, 1: 2, 2: 2}
    outputs = mixture.predict(torch.ones(1, 1), draws=8).outputs
    assert Counter(outputs.flatten().int().tolist()) == {0: 4, 1: 2, 2: 2}


@pytest.mark.parametrize(
    ("components", "message"),
    [
        ([], "at least one posterior; got none"),
        ([point(1), gaussian(0)], r"component 0 tensor 0 is 'weight' .*but '0.weight' of shape"),
        ([point(1), point(2, Categorical())], "0 has Gaussian, component 1 has Categorical"),
    ],
)
def test_what_cannot_be_mixed(components, message):
    with pytest.raises(ConfigurationError, match=message):
        MixturePosterior(components)


def test_all_components_together_keep_no_more_draws_than_one_posterior(monkeypatch):
    """Where one may keep 100 numbers, a nested mixture of three does not keep 300."""
    parts = [gaussian(seed) for seed in range(3)]
    mixture = MixturePosterior([parts[0], MixturePosterior(parts[1:])])
    monkeypatch.setattr("lightning_bnn.posteriors.weights.CACHE_BYTES", 400)
    inputs = torch.randn(2, 3)

    def kept():
        stacks = [stack for part in parts if part._cache for stack in part._cache[1]]
        return sum(tensor.nbytes for stack in stacks for tensor in stack.values())

    mixture.predict(inputs, draws=9)  # 20 bytes each
    assert kept() == 180
    for draws in (30, 60, 300):
        mixture.predict(inputs, draws=draws)
        assert kept() <= 400
    assert [part.cache_share for part in parts] == [0.5, 0.25, 0.25]
