import pytest
import torch
from torch import nn

from lightning_bnn.errors import PosteriorFormatError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.network import describe
from lightning_bnn.posteriors import GaussianPosterior, MixturePosterior
from lightning_bnn.posteriors.base import Posterior
from lightning_bnn.pruning import compact, prune


def network(inputs=3, hidden=8, outputs=2):
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, outputs)
    )


def posterior(net, original=None):
    torch.manual_seed(0)
    mean = {name: torch.randn(p.shape) for name, p in net.named_parameters()}
    sd = {name: torch.rand(p.shape) for name, p in net.named_parameters()}
    made = GaussianPosterior(net, Gaussian(0.1), mean, sd)
    made.pruned_from = original and describe(original)
    return made


def test_a_compact_posterior_takes_the_original_network_or_the_small_one(tmp_path):
    small, original = network(hidden=5), network()
    before = {name: tensor.clone() for name, tensor in original.state_dict().items()}
    saved = posterior(small, original)
    for index, one in enumerate((saved, MixturePosterior([saved, posterior(small, original)]))):
        one.save(tmp_path / str(index))
        for net in (original, small):
            loaded = Posterior.load(tmp_path / str(index), net)
            inputs = torch.randn(6, 3)
            found, expected = loaded.predict(inputs).mean, one.predict(inputs).mean
            torch.testing.assert_close(found, expected)
            assert all(part.pruned_from == describe(original) for part in loaded.components)
            loaded.save(tmp_path / "again")  # still compact: it loads as it did
            assert Posterior.load(tmp_path / "again", original).pruned_from == describe(original)
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_a_network_that_it_was_not_pruned_from_is_refused(tmp_path):
    """Larger than the small one everywhere, but not the original."""

    def other(inputs, outputs):
        return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))

    whole = posterior(other(4, 3))
    smaller = compact(prune(whole, 0.5, unit="channel"))
    mixture = MixturePosterior([smaller, smaller])
    for index, one in enumerate((smaller, compact(smaller), mixture, prune(mixture, 0.0))):
        one.save(tmp_path / str(index))
        for net in (other(7, 10), other(4, 4)):
            with pytest.raises(PosteriorFormatError, match=r"of another network: tensor \d"):
                Posterior.load(tmp_path / str(index), net)
        loaded = Posterior.load(tmp_path / str(index), other(4, 3))
        assert loaded.net[0].out_features == 4
        loaded.save(tmp_path / "again")
        with pytest.raises(PosteriorFormatError, match="of another network"):
            Posterior.load(tmp_path / "again", other(7, 10))
        assert Posterior.load(tmp_path / "again", smaller.net).pruned_from


def test_the_original_of_a_smaller_one_is_the_largest(tmp_path):
    smaller = compact(prune(posterior(network()), 0.5, unit="channel"))
    further = compact(prune(smaller, 0.5, unit="channel"))
    assert further.net[0].out_features == 2
    further.save(tmp_path)
    assert Posterior.load(tmp_path, network()).net[0].out_features == 2
