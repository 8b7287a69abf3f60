"""The ratio against NumPy: closed forms, draws, low rank by sampling, mixtures; refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from lightning_bnn import DrawsPosterior, GaussianPosterior, MixturePosterior
from lightning_bnn import signal_to_noise as exported
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.pruning.signal import separate, signal_to_noise
from tests.pruning.posteriors import draws, ensemble, gaussian, like, low_rank, multi_swag, network

PARAMETERS = [name for name, _ in network().named_parameters()]


def close(found, expected):
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=2e-6, atol=1e-12)


def pooled(components):
    """Mean and variance of an equal mixture, from first and second moments, in NumPy."""
    means = np.stack([mean.double().numpy() for mean, _ in components])
    variances = np.stack([variance.double().numpy() for _, variance in components])
    mean = means.mean(0)
    return mean, (variances + means**2).mean(0) - mean**2


def test_gaussian_is_its_own_mean_and_sd():
    posterior = gaussian()
    found = signal_to_noise(posterior)
    assert exported is signal_to_noise
    assert list(found) == PARAMETERS
    for name in PARAMETERS:
        mean, sd = posterior.mean[name].numpy(), posterior.sd[name].numpy()
        assert np.array_equal(found[name].numpy(), np.abs(mean) / sd)  # to the bit
        close(posterior.moments().variance[name], sd.astype(float) ** 2)


@pytest.mark.parametrize(("rank", "scale"), [(0, 0.7), (2, 1.0), (5, 0.3)])
def test_low_rank_is_half_diagonal_and_half_deviations(rank, scale):
    posterior = low_rank(rank=rank, scale=scale)
    before = {name: tensor.clone() for name, tensor in posterior.variance.items()}
    found, ratios = posterior.moments(), signal_to_noise(posterior)
    for name in PARAMETERS:
        variance = posterior.variance[name].double().numpy()
        if rank:
            columns = posterior.deviations[name].double().numpy()
            variance = 0.5 * variance + 0.5 * (columns**2).sum(0) / (rank - 1)
        close(found.variance[name], scale * variance)
        mean = posterior.mean[name].double().numpy()
        close(ratios[name], np.abs(mean) / np.sqrt(scale * variance))
        assert torch.equal(posterior.variance[name], before[name])  # only looked at


def test_low_rank_agrees_with_its_own_draws():
    """The sd of 53 weights over 5,000 draws, each within 5 standard errors sd/√(2n).

    A false alarm is 53 · 6e-7, one in 30,000; the seed is fixed.
    """
    posterior, count = low_rank(), 5_000
    sampled = posterior.sample(count, torch.Generator().manual_seed(0))
    for name, variance in posterior.moments().variance.items():
        error = (sampled[name].double().var(0) / variance).sqrt() - 1
        assert float(error.abs().max()) < 5 / (2 * count) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_are_numpys_mean_and_sd(dtype):
    net = network().to(dtype)
    sets = [
        {name: 1e4 + tensor.to(dtype) for name, tensor in like(net, seed).items()}
        for seed in range(7)
    ]
    posterior = DrawsPosterior(net, Gaussian(0.3), sets)
    found = signal_to_noise(posterior)
    for name in PARAMETERS:
        values = np.stack([one[name].double().numpy() for one in sets])
        close(found[name], np.abs(values.mean(0)) / values.std(0, ddof=1))
        assert found[name].dtype == dtype
        for held, given in zip(posterior._draws, sets, strict=True):
            assert torch.equal(held[name], given[name])  # only looked at


@pytest.mark.parametrize("parts", ["swag", "mixed"])
def test_a_mixture_follows_the_law_of_total_variance(parts):
    posterior = multi_swag()
    if parts == "mixed":
        posterior = MixturePosterior([gaussian(), draws(4, 3, 1), draws(3, 1, 1)])
    found, within = posterior.moments(), [one.moments() for one in posterior.components]
    for name in PARAMETERS:
        mean, variance = pooled([(one.mean[name], one.variance[name]) for one in within])
        np.testing.assert_allclose(found.mean[name].numpy(), mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.variance[name].numpy(), variance, rtol=1e-5)


def test_what_is_fixed_in_components_varies_between_them():
    """Bayesian heads on bodies of their own: the body varies; a frozen part of all does not."""
    net, parts = network(), []
    for seed in range(2):
        values = like(net, seed)
        head = {"5.weight": values["5.weight"]}
        body = {"0.weight": values["0.weight"]}
        parts.append(
            GaussianPosterior(net, Gaussian(0.3), head, {"5.weight": torch.ones(3, 8)}, body)
        )
    found = MixturePosterior(parts).moments()
    assert list(found.mean) == ["0.weight", "5.weight"]
    mean, variance = pooled([(one.fixed["0.weight"], torch.zeros(2, 1, 3, 3)) for one in parts])
    np.testing.assert_allclose(found.variance["0.weight"].numpy(), variance, rtol=1e-5)
    np.testing.assert_allclose(found.mean["0.weight"].numpy(), mean, rtol=1e-5)


def test_zero_over_zero_is_zero_and_no_variance_is_infinite():
    net = nn.Linear(4, 1, bias=False)
    mean, sd = torch.tensor([[0.0, -2.0, 0.0, -0.0]]), torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    posterior = GaussianPosterior(net, Gaussian(0.1), {"weight": mean}, {"weight": sd})
    assert signal_to_noise(posterior)["weight"].tolist() == [[0.0, float("inf"), 0.0, 0.0]]
    sets = [{"weight": torch.tensor([[0.0, 0.1, value, -0.0]])} for value in (1.0, 2.0, 3.0)]
    found = signal_to_noise(DrawsPosterior(net, Gaussian(0.1), sets))["weight"]
    assert found.tolist() == [[0.0, float("inf"), 2.0, 0.0]]


def test_who_is_pruned_alone():
    single = draws(0, 1, 1)
    assert len(separate(multi_swag())) == 3
    assert len(separate(ensemble())) == 1
    assert len(separate(MixturePosterior([gaussian(), single]))) == 1
    assert len(separate(MixturePosterior([draws(), gaussian()]))) == 2
    assert len(separate(MixturePosterior([ensemble(), multi_swag()]))) == 1 + 3
    alone = MixturePosterior([gaussian()])
    assert separate(alone) == [alone]  # one component: the mixture is it
    assert all(
        torch.equal(left, right)
        for left, right in zip(
            alone.moments().variance.values(), gaussian().moments().variance.values(), strict=True
        )
    )


def test_posteriors_without_variances_are_refused():
    net = nn.Linear(2, 1)
    values = {"weight": torch.ones(1, 2)}
    with pytest.raises(ConfigurationError, match=r"No weight of this DrawsPosterior.*single draw"):
        signal_to_noise(DrawsPosterior(net, Gaussian(0.1), [values]))
    with pytest.raises(ConfigurationError, match="all standard deviations are 0"):
        signal_to_noise(DrawsPosterior(net, Gaussian(0.1), [values, values]))
    zero = {"weight": torch.zeros(1, 2)}
    with pytest.raises(ConfigurationError, match=r"all standard deviations are 0.*two draws"):
        signal_to_noise(GaussianPosterior(net, Gaussian(0.1), values, zero))


def in_half(posterior, **parts):
    """The same kind of posterior with these tensors in float16."""
    halves = {key: {k: v.half() for k, v in part.items()} for key, part in parts.items()}
    return type(posterior)(posterior.net, posterior.likelihood, **halves)


def test_half_precision_is_squared_in_float32():
    """1e-4 squared is zero in float16, and its ratio would be infinite."""
    found = gaussian()
    small = {name: sd * 1e-4 for name, sd in found.sd.items()}
    posterior = in_half(found, mean={k: m * 1e-4 for k, m in found.mean.items()}, sd=small)
    for name, ratios in signal_to_noise(posterior).items():
        mean, sd = (part[name].double().numpy() for part in (posterior.mean, posterior.sd))
        with np.errstate(divide="ignore", invalid="ignore"):
            expected = np.nan_to_num(np.abs(mean) / sd, nan=0.0, posinf=np.inf)
        close(ratios, expected)
        assert ratios.dtype == torch.float32
        close(posterior.moments().variance[name], sd**2)
