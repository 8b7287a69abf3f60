"""Pruned posteriors of every kind: exact zeros in every draw, all else as before; refusals."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from lightning_bnn import (
    DrawsPosterior,
    GaussianPosterior,
    Posterior,
)
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import draws as draws_module
from lightning_bnn.pruning import masked, mean_network, prune, sparsity, support
from lightning_bnn.pruning.masks import keep_masks, pruning_masks
from lightning_bnn.pruning.signal import separate, signal_to_noise
from lightning_bnn.storage.stream import StoredDraws
from tests.pruning.posteriors import KINDS, draws, gaussian, multi_swag, network

WEIGHTS = ["0.weight", "5.weight"]  # 18 + 24 of them
INPUTS = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def stored(tmp_path, monkeypatch, posterior: Posterior | None = None) -> DrawsPosterior:
    (posterior or draws()).save(tmp_path)
    monkeypatch.setattr(draws_module, "CACHE_BYTES", 0)
    made = Posterior.load(tmp_path, network())
    assert isinstance(made, DrawsPosterior)
    assert isinstance(made._draws, StoredDraws)
    return made


def is_positive_zero(tensor: torch.Tensor) -> bool:
    return bool(((tensor == 0) & ~torch.signbit(tensor)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_pruned_weights_are_zero_in_every_draw_and_the_rest_is_as_it_was(kind):
    posterior = KINDS[kind]()
    before = posterior.sample(24, seeded())
    expected = posterior.predict(INPUTS).mean
    small = prune(posterior, 0.6)
    assert type(small) is type(posterior)
    assert sparsity(small) == pytest.approx(25 / 42)  # round(0.6 · 42)
    after = small.sample(24, seeded())
    for whole, part in zip(separate(posterior), separate(small), strict=True):
        masks, own = pruning_masks(whole, 0.6), part.sample(24, seeded())
        for name, tensor in whole.sample(24, seeded()).items():
            keep = masks.get(name, torch.ones(tensor.shape[1:], dtype=torch.bool))
            assert torch.equal(own[name][:, keep], tensor[:, keep])  # to the bit
            assert is_positive_zero(own[name][:, ~keep])
    assert [name for name in after if not torch.equal(after[name], before[name])] == WEIGHTS
    # nothing leaks: neither into the original, nor from its kept draws
    assert torch.equal(posterior.predict(INPUTS).mean, expected)
    assert sparsity(posterior) == 0
    assert not torch.equal(small.predict(INPUTS).mean, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", ["global", "layer"])
def test_pruning_twice_is_pruning_once(kind, scope):
    posterior = KINDS[kind]()
    once = prune(posterior, 0.8, scope=scope)
    twice = prune(prune(posterior, 0.3, scope=scope), 0.8, scope=scope)
    less = prune(once, 0.3, scope=scope)
    none = prune(posterior, 0, scope=scope)
    for one, other in ((once, twice), (once, less), (posterior, none)):
        left, right = one.sample(12, seeded()), other.sample(12, seeded())
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_each_component_of_multi_swag_has_its_own_masks_and_an_ensemble_one():
    small = prune(multi_swag(), 0.5)
    supports = [support(one)["5.weight"] for one in small.components]
    assert not torch.equal(supports[0], supports[1])
    assert sparsity(small) == 0.5
    assert torch.equal(support(small)["5.weight"], supports[0] | supports[1] | supports[2])
    whole = KINDS["ensemble"]()
    small = prune(whole, 0.5)
    scores = {name: signal_to_noise(whole)[name] for name in WEIGHTS}
    keep = keep_masks(scores, 0.5)
    for component in small.components:
        assert torch.equal(support(component)["5.weight"], keep["5.weight"])
        assert torch.equal(support(component)["0.weight"], keep["0.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_support_is_where_a_draw_is_not_zero(kind):
    posterior = KINDS[kind]()
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[1, 2:5] = False
    gone = torch.tensor([0.0, 1.0])  # 0 and 1 serve too, for a fixed or a varying buffer
    small = masked(posterior, {"5.weight": mask, "1.running_var": gone})
    somewhere = support(small)
    assert list(somewhere) == [
        *dict(network().named_parameters()),
        *dict(network().named_buffers()),
    ]
    assert torch.equal(somewhere["5.weight"], mask)
    assert somewhere["1.running_var"].tolist() == [False, True]
    assert somewhere["0.weight"].all()
    assert sparsity(small) == pytest.approx(3 / 42)
    assert support(posterior)["5.weight"].all()


def test_nan_and_negative_numbers_become_plus_zero():
    posterior = gaussian()
    posterior.mean["5.weight"][0, 0] = torch.nan
    posterior.mean["5.weight"][0, 1] = -torch.inf
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[0] = False
    small = masked(posterior, {"5.weight": mask})
    assert is_positive_zero(small.mean["5.weight"][0])
    assert is_positive_zero(small.sample(50, seeded())["5.weight"][:, 0])


def test_draws_on_the_disk_stay_there(tmp_path, monkeypatch):
    lazy = stored(tmp_path, monkeypatch)
    small, expected = prune(lazy, 0.6), prune(draws(), 0.6)
    assert isinstance(small._draws, StoredDraws)
    assert small.chains == 2
    assert len(small) == 6
    for posterior in (small, prune(small, 0.6), small.to("cpu"), pickle.loads(pickle.dumps(small))):
        for mine, theirs in zip(posterior._draws, expected._draws, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert sparsity(small) == pytest.approx(25 / 42)
    assert sparsity(lazy) == 0
    small.save(tmp_path / "small")
    again = Posterior.load(tmp_path / "small", network())
    assert torch.equal(again.predict(INPUTS).mean, expected.predict(INPUTS).mean)


@pytest.mark.parametrize("kind", ["gaussian", "draws", "multi_swag"])
def test_the_mean_network_is_an_ordinary_one(kind):
    posterior = KINDS[kind]()
    net = mean_network(posterior)
    assert type(net) is nn.Sequential
    assert not net.training
    assert not any(parameter.requires_grad for parameter in net.parameters())
    for name, tensor in net.state_dict().items():
        if all(name in part.mean for part in posterior.components) and tensor.ndim:
            means = [part.mean[name].double() for part in posterior.components]
            torch.testing.assert_close(tensor.double(), sum(means) / len(means))
    with torch.no_grad():
        next(net.parameters()).zero_()  # a copy: the posterior does not see it
    assert sparsity(posterior) == 0


def test_the_mean_network_has_the_fixed_values_and_ties():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.second.weight = self.first.weight

        def forward(self, inputs):
            return self.second(self.first(inputs))

    net, one = Tied().double(), {"first.weight": torch.eye(2).double()}
    fixed = {"first.bias": torch.zeros(2).double(), "second.bias": torch.ones(2).double()}
    posterior = GaussianPosterior(net, Gaussian(0.1), one, one, fixed)
    assert mean_network(posterior)(torch.ones(1, 2).double()).tolist() == [[2.0, 2.0]]
    small = prune(posterior, 0.5)
    assert small.sample(3)["first.weight"].count_nonzero() <= 6
    assert sparsity(small) == 0.5


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"head.weight": torch.ones(3, 8)}, "masks names 'head.weight', which is not"),
        ({"5.weight": torch.ones(8, 3)}, r"'5.weight' in the shape \[8, 3\]; the network has it"),
        ({"5.weight": torch.rand(3, 8)}, r"other numbers than 0 and 1 \(torch.float32\)"),
    ],
)
def test_masks_that_are_none(masks, message):
    for posterior in (gaussian(), multi_swag()):
        with pytest.raises(ConfigurationError, match=message):
            masked(posterior, masks)
