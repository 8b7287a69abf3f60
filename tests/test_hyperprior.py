"""Learned scales against quadrature, finite differences, SciPy and torch.distributions."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import nn
from torch.distributions import Gamma, kl_divergence

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.flat import KeptMemory, split_weights
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import DrawsPosterior, prior_scales
from lightning_bnn.priors import (
    BoundPrior,
    Laplace,
    Learned,
    Normal,
    ScaleMixture,
    StudentT,
    check_prior,
)
from lightning_bnn.recipes import make, recipe
from lightning_bnn.selection import FlatLayout

SHAPE, RATE = 1.7, 0.4


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def bind(prior):
    net = network()
    return BoundPrior(prior, net, dict(net.named_parameters()))


def learned(by="tensor", **options):
    return Normal(scale=Learned(SHAPE, RATE, by), **options)


# (the prior, and by scale the weights under it with their location and fan-in)
GROUPS = {
    "by tensor": (
        learned(),
        {
            "0.weight": [(0, 12, 0.0, 1)],
            "0.bias": [(12, 15, 0.0, 1)],
            "2.weight": [(15, 18, 0.0, 1)],
            "2.bias": [(18, 19, 0.0, 1)],
        },
    ),
    "by layer and fan-in, around a number": (
        learned("layer", loc=0.3, fan_in=True),
        {
            "0.*": [(0, 12, 0.3, 4), (12, 15, 0.3, 1)],
            "2.*": [(15, 18, 0.3, 3), (18, 19, 0.3, 1)],
        },
    ),
    "apart in the vector": (
        {"0.weight": Normal(0.0, 0.5), "*.weight": learned(), "*": learned("layer")},
        {
            "0.bias": [(12, 15, 0.0, 1)],
            "2.weight": [(15, 18, 0.0, 1)],
            "2.bias": [(18, 19, 0.0, 1)],
        },
    ),
}
CASES = pytest.mark.parametrize(("prior", "groups"), GROUPS.values(), ids=GROUPS)


def fixed_energy(prior, weights):
    """Of what has no learned scale."""
    if isinstance(prior, Normal):
        return 0.0
    return -stats.norm(0, 0.5).logpdf(weights[:12]).sum()


def collapsed(weights, pieces):
    """−log ∫ Gamma(τ) Π N(w; m, 1/(τ f)) dτ by the trapezoidal rule in log τ.

    The integrand falls off on both sides, where this rule is as exact as rounding.
    """
    log_tau = np.linspace(-30, 30, 6001)
    tau = np.exp(log_tau)
    log_joint = stats.gamma.logpdf(tau, SHAPE, scale=1 / RATE) + log_tau
    for a, b, loc, fan in pieces:
        sd = 1 / np.sqrt(tau * fan)
        log_joint += stats.norm.logpdf(weights[a:b, None], loc, sd).sum(0)
    return -special.logsumexp(log_joint) - math.log(log_tau[1] - log_tau[0])


@CASES
def test_energy_against_quadrature_over_the_precision(prior, groups):
    bound, weights = bind(prior), torch.randn(19).double()
    expected = fixed_energy(prior, weights.numpy())
    expected += sum(collapsed(weights.numpy(), pieces) for pieces in groups.values())
    assert bound.learned.names == list(groups)
    assert bound.energy(weights).item() == pytest.approx(expected, rel=1e-9)


@CASES
def test_gradient_against_finite_differences(prior, groups):
    """Of autograd, of the pass by hand, and of what splits flat weights."""
    bound, weights = bind(prior), torch.randn(19).double().requires_grad_()
    step = 1e-6 * torch.eye(19).double()
    with torch.no_grad():
        expected = (bound.energy(weights + step) - bound.energy(weights - step)) / 2e-6
    (by_autograd,) = torch.autograd.grad(bound.energy(weights), weights)
    by_hand = torch.ones(19).double()
    bound.add_energy_gradient(by_hand, torch.tensor(1.0).double(), weights.detach())
    layout = FlatLayout(dict(network().named_parameters()))
    slices, energy = split_weights(weights, layout, bound, KeptMemory())
    whole = energy + 0 * sum(part.sum() for part in slices.values())
    (by_split,) = torch.autograd.grad(whole, weights)
    for found in (by_autograd, by_hand - 1, by_split):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@CASES
def test_expected_energy_is_the_bound_at_the_optimal_gamma(prior, groups):
    """E[−log p(w|τ)] + KL(q(τ)‖p(τ)) with q(τ) = Gamma(k, b + E[s]/2), by torch.distributions.

    Other q(τ) give more, so that the energy is the least of the bounds.
    """
    bound = bind(prior)
    mean, sd = torch.randn(2, 19).double()
    sd = sd.exp()
    expected = 0.0
    if not isinstance(prior, Normal):
        expected = Normal().expected_energy(mean[:12], sd[:12], mean[:12], 0.0, 0.5).item()
    for pieces in groups.values():
        count = sum(b - a for a, b, _, _ in pieces)
        square = sum(
            fan * ((mean[a:b] - loc) ** 2 + sd[a:b] ** 2).sum() for a, b, loc, fan in pieces
        )
        constant = sum((b - a) * math.log(2 * math.pi / fan) / 2 for a, b, _, fan in pieces)

        def upper(q, square=square, count=count, constant=constant):
            log_tau = torch.digamma(q.concentration) - q.rate.log()
            energy = 0.5 * q.mean * square - 0.5 * count * log_tau + constant
            prior_tau = Gamma(*torch.tensor([SHAPE, RATE], dtype=torch.float64))
            return (energy + kl_divergence(q, prior_tau)).item()

        best = torch.tensor(SHAPE + count / 2, dtype=torch.float64), RATE + square / 2
        expected += upper(Gamma(*best))
        for x, y in [(1.3, 1.0), (1.0, 0.8)]:
            assert upper(Gamma(best[0] * x, best[1] * y)) > upper(Gamma(*best))
    assert bound.expected_energy(mean, sd, mean).item() == pytest.approx(expected, rel=1e-10)

    noise, weight = torch.randn(19).double(), torch.tensor(0.7).double()
    gradients = torch.zeros(2, 19).double()
    bound.add_energy_gradients(*gradients, weight, mean, sd, noise)
    mean.requires_grad_()
    sd.requires_grad_()
    energy = weight * bound.expected_energy(mean, sd, mean + sd * noise)
    for found, exact in zip(gradients, torch.autograd.grad(energy, (mean, sd)), strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


def test_what_is_pruned_does_not_count():
    """As if the weights that remain were all: in the energy, its bound and both gradients."""
    prior = learned("layer", fan_in=True)
    keep = torch.rand(19) < 0.6
    mean, sd, noise = torch.randn(3, 19).double()
    sd = sd.exp()
    bound = bind(prior)
    pieces = [(12, 4), (3, 1), (3, 3), (1, 1)]
    fans = torch.cat([torch.full((n,), float(fan)) for n, fan in pieces]).double()
    expected, by_mean, by_sd = 0.0, torch.zeros(19).double(), torch.zeros(19).double()
    for part in (slice(0, 15), slice(15, 19)):
        here = keep[part]
        count = int(here.sum())
        s = (fans[part] * (mean[part] ** 2 + sd[part] ** 2))[here].sum().item()
        k, rate = SHAPE + count / 2, RATE + s / 2
        expected += k * math.log(rate) + math.lgamma(SHAPE) - SHAPE * math.log(RATE)
        expected += 0.5 * (count * math.log(2 * math.pi) - fans[part][here].log().sum().item())
        expected -= math.lgamma(k)
        by_mean[part] = k / rate * fans[part] * mean[part]
        by_sd[part] = k / rate * fans[part] * sd[part]
    assert bound.expected_energy(mean, sd, mean, keep).item() == pytest.approx(expected)
    assert bound.energy((mean**2 + sd**2).sqrt(), keep).item() == pytest.approx(expected)
    gradients = torch.zeros(2, 19).double()
    bound.add_energy_gradients(*gradients, torch.tensor(1.0), mean, sd, noise, keep)
    torch.testing.assert_close(gradients[0][keep], by_mean[keep])
    torch.testing.assert_close(gradients[1][keep], by_sd[keep])
    scales = bound.fitted_scales(mean, sd, keep)
    assert scales["2.*"].item() == pytest.approx(math.sqrt(rate / k))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_set_has_its_own_scales_and_the_bits_it_has_alone(threads):
    """In the gradient, whatever else is stacked and on however many threads."""
    net = nn.Sequential(nn.Linear(300, 150), nn.Linear(150, 1))
    tensors = dict(net.named_parameters())
    layout, bound = FlatLayout(tensors), BoundPrior(Normal(scale=Learned()), net, tensors)
    weights = torch.randn(5, layout.size) * torch.logspace(-2, 0, 5)[:, None]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        gradients = []
        for flat in (weights, *weights):
            flat = flat.clone().requires_grad_()
            slices, energy = split_weights(flat, layout, bound, KeptMemory())
            (energy.sum() + sum(part.sum() for part in slices.values())).backward()
            gradients.append(flat.grad.clone())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(gradients[0], torch.stack(gradients[1:]))
    scales = bound.fitted_scales(weights)["0.weight"]
    torch.testing.assert_close(scales, torch.logspace(-2, 0, 5), rtol=0.05, atol=0)


def test_draws_of_the_scales_are_of_their_conditional():
    """By a Kolmogorov and Smirnov test of each group: false alarms in 1 of 1000, the seed fixed."""
    prior, groups = GROUPS["by layer and fan-in, around a number"]
    bound, weights = bind(prior), torch.randn(19).double()
    found = bound.draw_scales(weights.expand(4000, 19), torch.Generator().manual_seed(5))
    again = bound.draw_scales(weights.expand(4000, 19), torch.Generator().manual_seed(5))
    for name, pieces in groups.items():
        count = sum(b - a for a, b, _, _ in pieces)
        square = sum(fan * ((weights[a:b] - loc) ** 2).sum().item() for a, b, loc, fan in pieces)
        law = stats.gamma(SHAPE + count / 2, scale=1 / (RATE + square / 2))
        assert stats.kstest(found[name].numpy() ** -2, law.cdf).pvalue > 5e-4
        assert torch.equal(found[name], again[name])
        expected = (RATE + square / 2) / (SHAPE + count / 2)
        assert bound.fitted_scales(weights)[name].item() == pytest.approx(math.sqrt(expected))


def test_a_single_weight_has_a_student_t_prior():
    net = nn.Linear(1, 1, bias=False).double()
    bound = BoundPrior(learned(), net, {"weight": net.weight})
    weights = torch.linspace(-9, 9, 19).double()[:, None]
    law = stats.t(2 * SHAPE, scale=math.sqrt(RATE / SHAPE))
    np.testing.assert_allclose(bound.energy(weights), -law.logpdf(weights[:, 0].numpy()))


def test_energy_at_mode():
    bound = bind(GROUPS["apart in the vector"][0])
    mode = bound.energy(torch.zeros(19).double()).item()
    assert bound.energy_at_mode() == pytest.approx(mode, rel=1e-5)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: Learned(shape=0.0), "shape= is a number greater than 0; got 0.0"),
        (lambda: Learned(rate=-1.0), "rate= .*got -1.0"),
        (lambda: Learned(by="unit"), "by=.*'unit'"),
        (lambda: Laplace(scale=Learned()), r"Laplace takes .* number; .*Normal\(scale=Learned\(\)"),
        (lambda: StudentT(scale=Learned()), "StudentT takes"),
        (lambda: ScaleMixture(scale=Learned()), "ScaleMixture takes"),
        (lambda: check_prior(Learned(), ["w"]), "prior= is a prior such as"),
        (lambda: Normal(scale=Learned), "scale= is a number"),
    ],
)
def test_bad_arguments(make_it, message):
    with pytest.raises(ConfigurationError, match=message):
        make_it()


def test_recipe():
    prior = {"*.bias": Normal(), "*": Normal(scale=Learned(rate=2.0, by="layer"), fan_in=True)}
    import lightning_bnn.strategies  # noqa: F401 - it lets recipes name priors

    made = make(recipe(prior))
    assert repr(made) == repr(prior)
    assert repr(eval(repr(prior["*"]))) == repr(prior["*"])


def test_scales_of_a_posterior_read_from_elsewhere(tmp_path):
    """Without the strategy, of the tensors that vary; a centre that is not known is refused."""
    net = nn.Linear(50, 1)
    draws = [{"weight": torch.full((1, 50), value)} for value in (0.1, 1.0, 10.0)]
    DrawsPosterior(net, Gaussian(0.1), draws).save(tmp_path / "posterior")
    posterior = DrawsPosterior.load(tmp_path / "posterior")
    prior = {"bias": Normal(), "*": Normal(scale=Learned())}
    scales = prior_scales(posterior, prior)
    assert list(scales) == ["weight"]
    assert torch.equal(scales["weight"], prior_scales(posterior, prior, draws=3)["weight"])
    torch.testing.assert_close(scales["weight"], torch.tensor([0.1, 1.0, 10.0]), rtol=0.5, atol=0.0)
    assert not torch.equal(scales["weight"], prior_scales(posterior, prior, seed=1)["weight"])
    for wrong, message in (
        (Normal("pretrained", Learned()), "prior=strategy.prior"),
        (Normal(), "no scale that is learned"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            prior_scales(posterior, wrong)
