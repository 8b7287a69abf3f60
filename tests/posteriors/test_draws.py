"""Stored draws: which are given for a number asked, in chunks, saved and loaded."""

from collections import Counter

import pytest
import torch
from torch import nn

from lightning_bnn import DrawsPosterior, Posterior
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.pruning import prune
from lightning_bnn.storage.stream import StoredDraws
from tests.posteriors.common import weight_of


def numbered(count):
    """Draws that can be told apart: the weight is the number of the draw."""
    net = nn.Linear(1, 1, bias=False)
    draws = [{"weight": torch.full((1, 1), float(index))} for index in range(count)]
    return DrawsPosterior(net, Gaussian(0.1), draws)


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def test_as_many_as_it_holds_are_all_of_them_in_order():
    posterior = numbered(11)
    assert len(posterior) == posterior.default_draws == 11
    state = torch.get_rng_state()
    assert posterior.sample(22)["weight"].flatten().tolist() == [*range(11)] * 2
    assert torch.equal(torch.get_rng_state(), state)  # no matter of chance
    assert posterior.predict(torch.ones(2, 1)).outputs[:, 0, 0].tolist() == list(range(11))


def test_fewer_or_more_are_equally_often_but_for_a_random_rest():
    posterior = numbered(11)
    seen = Counter()
    for seed in range(60):
        chosen = weight_of(posterior, 4, seed)
        assert chosen == sorted(set(chosen))
        seen.update(chosen)
    assert set(seen) == set(range(11))
    assert weight_of(posterior, 4, seed=1) == weight_of(posterior, 4, seed=1)
    assert sorted(Counter(weight_of(numbered(4), 14)).values()) == [3, 3, 4, 4]


def test_buffers_may_vary():
    net = network().eval()
    states = []
    for _ in range(3):
        one = network()
        one(torch.randn(16, 3))
        states.append(dict(one.eval().state_dict()))
    posterior = DrawsPosterior(net, Gaussian(0.1), states)
    assert posterior.fixed == {}
    inputs = torch.randn(5, 3)
    for output, state in zip(posterior.predict(inputs).outputs, states, strict=True):
        net.load_state_dict(state)
        torch.testing.assert_close(output, net(inputs))


@pytest.mark.parametrize(
    ("chains", "said"), [(0, "at least 1; got 0"), (-1, "got -1"), (4, "chains=4 and 6 draws")]
)
def test_every_chain_has_as_many_draws(chains, said):
    draws = [{"weight": torch.ones(1, 1)}] * 6
    with pytest.raises(ConfigurationError, match=said):
        DrawsPosterior(nn.Linear(1, 1), Gaussian(0.1), draws, chains=chains)


def test_draws_are_copies():
    net = nn.Linear(1, 1, bias=False)
    draw = {"weight": torch.ones(1, 1)}
    posterior = DrawsPosterior(net, Gaussian(0.1), [draw])
    draw["weight"].zero_()
    assert posterior.sample(1)["weight"].item() == 1
    posterior.sample(1)["weight"].zero_()
    assert posterior.sample(1)["weight"].item() == 1


@pytest.mark.parametrize(
    ("draws", "message"),
    [
        ([], "at least one draw; got none"),
        ([{}], r"draw 0 has \[\]"),
        (
            [{"weight": torch.ones(1, 1)}, {"bias": torch.ones(1)}],
            r"draw 0 has \['weight'\], draw 1 has \['bias'\]",
        ),
        ([{"weight": torch.ones(1, 1)}, {"wieght": torch.ones(1, 1)}], "draw 1 names 'wieght'"),
        ([{"weight": torch.ones(2, 1)}], r"draw 0 has 'weight' in the shape \[2, 1\].*\[1, 1\]"),
    ],
)
def test_what_cannot_be(draws, message):
    with pytest.raises(ConfigurationError, match=message):
        DrawsPosterior(nn.Linear(1, 1), Gaussian(0.1), draws)


def test_draws_that_are_small_on_the_disk_alone_stay_there(tmp_path, monkeypatch):
    """Pruned ones: what they take in memory decides, not what their files take."""
    net = nn.Linear(60, 40)
    sets = [{k: torch.randn(p.shape) for k, p in net.named_parameters()} for _ in range(4)]
    posterior = prune(DrawsPosterior(net, Gaussian(0.1), sets), 0.95)
    posterior.save(tmp_path)
    dense = 4 * 4 * (60 * 40 + 40)
    assert sum(file.stat().st_size for file in (tmp_path / "blobs").iterdir()) < dense / 3
    for limit, kept_as in ((dense - 1, StoredDraws), (dense, list)):
        monkeypatch.setattr("lightning_bnn.posteriors.draws.CACHE_BYTES", limit)
        loaded = Posterior.load(tmp_path, net)
        assert type(loaded._draws) is kept_as
        inputs = torch.randn(5, 60)
        assert torch.equal(loaded.predict(inputs).outputs, posterior.predict(inputs).outputs)
