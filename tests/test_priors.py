"""Priors against SciPy, quadrature and autograd; patterns, fan-in and the bound prior."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

from lightning_bnn import VariationalBNN
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import (
    BoundPrior,
    Laplace,
    Learned,
    Normal,
    Prior,
    ScaleMixture,
    StudentT,
    check_prior,
    fan_in,
)

PRIORS = [Normal(), Laplace(), StudentT(df=3.0), ScaleMixture(narrow=0.1, mix=0.3)]
LOC, SCALE = 0.7, 0.4


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def scipy_log_prob(prior, weights):
    if isinstance(prior, Normal):
        return stats.norm(LOC, SCALE).logpdf(weights)
    if isinstance(prior, Laplace):
        return stats.laplace(LOC, SCALE).logpdf(weights)
    if isinstance(prior, StudentT):
        return stats.t(prior.df, LOC, SCALE).logpdf(weights)
    wide, slim = stats.norm(LOC, SCALE), stats.norm(LOC, SCALE * prior.narrow)
    return np.logaddexp(
        math.log(prior.mix) + wide.logpdf(weights), math.log(1 - prior.mix) + slim.logpdf(weights)
    )


@pytest.mark.parametrize("prior", PRIORS, ids=repr)
class TestEachPrior:
    def test_log_prob_against_scipy(self, prior):
        weights = torch.linspace(-30, 30, 241, dtype=torch.float64)
        expected = scipy_log_prob(prior, weights.numpy())
        np.testing.assert_allclose(prior.log_prob(weights, LOC, SCALE), expected, rtol=1e-12)
        located = prior.log_prob(weights, torch.full_like(weights, LOC), SCALE)
        np.testing.assert_allclose(located, expected, rtol=1e-12)

    def test_far_tails_stay_finite_in_float32(self, prior):
        weights = torch.tensor([-1e4, 0.0, 1e4], requires_grad=True)
        values = prior.log_prob(weights, 0.0, 0.01)
        values.sum().backward()
        assert values.isfinite().all()
        assert weights.grad.isfinite().all()

    def test_expected_energy_against_quadrature(self, prior):
        mean, sd = double(-1.0, 0.7, 0.75, 3.0), double(0.5, 0.2, 1e-3, 2.0)
        draw = double(-0.5, 0.9, 0.75, 1.0)
        found = prior.expected_energy(mean, sd, draw, LOC, SCALE)
        if not isinstance(prior, (Normal, Laplace)):  # no closed form: the estimate at the draw
            np.testing.assert_allclose(found, -scipy_log_prob(prior, draw.numpy()).sum())
            return
        expected = 0.0
        for m, s in zip(mean.tolist(), sd.tolist(), strict=True):

            def integrand(w, m=m, s=s):
                return -stats.norm(m, s).pdf(w) * scipy_log_prob(prior, w)

            edges = sorted({m - 12 * s, m + 12 * s, min(max(LOC, m - 12 * s), m + 12 * s)})
            for a, b in itertools.pairwise(edges):
                expected += integrate.fixed_quad(integrand, a, b, n=200)[0]
        assert found.item() == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("loc", [0.0, LOC, "pretrained"])
    def test_gradients_against_autograd(self, prior, loc):
        """Of the default path and of the ones written by hand, with something there before."""
        mean, sd, noise, pretrained, *before = torch.randn(6, 9, dtype=torch.float64)
        sd = sd.exp()
        loc = pretrained if loc == "pretrained" else loc
        weight = torch.tensor(0.3, dtype=torch.float64)
        mean_gradient, sd_gradient = (gradient.clone() for gradient in before)
        prior.add_energy_gradients(mean_gradient, sd_gradient, weight, mean, sd, noise, loc, SCALE)
        for tensor in (mean, sd):
            tensor.requires_grad_()
        energy = prior.expected_energy(mean, sd, mean + sd * noise, loc, SCALE)
        by_mean, by_sd = torch.autograd.grad(energy, (mean, sd))
        close = {"rtol": 0, "atol": 1e-10}
        torch.testing.assert_close(mean_gradient, before[0] + weight * by_mean, **close)
        torch.testing.assert_close(sd_gradient, before[1] + weight * by_sd, **close)


class TestAPriorOfOnesOwn:
    """``log_prob`` is enough, even where it gives autograd little to do."""

    class Flat(Prior):
        def log_prob(self, weights, loc, scale):
            return torch.zeros_like(weights)

    class OfTheMeanOnly(Prior):
        def log_prob(self, weights, loc, scale):
            return -((weights - loc) ** 2)

        def expected_energy(self, mean, sd, draw, loc, scale):
            return ((mean - loc) ** 2).sum()

    @pytest.mark.parametrize(("prior", "slope"), [(Flat(), 0.0), (OfTheMeanOnly(), 2.0)])
    def test_gradients(self, prior, slope):
        mean, by_mean, by_sd = torch.randn(3), torch.zeros(3), torch.zeros(3)
        one = torch.ones(3)
        prior.add_energy_gradients(by_mean, by_sd, torch.tensor(1.0), mean, one, one, 0.0, 1.0)
        torch.testing.assert_close(by_mean, slope * mean)
        assert torch.equal(by_sd, torch.zeros(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Normal(scale=0.0), "scale= is a number greater than 0; got 0.0"),
        (lambda: Normal(scale=math.nan), "got nan"),
        (lambda: Normal(loc="trained"), "number or 'pretrained'; got 'trained'"),
        (lambda: Normal(loc=math.nan), "got nan"),
        (lambda: Normal(1.0), r"Normal\(1.0\) would be a prior around 1.0.*Normal\(0.0, 1.0\)"),
        (lambda: StudentT(-2, df=3.0), r"StudentT\(-2\) would be a prior around -2"),
        (lambda: StudentT(df=0.0), "df= .*got 0.0"),
        (lambda: ScaleMixture(narrow=1.0), "narrow= .*got 1.0"),
        (lambda: ScaleMixture(mix=0.0), "mix= .*got 0.0025 and 0.0.*use Normal"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_repr_can_be_evaluated():
    for prior in (*PRIORS, Laplace("pretrained", 2.0, fan_in=True)):
        assert repr(eval(repr(prior))) == repr(prior)


# ---------------------------------------------------------------- fan-in


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.Linear(7, 3), {"weight": 7, "bias": 1}),
        (nn.Bilinear(2, 5, 3), {"weight": 10, "bias": 1}),
        (nn.Conv2d(6, 8, (3, 5)), {"weight": 90, "bias": 1}),
        (nn.Conv2d(6, 8, (3, 5), groups=2), {"weight": 45}),
        (nn.ConvTranspose2d(6, 8, (3, 5)), {"weight": 90, "bias": 1}),
        (nn.ConvTranspose2d(6, 8, (3, 5), groups=2), {"weight": 45}),
        (nn.Embedding(50, 7), {"weight": 1}),
        (nn.LayerNorm(9), {"weight": 1, "bias": 1}),
        (
            nn.LSTM(3, 8, num_layers=2),
            {"weight_ih_l0": 3, "weight_hh_l0": 8, "weight_ih_l1": 8, "bias_hh_l1": 1},
        ),
        (
            nn.MultiheadAttention(6, 2),
            {"in_proj_weight": 6, "in_proj_bias": 1, "out_proj.weight": 6},
        ),
        (
            nn.MultiheadAttention(6, 2, kdim=4, vdim=5),
            {"q_proj_weight": 6, "k_proj_weight": 4, "v_proj_weight": 5},
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_fan_in(layer, expected):
    assert {name: fan_in(layer, name) for name in expected} == expected
    assert {name: fan_in(nn.Sequential(layer), f"0.{name}") for name in expected} == expected


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_fan_in_keeps_the_variance_of_the_output(transposed, groups):
    """Under a prior N(0, 1/fan-in) an output of unit inputs has variance 1.

    Over 40,000 weights sets the sample variance is within 5 standard errors (0.035) but for one
    seed in 10⁶; with a stride of 1 and no padding the middle of the output sees every input.
    """
    make = nn.ConvTranspose1d if transposed else nn.Conv1d
    layer = make(4, 2, 3, groups=groups, bias=False)
    scale = 1 / math.sqrt(fan_in(layer, "weight"))
    with torch.no_grad():
        weights = scale * torch.randn(40_000, *layer.weight.shape)
        run = torch.func.vmap(
            lambda weight: torch.func.functional_call(layer, {"weight": weight}, torch.ones(4, 7))
        )
        outputs = run(weights)[:, 0, 3]
    assert abs(outputs.var().item() - 1) < 0.035


# ---------------------------------------------------------------- bound to a network


def network():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()


def bind(prior, net=None):
    net = net or network()
    return BoundPrior(prior, net, dict(net.named_parameters()))


def test_segments_follow_patterns_and_fan_in():
    bias, wide, rest = Laplace(), Normal(0.0, 3.0, fan_in=True), StudentT()
    found = bind({"*.bias": bias, "[02].*": wide, "*": rest}).segments()  # the first match decides
    assert [(a, b, prior, scale) for a, b, prior, _, scale in found] == [
        (0, 12, wide, 3 / math.sqrt(4)),
        (12, 15, bias, 1.0),
        (15, 18, rest, 1.0),
        (18, 21, bias, 1.0),
        (21, 27, wide, 3 / math.sqrt(3)),
        (27, 29, bias, 1.0),
    ]


def test_a_name_without_a_prior():
    with pytest.raises(ConfigurationError, match=r"'1.weight': .* \['0.\*', '2.\*'\].*last .*'\*'"):
        bind({"0.*": Normal(), "2.*": Normal()})


def test_energies_are_sums_over_the_segments():
    net = network()
    priors = {
        "0.*": Normal("pretrained", 0.5, fan_in=True),
        "*.bias": Laplace(0.2, 1.0),
        "*": StudentT(),
    }
    prior = bind(priors, net)
    start = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    flat = torch.randn(29, dtype=torch.float64)
    expected = 0.0
    for name, piece, here in zip(
        [name for name, _ in net.named_parameters()],
        flat.split([p.numel() for p in net.parameters()]),
        start.split([p.numel() for p in net.parameters()]),
        strict=True,
    ):
        if name.startswith("0."):
            scale = 0.5 / math.sqrt(4) if name == "0.weight" else 0.5
            density = stats.norm(here.numpy(), scale)
        else:
            density = stats.laplace(0.2) if name.endswith("bias") else stats.t(4.0)
        expected -= density.logpdf(piece.numpy()).sum()
    assert prior.energy(flat).item() == pytest.approx(expected, rel=1e-12)
    tiny = torch.full_like(flat, 1e-9)
    assert prior.expected_energy(flat, tiny, flat).item() == pytest.approx(expected, rel=1e-9)

    sd, noise = torch.rand(2, 29, dtype=torch.float64)
    weight, gradients = torch.tensor(0.7, dtype=torch.float64), torch.zeros(2, 29).double()
    prior.add_energy_gradients(*gradients, weight, flat, sd, noise)
    flat.requires_grad_()
    sd.requires_grad_()
    energy = weight * prior.expected_energy(flat, sd, flat + sd * noise)
    for found, exact in zip(gradients, torch.autograd.grad(energy, (flat, sd)), strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


def test_the_pretrained_centre_is_a_copy_and_in_the_state_dict():
    net = network()
    prior = bind({"0.*": Normal("pretrained"), "*": Normal()}, net)
    centre = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).clone()
    with torch.no_grad():
        net[0].weight.zero_()
    assert torch.equal(prior.pretrained, centre)
    fresh = bind({"0.*": Normal("pretrained"), "*": Normal()})
    fresh.load_state_dict(prior.state_dict())
    assert torch.equal(fresh.segments()[0][3], centre[:15])
    assert not bind(Normal()).state_dict()
    assert prior.float().segments()[0][3].dtype == torch.float32


# ---------------------------------------------------------------- what a user gives

NAMES = [name for name, _ in network().named_parameters()]


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ({"*.bais": Normal(), "*": Normal()}, r"'\*.bais' matches no trainable .*'0.weight'"),
        ({"*": Normal(), "fc.*": Normal()}, r"'fc.\*' matches no"),
        ({"0.*": Normal(), "*": Normal(), "*.bias": Laplace()}, r"'\*.bias' comes after '\*'"),
        ({1: Normal()}, r"mapping from name patterns to priors; got \{1: Normal"),
        ({"*": Normal}, r"mapping from name patterns to priors; got \{'\*': <class"),
        (Normal, r"prior= is a prior such as Normal\(0.0, 1.0\), or a mapping .* got <class"),
        (0.1, "got 0.1"),
    ],
)
def test_priors_that_cannot_be_meant(prior, message):
    with pytest.raises(ConfigurationError, match=message):
        check_prior(prior, NAMES)
    with pytest.raises(ConfigurationError, match=message):
        VariationalBNN(network(), Gaussian(1.0), prior)


def test_a_pattern_may_match_only_bayesian_or_only_point_estimated_weights():
    prior = {"0.*": Normal(), "1.*": Laplace(), "*": StudentT()}
    bnn = VariationalBNN(network(), Gaussian(1.0), prior, bayesian="0.*")
    assert [type(s[2]) for s in bnn.prior.segments()] == [Normal]
    assert [type(s[2]) for s in bnn.point_prior.segments()] == [Laplace, StudentT]


@pytest.mark.parametrize(
    "prior", [Normal(0.2, 0.7), Laplace(0.2, 0.7), StudentT(0.2, 0.7), ScaleMixture(0.2, 0.7)]
)
def test_a_power_multiplies_energies_up_to_a_constant(prior: Prior) -> None:
    """Gradients are those of the plain prior times the power, in every form that is asked for."""
    net = nn.Linear(4, 2).double()
    own = dict(net.named_parameters())
    plain, cold = BoundPrior(prior, net, own), BoundPrior(prior, net, own)
    cold.power = 3.0
    torch.manual_seed(0)
    mean, noise = torch.randn(2, 10, dtype=torch.float64)
    sd, weight = torch.rand(10, dtype=torch.float64) + 0.1, torch.tensor(0.5, dtype=torch.float64)
    weights = torch.stack([mean, noise])
    ratio = (cold.energy(weights[0]) - cold.energy(weights[1])) / (
        plain.energy(weights[0]) - plain.energy(weights[1])
    )
    torch.testing.assert_close(ratio, torch.tensor(3.0, dtype=torch.float64))
    gradients = []
    for bound, factor in ((plain, 3.0), (cold, 1.0)):
        by_weights, by_mean, by_sd = torch.zeros(3, 10, dtype=torch.float64)
        bound.add_energy_gradient(by_weights, factor * weight, mean)
        bound.add_energy_gradients(by_mean, by_sd, factor * weight, mean, sd, noise)
        live = mean.clone().requires_grad_()
        energy = factor * bound.expected_energy(live, sd, torch.addcmul(live, sd, noise))
        gradients.append([by_weights, by_mean, by_sd, *torch.autograd.grad(energy, live)])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("prior", PRIORS, ids=repr)
def test_samples_have_the_distribution(prior):
    """Kolmogorov and Smirnov against the integral of the density, at 1e-4, of 4,000 draws."""
    generator = torch.Generator().manual_seed(0)
    drawn = prior.sample((4000,), LOC, SCALE, generator)
    assert drawn.dtype == torch.float64
    places = torch.linspace(-40, 40, 800_001, dtype=torch.float64)
    density = prior.log_prob(places, LOC, SCALE).exp()
    cdf = torch.cat([density.new_zeros(1), torch.cumulative_trapezoid(density, places)])
    result = stats.kstest(drawn.numpy(), lambda x: np.interp(x, places.numpy(), cdf.numpy()))
    assert result.pvalue > 1e-4


def test_samples_of_a_bound_prior():
    """Scales by tensor and fan-in, locations, and learned scales that tensors share.

    4,000 draws: means within 5 standard errors, variances within 5 · √(2/4000) of a Gaussian.
    """
    net = nn.Linear(4, 3).double()
    tensors = dict(net.named_parameters())
    priors = {"bias": Normal("pretrained", 0.5), "*": Normal(fan_in=True)}
    bound = BoundPrior(priors, net, tensors)
    drawn = bound.sample(4000, torch.Generator().manual_seed(1))
    assert drawn.shape == (4000, 15)
    expected = np.concatenate([np.zeros(12), net.bias.detach().numpy()])
    np.testing.assert_allclose(drawn.mean(0), expected, atol=5 * 0.5 / 4000**0.5)
    np.testing.assert_allclose(drawn.std(0), 0.5, rtol=2.5 * (2 / 4000) ** 0.5)
    assert abs(torch.corrcoef(drawn.T) - torch.eye(15)).max() < 6 / 4000**0.5
    learned = BoundPrior(Normal(scale=Learned(shape=3.0, rate=2.0, by="layer")), net, tensors)
    drawn = learned.sample(4000, torch.Generator().manual_seed(2))
    # each weight is Student-t of 6 degrees of freedom and scale √(2/3)
    for column in (0, 14):
        law = stats.t(6, 0, (2 / 3) ** 0.5)
        assert stats.kstest(drawn[:, column].numpy(), law.cdf).pvalue > 1e-4
    # those of one layer are large together
    assert torch.corrcoef(drawn.square().log().T)[0, 14] > 0.05
