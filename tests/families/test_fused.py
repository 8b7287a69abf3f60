"""The compiled draw: its noise, its KL and its gradients against float64 and autograd."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal as TorchNormal
from torch.distributions import kl_divergence

from lightning_bnn.families.mean_field import MeanField
from lightning_bnn.families.workspace import Workspace
from lightning_bnn.native import library
from lightning_bnn.priors import BoundPrior, Laplace, Learned, Normal, Prior
from lightning_bnn.random import NormalStream
from tests.native.compiler import needs_compiler
from tests.random.normal_checks import check_distribution, check_moments

pytestmark = needs_compiler

CHUNK = 8192  # of mean_field.c: numbers that share one start of the generator
KEY = (2**62 + 12345, 987654321)


def noise_of(key: tuple[int, int], size: int) -> Tensor:
    """The noise itself: a draw at mean 0 and scale exp(0) = 1."""
    weights, zeros = torch.empty(size), torch.zeros(size)
    library.load().draw(weights, zeros, zeros, library.Slices([size], [0.0], [1.0]), key)
    return weights


def make(
    prior: Prior | dict[str, Prior] | None = None, **options: object
) -> tuple[MeanField, BoundPrior]:
    """A family of 10,346 weights, more than a chunk, in six tensors of odd sizes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(89, 99), nn.Linear(99, 11), nn.Linear(11, 30))
    tensors = dict(net.named_parameters())
    options = {"initial_scale": 0.05, **options}
    family = MeanField(options.get("scale_form", "exp")).bind(tensors, options["initial_scale"])
    with torch.no_grad():  # not all alike
        family.rho.add_(0.5 * torch.randn_like(family.rho))
    return family, BoundPrior(prior or Normal(), net, tensors)


def with_key(
    family: MeanField, prior: BoundPrior, key: tuple[int, int] = KEY, index: int = 0
) -> Workspace:
    space = family.workspace(index)
    family.draw_noise(space, NormalStream(1), prior)
    assert space.key is not None
    space.key = key
    return space


# -------------------------------------------------------------------- the noise


def test_the_noise_is_standard_normal():
    numbers = noise_of(KEY, 1 << 22)
    lags = (1, 2, 8, 15, 16, 17, 31, 32, 33, 512)
    check_moments(numbers, [*lags, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 16, 2 * CHUNK, 3 * CHUNK])
    check_distribution(numbers)


def test_the_first_numbers_of_chunks_are_normal_too():
    """What the seeding decides most directly: the first block of 32 in 4,000 chunks and keys.

    Per place in the block, the mean and the mean square over all of them within 5 standard
    errors: 64 figures, a false alarm in 27,000. Correlations between places: 6 of them in 496.
    """
    rows = [noise_of((key, 3 * key), 40 * CHUNK).view(40, CHUNK)[:, :32] for key in range(100)]
    first = torch.cat(rows).double()
    count = len(first)
    assert (first.mean(0).abs() * math.sqrt(count)).max() < 5
    assert (((first**2).mean(0) - 1).abs() * math.sqrt(count / 2)).max() < 5
    correlations = torch.corrcoef(first.T) - torch.eye(32, dtype=torch.float64)
    assert correlations.abs().max() < 6 / math.sqrt(count)


@pytest.mark.parametrize("step", [1, 2**32, 0x9E3779B97F4A7C15])
def test_keys_that_are_alike_give_noise_that_is_not(step: int):
    """Also keys one half of which differs by the increment of the seeding."""
    halves = [(i * step) % 2**64 for i in range(1, 20)]
    keys = [(half, 2**63) for half in halves] + [(2**63, half) for half in halves]
    rows = torch.stack([noise_of(key, 4096) for key in keys]).double()
    correlations = torch.corrcoef(rows) - torch.eye(38, dtype=torch.float64)
    # 703 pairs, 6 standard errors: a false alarm in 700,000
    assert correlations.abs().max() < 6 / 64
    # nor does one begin, a lane or a chunk later, as another
    firsts = torch.stack([noise_of(key, 2 * CHUNK) for key in keys])
    assert len(firsts.unique()) > 0.95 * len(noise_of((1, 2), firsts.numel()).unique())


def test_noise_is_decided_by_key_and_place_alone():
    long = noise_of(KEY, 3 * CHUNK)
    for size in (1, 31, 33, 511, 513, CHUNK - 1, CHUNK, CHUNK + 1):
        assert torch.equal(noise_of(KEY, size), long[:size])
    assert not torch.equal(noise_of((KEY[0], KEY[1] + 1), 100), long[:100])
    assert not torch.equal(noise_of((KEY[0] + 1, KEY[1]), 100), long[:100])


# -------------------------------------------------------------------- the draw


def test_the_scale_is_the_exponential():
    size = 200_000
    rho = torch.linspace(-87, 87, size)
    mean, weights = torch.zeros(size), torch.empty(size)
    slices = library.Slices([size], [0.0], [1.0])
    library.load().draw(weights, mean, rho, slices, KEY)
    noise = noise_of(KEY, size).double()
    found = weights.double() / noise
    normal = weights.abs() > 1e-37  # products below have fewer digits
    torch.testing.assert_close(found[normal], rho.double().exp()[normal], rtol=2e-7, atol=0)


def test_extreme_scales_stay_numbers_and_nan_stays_nan():
    rho = torch.tensor([-math.inf, -1e4, 1e4, math.inf, math.nan])
    mean, weights = torch.ones(5), torch.empty(5)
    kl, _ = library.load().draw(weights, mean, rho, library.Slices([5], [0.0], [1.0]), KEY)
    assert torch.equal(weights[:2], mean[:2])
    assert weights[2:4].abs().min() > 1e37
    assert weights[4].isnan()
    assert not math.isfinite(kl)


PRIORS = {
    "around zero": Normal(0.0, 0.3),
    "around a number": Normal(-0.4, 0.3),
    "by fan-in": Normal(0.1, 2.0, fan_in=True),
    "of every tensor": {
        "0.weight": Normal(0.2, 0.5),
        "*.bias": Normal(-1.0, 2.0),
        "1.*": Normal(0.0, 0.1, fan_in=True),
        "*": Normal(),
    },
    "learned": Normal(scale=Learned()),
    "learned by layer": {
        "0.bias": Normal(-1.0, 2.0),
        "*": Normal(0.2, Learned(2.0, 0.5, by="layer"), fan_in=True),
    },
}


def reference(family: MeanField, bound: BoundPrior, gradient: Tensor, weight: float):
    """Draw, KL and gradients by autograd in float64, by torch.distributions."""
    mean = family.mean.detach().double().requires_grad_()
    rho = family.rho.detach().double().requires_grad_()
    draw = mean + rho.exp() * noise_of(KEY, len(mean)).double()
    locs, scales = torch.empty(2, len(mean), dtype=torch.float64)
    for start, stop, _, loc, scale in bound.segments():
        locs[start:stop], scales[start:stop] = loc, scale
    kl = 0.0
    groups = [] if bound.learned is None else bound.learned.groups
    segments = bound.segments()
    own = [segment for segment in segments if isinstance(segment[2].scale, Learned)]
    for group in groups:  # the KL of w and τ at q(τ) = Gamma(k, b + E[s]/2)
        parts = [slice(*own[tensor][:2]) for tensor in group.tensors]
        squares = torch.cat(
            [((mean - locs) ** 2 + (2 * rho).exp())[p] / scales[p] ** 2 for p in parts]
        )
        k, rate = group.shape + len(squares) / 2, group.rate + squares.sum() / 2
        kl = kl + torch.distributions.kl_divergence(
            torch.distributions.Gamma(torch.tensor(k).double(), rate),
            torch.distributions.Gamma(
                *torch.tensor([group.shape, group.rate], dtype=torch.float64)
            ),
        )
        log_tau = torch.digamma(torch.tensor(k).double()) - rate.log()
        for p in parts:
            variance = ((mean - locs) ** 2 + (2 * rho).exp())[p] / scales[p] ** 2 * k / rate
            log_ratio = 2 * rho[p] - 2 * scales[p].log() + log_tau
            kl = kl + 0.5 * (variance - 1 - log_ratio).sum()
    for start, stop, *_ in (segment for segment in segments if segment not in own):
        part = slice(start, stop)
        kl = (
            kl
            + kl_divergence(
                TorchNormal(mean[part], rho[part].exp()), TorchNormal(locs[part], scales[part])
            ).sum()
        )
    by_mean, by_rho = torch.autograd.grad(
        (draw * gradient.double()).sum() + weight * kl, (mean, rho)
    )
    return draw.detach(), kl.detach(), by_mean, by_rho


def close(found: Tensor, expected: Tensor) -> None:
    """To 1e-5 of each number, and of cancelled sums to 1e-6 of the largest."""
    bound = 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=bound)


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
@pytest.mark.parametrize("weight", [0.0, 1e-4, 1.0])
def test_draw_kl_and_gradients(prior: Prior | dict[str, Prior], weight: float):
    family, bound = make(prior)
    weights, kl = family.draw_in(with_key(family, bound), bound)
    flat = torch.cat([part.reshape(-1) for part in weights.values()])
    gradient = torch.randn(len(flat))
    draw, expected_kl, by_mean, by_rho = reference(family, bound, gradient, weight)
    close(flat, draw)
    assert kl.item() == pytest.approx(expected_kl.item(), rel=1e-6)
    ((flat * gradient).sum() + weight * kl).backward()
    close(family.mean.grad, by_mean)
    close(family.rho.grad, by_rho)
    assert family.mean.grad.dtype == kl.dtype == torch.float32


def test_a_tensor_that_takes_no_part():
    family, bound = make()
    weights, kl = family.draw_in(with_key(family, bound), bound)
    gradient = torch.zeros(family.layout.size)
    family.layout.views(gradient)["1.weight"].fill_(1.0)
    with pytest.warns(UserWarning, match=r"\(5 in all\) took no part"):
        (weights["1.weight"].sum() + 0.5 * kl).backward()
    _, _, by_mean, by_rho = reference(family, bound, gradient, 0.5)
    close(family.mean.grad, by_mean)
    close(family.rho.grad, by_rho)


def spread(tensor: Tensor) -> Tensor:
    """The same numbers with gaps between them."""
    wide = torch.full((*tensor.shape, 3), math.nan)
    wide[..., 1] = tensor
    return wide[..., 1]


@pytest.mark.parametrize(
    "arrange", [lambda g: g.t().contiguous().t(), spread, lambda g: g[:1].expand_as(g)]
)
def test_gradients_that_are_not_in_order_in_memory(arrange):
    family, bound = make()
    weights, _ = family.draw_in(with_key(family, bound), bound)
    arranged = [arrange(torch.randn_like(part)) for part in weights.values()]
    assert not arranged[0].is_contiguous()
    torch.autograd.backward(list(weights.values()), arranged)
    gradient = torch.cat([part.reshape(-1) for part in arranged])
    _, _, by_mean, by_rho = reference(family, bound, gradient, 0.0)
    close(family.mean.grad, by_mean)
    close(family.rho.grad, by_rho)


@pytest.mark.parametrize("size", [1, 31, 32, 33, 511, 512, 513, CHUNK - 1, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("count", [1, 4])
def test_any_size_and_nothing_else_is_written(size: int, count: int):
    """Tensors without elements among them, and neighbours that must stay as they are."""
    generator = torch.Generator().manual_seed(size)
    cuts = torch.randint(size + 1, (count - 1,), generator=generator).sort().values.tolist()
    ends = [0, *cuts, size]
    sizes = [0, *(stop - start for start, stop in itertools.pairwise(ends)), 0]
    locs, scales = [0.1 * i for i in range(count + 2)], [1.0 + i for i in range(count + 2)]
    slices = library.Slices(sizes, locs, scales)
    mean, rho, gradient = torch.randn(3, size, generator=generator)
    rooms = torch.full((3, size + 64), 7.0)
    weights, by_mean, by_rho = (room[32 : 32 + size] for room in rooms)
    kl, sums = library.load().draw(weights, mean, rho, slices, KEY)
    library.load().gradients(
        by_mean, by_rho, gradient.split(sizes), 0.5, mean, rho, weights, slices
    )
    assert (rooms[:, :32] == 7).all()
    assert (rooms[:, 32 + size :] == 7).all()
    m, r, g = (values.double() for values in (mean, rho, gradient))
    repeats = torch.tensor(sizes)
    loc = torch.tensor(locs, dtype=torch.float64).repeat_interleave(repeats)
    precision = torch.tensor(scales, dtype=torch.float64).repeat_interleave(repeats) ** -2
    noise = noise_of(KEY, size).double()
    squares = (m - loc) ** 2 + (2 * r).exp()
    close(weights, m + r.exp() * noise)
    expected = [part.sum().item() for part in squares.split(sizes)]
    assert sums == pytest.approx(expected, rel=1e-6)
    assert kl == pytest.approx(float((precision * squares / 2 - r).sum()), rel=1e-6, abs=1e-5)
    close(by_mean, g + 0.5 * precision * (m - loc))
    close(by_rho, g * r.exp() * noise + 0.5 * (precision * (2 * r).exp() - 1))


def test_threads_change_no_bit():
    family = MeanField().bind({"a": torch.randn(300_001), "b": torch.randn(123, 777)}, 0.1)
    net = nn.Module()
    net.a, net.b = nn.Parameter(torch.zeros(300_001)), nn.Parameter(torch.zeros(123, 777))
    bound = BoundPrior(Normal(0.1, 0.5), net, dict(net.named_parameters()))
    gradient = torch.randn(family.layout.size)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert library._threads(family.layout.size) == threads
            family.zero_grad()
            weights, kl = family.draw_in(with_key(family, bound), bound)
            outputs = list(weights.values())
            inputs = list(family.layout.views(gradient).values())
            torch.autograd.backward([*outputs, kl], [*inputs, torch.tensor(0.3)])
            flat = torch.cat([part.detach().reshape(-1) for part in outputs])
            found.append((flat, kl.detach(), family.mean.grad.clone(), family.rho.grad.clone()))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


# -------------------------------------------------------------------- where it serves


class OwnNormal(Normal):
    """A user's prior may override anything."""


@pytest.mark.parametrize(
    ("prior", "options", "dtype"),
    [
        (Laplace(), {}, torch.float32),
        ({"*.bias": Laplace(), "*": Normal()}, {}, torch.float32),
        (Normal("pretrained"), {}, torch.float32),
        (OwnNormal(), {}, torch.float32),
        (Normal(), {"scale_form": "softplus"}, torch.float32),
        (Normal(), {}, torch.float64),
        (Normal(), {}, torch.bfloat16),
    ],
)
def test_all_else_takes_the_ordinary_way(prior, options, dtype):
    """With the numbers that the stream gives, as ever."""
    family, bound = make(prior, **options)
    family.to(dtype)
    bound.to(dtype)
    space = family.workspace()
    family.draw_noise(space, NormalStream(3), bound)
    assert space.key is None
    assert space.filled
    expected = NormalStream(3).fill_(torch.empty(family.layout.size, dtype=dtype))
    assert torch.equal(space.noise, expected)


# -------------------------------------------------------------------- autograd's rules


def test_weights_that_a_network_saved_are_guarded_by_autograd():
    family, bound = make()
    family.draw_in(with_key(family, bound), bound)
    for subject in (family, copy.deepcopy(family)):  # a copy must not keep views of its own
        space = with_key(subject, bound)
        weights, _ = subject.draw_in(space, bound)
        loss = weights["0.weight"].square().sum()
        subject.draw_in(space, bound)
        with pytest.raises(RuntimeError, match=r"inplace operation|written over"):
            loss.backward()
        assert weights["0.weight"]._version == space.weights._version
        _, kl = subject.draw_in(space, bound)
        family.draw_noise(space, NormalStream(2), bound)
        with pytest.raises(RuntimeError, match="written over before backward"):
            kl.backward()


def test_a_parameter_that_moved_before_backward_raises():
    family, bound = make()
    weights, _ = family.draw_in(with_key(family, bound), bound)
    with torch.no_grad():
        family.mean.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace operation"):
        weights["0.weight"].sum().backward()
