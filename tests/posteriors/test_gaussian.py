"""The Gaussian posterior: moments, chunks, saving and what it refuses."""

import math

import pytest
import torch
from torch import nn

from lightning_bnn import GaussianPosterior, Posterior, VariationalBNN
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from tests.posteriors.common import generator, network


def make(net):
    mean = {name: torch.randn_like(p).detach() for name, p in net.named_parameters()}
    sd = {name: torch.rand_like(tensor) + 0.1 for name, tensor in mean.items()}
    return GaussianPosterior(net, Gaussian(0.3), mean, sd), mean, sd


def test_sample_moments():
    """10,000 draws of 34 weights: means and variances within 5 standard errors.

    Correlations are within 5/√10,000 of zero for all 561 pairs: together a false alarm in 10³.
    """
    posterior, mean, sd = make(network())
    count = 10_000
    draws = posterior.sample(count, generator())
    assert list(draws) == list(mean)
    for name, tensor in draws.items():
        assert tensor.shape == (count, *mean[name].shape)
        error = (tensor.mean(0) - mean[name]) / sd[name] * math.sqrt(count)
        assert error.abs().max() < 5
        assert (tensor.var(0) / sd[name] ** 2 - 1).abs().max() < 5 * math.sqrt(2 / count)
    flat = torch.cat([tensor.flatten(1) for tensor in draws.values()], 1)
    correlation = torch.corrcoef(flat.T) - torch.eye(flat.shape[1])
    assert correlation.abs().max() < 5 / math.sqrt(count)


def test_the_order_of_the_given_tensors_does_not_matter():
    net = network()
    posterior, mean, sd = make(net)
    backwards = [dict(reversed(list(tensors.items()))) for tensors in (mean, sd)]
    other = GaussianPosterior(net, Gaussian(0.3), *backwards)
    mixed = GaussianPosterior(net, Gaussian(0.3), mean, backwards[1])
    for name, tensor in posterior.sample(3, generator()).items():
        assert torch.equal(other.sample(3, generator())[name], tensor)
        assert torch.equal(mixed.sample(3, generator())[name], tensor)


def test_linear_regression_in_closed_form():
    """For a linear network the epistemic variance is xᵀ diag(σ²) x, to 5 standard errors."""
    net = nn.Linear(3, 1, bias=False)
    sd = torch.tensor([[0.5, 1.0, 2.0]])
    posterior = GaussianPosterior(net, Gaussian(0.3), {"weight": sd * 0}, {"weight": sd})
    x = torch.randn(6, 3)
    predictive = posterior.predict(x, draws=4000)
    exact = (x**2 @ sd.T**2).squeeze(1)
    ratio = predictive.epistemic.squeeze(1) / exact
    assert (ratio - 1).abs().max() < 5 * math.sqrt(2 / 4000)
    torch.testing.assert_close(predictive.aleatoric, torch.full((6, 1), 0.09))


def test_a_fitted_posterior_survives_saving_and_later_training(tmp_path):
    bnn = VariationalBNN(network(), Gaussian(0.3, learn=True), num_data=10, initial_scale=0.1)
    optimizer = torch.optim.SGD([p for p in bnn.parameters() if p.requires_grad], lr=0.1)
    batch = torch.randn(10, 3), torch.randn(10, 2)

    def step():
        optimizer.zero_grad()
        bnn.loss(batch).backward()
        optimizer.step()

    step()
    posterior = bnn.posterior()
    before = posterior.predict(batch[0], draws=5)
    step()
    assert not torch.equal(bnn.posterior().mean["0.weight"], posterior.mean["0.weight"])
    assert bnn.net[1].num_batches_tracked == 2
    assert posterior.fixed["1.num_batches_tracked"] == 1
    posterior.save(tmp_path)
    for other in (posterior, Posterior.load(tmp_path, network())):
        other._cache = None
        after = other.predict(batch[0], draws=5)
        torch.testing.assert_close(after.outputs, before.outputs)
        torch.testing.assert_close(after.variance, before.variance)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mean, sd: (mean, {}), r"same names, at least one; got \['0.weight'.*\[\]"),
        (lambda mean, sd: ({}, {}), r"got \[\] and \[\]"),
        (
            lambda mean, sd: (mean | {"0.wieght": torch.zeros(2)}, sd),
            r"mean names '0.wieght', which is not .* begin with \['0.weight'",
        ),
        (
            lambda mean, sd: (mean, sd | {"0.weight": torch.ones(3, 4)}),
            r"sd has '0.weight' in the shape \[3, 4\]; the network has it in \[4, 3\]",
        ),
        (
            lambda mean, sd: (mean | {"0.bias": torch.zeros(4).double()}, sd),
            "one floating-point dtype",
        ),
    ],
)
def test_what_does_not_fit_the_network(change, message):
    net = network()
    _, mean, sd = make(net)
    with pytest.raises(ConfigurationError, match=message):
        GaussianPosterior(net, Gaussian(0.3), *change(mean, sd))
