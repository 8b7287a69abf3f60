"""The smaller network computes what the zeroed one does: mean network, draws and predictions."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.posteriors import (
    DrawsPosterior,
    GaussianPosterior,
    LowRankPosterior,
    MixturePosterior,
    Posterior,
)
from lightning_bnn.posteriors.draws import unstack
from lightning_bnn.pruning import masked, mean_network, prune
from lightning_bnn.pruning.compact import compact
from tests.pruning.posteriors import gaussian_of, randomised


class MyNet(nn.Module):
    """A network of one's own, with a branch of two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 6, 3)
        self.left, self.right = nn.Linear(6 * 4, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.one(x)))
        left = nn.functional.max_pool2d(self.two(x).tanh(), 2)
        return self.left(left.view(left.size(0), -1)) + self.right(x.mean((2, 3)))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 20), nn.BatchNorm1d(20), nn.ReLU(),
        nn.Linear(20, 16), nn.GELU(), nn.Linear(16, 3),
    )  # fmt: skip


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2, padding=1),
        nn.Conv2d(16, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24, affine=False), nn.ReLU(),
        nn.Flatten(), nn.Linear(24 * 16, 32), nn.ReLU(), nn.Linear(32, 3),
    )  # fmt: skip


def inverted() -> nn.Module:
    block = torchvision.models.mobilenetv2.InvertedResidual
    return nn.Sequential(
        nn.Conv2d(1, 8, 1), block(8, 8, 1, 4), block(8, 8, 2, 4), nn.Flatten(), nn.Linear(72, 3)
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "cnn": cnn, "my own": MyNet, "inverted residual": inverted,
}  # fmt: skip


def images(count: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 1, 6, 6, generator=generator, dtype=dtype)


def as_draws(posterior: Posterior, count: int = 3) -> DrawsPosterior:
    """Draws of a posterior as a posterior of stored draws."""
    sets = unstack(posterior.sample(count, torch.Generator().manual_seed(1)))
    return DrawsPosterior(posterior.net, posterior.likelihood, sets, posterior.fixed)


def check_same(zeroed: Posterior, inputs: Tensor, tolerance: float) -> Posterior:
    """The same mean network, and, for draws, the same functions draw by draw."""
    smaller = compact(zeroed)
    assert type(smaller) is type(zeroed)
    assert type(smaller.net) is type(zeroed.net)
    close = {"rtol": tolerance, "atol": tolerance}
    with torch.no_grad():
        ours, theirs = mean_network(smaller)(inputs), mean_network(zeroed)(inputs)
        torch.testing.assert_close(ours, theirs, **close)
        draws = as_draws(zeroed)
        one, other = unstack(draws.sample(3)), unstack(compact(draws).sample(3))
        for large, small in zip(one, other, strict=True):
            torch.testing.assert_close(
                functional_call(smaller.net, {**compact(draws).fixed, **small}, inputs),
                functional_call(zeroed.net, {**zeroed.fixed, **large}, inputs),
                **close,
            )
    return smaller


@pytest.mark.parametrize("name", NETS)
def test_removed_channels_leave_a_smaller_network_that_computes_the_same(name: str) -> None:
    posterior = gaussian_of(NETS[name]().double())
    zeroed = prune(posterior, 0.5, unit="channel", scope="layer")
    smaller = check_same(zeroed, images(), tolerance=1e-10)
    sizes = [sum(p.numel() for p in one.net.parameters()) for one in (zeroed, smaller)]
    assert sizes[1] < 0.55 * sizes[0]
    assert zeroed.net.training == smaller.net.training
    assert not any(p.requires_grad for p in smaller.net.parameters())


def test_a_resnet_shrinks_with_the_sums_of_its_blocks() -> None:
    torch.manual_seed(0)
    resnet = torchvision.models.resnet
    net = randomised(resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=3))
    mean = dict(net.named_parameters())
    sd = {name: torch.full_like(p, 0.01) for name, p in mean.items()}
    posterior = GaussianPosterior(net, Categorical(), mean, sd)
    zeroed = prune(posterior, 0.5, unit="channel", scope="layer")
    smaller = compact(zeroed)
    assert isinstance(smaller.net, torchvision.models.ResNet)
    assert smaller.net.layer4[0].conv1.out_channels == smaller.net.layer4[0].bn1.num_features == 256
    assert smaller.net.layer4[0].conv2.out_channels == smaller.net.fc.in_features == 256
    assert smaller.net.layer4[0].downsample[0].weight.shape == (256, 128, 1, 1)
    inputs = torch.randn(2, 3, 32, 32)
    ours, theirs = mean_network(smaller)(inputs), mean_network(zeroed)(inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


def test_low_rank_deviations_shrink_along_the_right_axes() -> None:
    net = mlp().double()
    like = gaussian_of(net)
    columns = {k: torch.randn(4, *v.shape, dtype=v.dtype) for k, v in like.mean.items()}
    posterior = LowRankPosterior(net, Categorical(), like.mean, like.sd, columns, scale=0.5)
    zeroed = prune(posterior, 0.5, unit="channel", scope="layer")
    smaller = check_same(zeroed, images(), tolerance=1e-10)
    kept = zeroed.mean["1.weight"].any(1)
    assert torch.equal(smaller.deviations["1.weight"], zeroed.deviations["1.weight"][:, kept])
    assert smaller.scale == 0.5


def test_a_mixture_keeps_what_is_alive_in_any_component() -> None:
    parts = [gaussian_of(mlp().double(), seed=seed) for seed in (0, 1)]
    zeroed = prune(MixturePosterior(parts), 0.5, unit="channel", scope="layer")
    smaller = compact(zeroed)
    alive = [part.mean["1.weight"].any(1) for part in zeroed.components]
    assert not torch.equal(*alive)
    assert smaller.net[1].out_features == int((alive[0] | alive[1]).sum()) < 20
    for mine, whole in zip(smaller.components, zeroed.components, strict=True):
        torch.testing.assert_close(
            mean_network(mine)(images()), mean_network(whole)(images()), rtol=1e-10, atol=1e-10
        )
        assert mine.pruned_from


def test_pruned_weights_leave_dead_units_behind() -> None:
    """At 98 % many units have no inputs or no readers, and others lose theirs with them."""
    net = nn.Sequential(
        nn.Linear(36, 60, bias=False), nn.ReLU(), nn.Linear(60, 60, bias=False), nn.ReLU(),
        nn.Linear(60, 3),
    )  # fmt: skip
    zeroed = prune(gaussian_of(net.double()), 0.98)
    rows = images().flatten(1)
    smaller = check_same(zeroed, rows, tolerance=1e-10)
    # by hand: paths of length two through the layers that are not zero
    one, two, three = (zeroed.mean[f"{i}.weight"].bool().double() for i in (0, 2, 4))
    first = (one.sum(1) > 0) & ((three @ two).sum(0) > 0)
    second = ((two @ one).sum(1) > 0) & (three.sum(0) > 0)
    assert smaller.net[0].out_features == max(1, int(first.sum()))
    assert smaller.net[2].out_features == max(1, int(second.sum()))
    assert smaller.net[0].out_features < 40


def test_a_bias_keeps_a_unit_alive_and_an_unread_one_goes_with_its_bias() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    posterior = gaussian_of(net)
    no_rows = masked(posterior, {"0.weight": torch.tensor([[1, 1], [0, 0], [1, 1]])})
    assert compact(no_rows).net[0].out_features == 3
    unread = masked(posterior, {"2.weight": torch.tensor([[1, 0, 1]])})
    assert compact(unread).net[0].out_features == 2
    check_same(unread, torch.randn(4, 2), tolerance=1e-5)


def test_an_offset_of_a_batch_norm_keeps_a_unit_alive() -> None:
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1))
    posterior = gaussian_of(net)
    keep = torch.tensor([True, False, True])
    masks = {"0.weight": keep[:, None].expand(3, 2)}
    widths = []
    for more in ((), ("1.bias",), ("1.bias", "1.running_mean"), ("1.bias", "1.weight")):
        zeroed = masked(posterior, {**masks, **dict.fromkeys(more, keep)})
        check_same(zeroed, torch.randn(4, 2), tolerance=1e-5)
        widths.append(compact(zeroed).net[0].out_features)
    assert widths == [3, 3, 2, 2]


def test_where_nothing_is_dead_or_nothing_can_be_followed_it_is_equal() -> None:
    for net in (MyNet(), nn.LSTM(3, 2)):
        posterior = gaussian_of(net)
        smaller = compact(posterior)
        for name, mean in posterior.mean.items():
            assert torch.equal(smaller.mean[name], mean)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x))) / self.two.in_features**0.5


def test_a_forward_that_reads_the_size_of_a_layer_is_refused() -> None:
    zeroed = prune(gaussian_of(Scaled()), 0.5, unit="channel")
    with pytest.raises(ConfigurationError, match=r"truediv\]\(args = \(%two, 2.8"):
        compact(zeroed)
    same = compact(gaussian_of(Scaled()))  # nothing gets smaller
    assert same.net.one.out_features == 8


@pytest.mark.parametrize("kind", ["gaussian", "draws", "mixture"])
def test_saved_and_loaded_with_the_original_network(kind: str, tmp_path: Path) -> None:
    posterior: Posterior = gaussian_of(cnn())
    if kind == "draws":
        posterior = as_draws(posterior)
    if kind == "mixture":
        posterior = MixturePosterior([gaussian_of(cnn(), seed=1), gaussian_of(cnn(), seed=2)])
    smaller = compact(prune(posterior, 0.6, unit="channel"))
    smaller.save(tmp_path)
    inputs = images(dtype=torch.float32)
    expected = smaller.predict(inputs, draws=4).mean
    for net in (cnn(), smaller.net):
        loaded = Posterior.load(tmp_path, net)
        assert repr(loaded.net) == repr(smaller.net)
        torch.testing.assert_close(loaded.predict(inputs, draws=4).mean, expected)
    loaded.save(tmp_path)
    assert repr(Posterior.load(tmp_path, cnn()).net) == repr(smaller.net)


def test_it_can_be_pruned_trained_and_pickled_like_any_other() -> None:
    smaller = compact(prune(gaussian_of(cnn()), 0.5, unit="channel"))
    assert pickle.loads(pickle.dumps(smaller.net))[0].out_channels == smaller.net[0].out_channels
    further = compact(prune(smaller, 0.5, unit="channel", scope="layer"))
    before = smaller.net[4].out_channels
    assert further.net[4].out_channels == before - round(before * 0.5)
    net = mean_network(further).train().requires_grad_(True)
    net(images(dtype=torch.float32)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


# ------------------------------------------------------------------------- any chain of layers

ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.ELU, nn.SELU, nn.Hardtanh, nn.ReLU6, nn.Hardswish,
    nn.Mish, nn.Softsign, nn.LeakyReLU, nn.CELU, nn.Softshrink, nn.Identity,
]  # fmt: skip


class Skip(nn.Module):
    """A residual connection."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    """Convolutions or not, then linear layers, with anything in between that can be followed."""
    layers: list[nn.Module] = []
    flag, width = st.booleans(), st.integers(1, 5)
    channels, size = 1, 6
    for _ in range(draw(st.integers(0, 2))):
        after = draw(width)
        layers += [nn.Conv2d(channels, after, 3, padding=1, bias=draw(flag))]
        channels = after
        if draw(flag):
            layers += [nn.BatchNorm2d(channels, affine=draw(flag), track_running_stats=draw(flag))]
        if draw(flag):
            layers += [
                nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=draw(flag))
            ]
        if draw(flag):
            layers += [Skip(nn.Conv2d(channels, channels, 1, bias=draw(flag)),
                            nn.BatchNorm2d(channels), nn.ReLU())]  # fmt: skip
        layers += [draw(st.sampled_from(ACTIVATIONS))()]
        if draw(flag) and size > 2:
            layers += [draw(st.sampled_from([nn.MaxPool2d, nn.AvgPool2d]))(3, 2, 1)]
            size = (size + 1) // 2
    layers += [nn.Flatten()]
    features = channels * size * size
    for _ in range(draw(st.integers(0, 3))):
        if draw(flag):
            layers += [nn.BatchNorm1d(features)]
        after = draw(width)
        layers += [
            nn.Linear(features, after, bias=draw(flag)),
            draw(st.sampled_from(ACTIVATIONS))(),
        ]
        features = after
        if draw(flag):
            layers += [Skip(nn.Linear(features, 3), nn.ReLU(), nn.Linear(3, features))]
    return nn.Sequential(*layers, nn.Linear(features, 2)).double()


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(networks(), st.integers(0, 2**31), st.floats(0, 1))
def test_any_chain_with_any_zeros(net: nn.Module, seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    masks: dict[str, Tensor] = {}
    randomised(net, seed)
    for name, tensor in net.state_dict().items():
        if tensor.ndim and "running_var" not in name:
            keep = torch.rand(tensor.shape, generator=generator) > share
            rows = torch.rand(len(tensor), generator=generator) > share
            masks[name] = keep & rows.view(-1, *[1] * (tensor.ndim - 1))
    draws = [
        {k: torch.randn(v.shape, generator=generator).double() for k, v in net.named_parameters()}
        for _ in range(2)
    ]
    zeroed = masked(DrawsPosterior(net, Gaussian(0.1), draws), masks)
    smaller = compact(zeroed)
    for large, small in zip(unstack(zeroed.sample(2)), unstack(smaller.sample(2)), strict=True):
        with torch.no_grad():
            torch.testing.assert_close(
                functional_call(smaller.net, {**smaller.fixed, **small}, images()),
                functional_call(zeroed.net, {**zeroed.fixed, **large}, images()),
                rtol=1e-10,
                atol=1e-10,
            )
    assert repr(compact(smaller).net) == repr(smaller.net)
