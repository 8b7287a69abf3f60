"""Which units go: against a NumPy loop; and what a removed unit leaves behind, which is nothing."""

import warnings

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.posteriors import (
    DrawsPosterior,
    GaussianPosterior,
    LowRankPosterior,
    MixturePosterior,
    Posterior,
)
from lightning_bnn.pruning import prune
from lightning_bnn.pruning.channels import channel_masks, channel_signal_to_noise


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 10), nn.ReLU(), nn.Linear(10, 6, bias=False), nn.Tanh(), nn.Linear(6, 2)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 2, groups=6),
        nn.BatchNorm2d(6, affine=False), nn.GELU(), nn.Flatten(), nn.BatchNorm1d(54),
        nn.Linear(54, 4), nn.SiLU(), nn.Linear(4, 2),
    )  # fmt: skip


def residual() -> nn.Module:
    block = torchvision.models.resnet.BasicBlock(4, 4)
    return nn.Sequential(nn.Conv2d(1, 4, 1), block, nn.Flatten(), nn.Linear(36, 2))


def randomised(net: nn.Module, seed: int = 0) -> nn.Module:
    """Statistics that are not those of a new network."""
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in net.named_buffers():
        if buffer.is_floating_point():
            noise = torch.randn(buffer.shape, generator=generator, dtype=buffer.dtype)
            buffer.copy_(0.5 + noise.abs() if "var" in name else noise)
    return net


def gaussian(net: nn.Module, fixed: tuple[str, ...] = (), seed: int = 0) -> GaussianPosterior:
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)

    own = {name: p for name, p in randomised(net, seed).named_parameters() if name not in fixed}
    mean = {name: noise(p) for name, p in own.items()}
    return GaussianPosterior(
        net, Categorical(), mean, {name: 0.1 + noise(p).abs() for name, p in own.items()}
    )


def ratios_by_hand(posterior: GaussianPosterior, layers: list[str]) -> dict[str, list[float]]:
    found = {}
    for layer in layers:
        names = [n for n in (f"{layer}.weight", f"{layer}.bias") if n in posterior.mean]
        found[layer] = []
        for unit in range(len(posterior.mean[names[0]])):
            mean = np.concatenate([posterior.mean[n][unit].numpy().ravel() for n in names])
            sd = np.concatenate([posterior.sd[n][unit].numpy().ravel() for n in names])
            found[layer].append(float(np.linalg.norm(mean) / np.linalg.norm(sd)))
    return found


def test_the_ratio_of_a_unit_is_that_of_its_weights_together() -> None:
    posterior = gaussian(mlp())
    found = channel_signal_to_noise(posterior)
    by_hand = ratios_by_hand(posterior, ["0", "2"])
    assert list(found) == ["0.weight", "2.weight"]
    for layer, ratios in by_hand.items():
        np.testing.assert_allclose(found[f"{layer}.weight"].numpy(), ratios, rtol=1e-6)
    fixed_bias = gaussian(mlp(), fixed=("0.bias",))
    np.testing.assert_allclose(
        channel_signal_to_noise(fixed_bias)["0.weight"].numpy(),
        ratios_by_hand(fixed_bias, ["0"])["0"],
        rtol=1e-6,
    )


def test_nothing_over_nothing_is_zero_and_something_over_nothing_is_infinite() -> None:
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1))
    mean = {"0.weight": torch.tensor([[0.0, 0.0], [0.0, 2.0], [3.0, 4.0]])}
    sd = {"0.weight": torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 1.0]])}
    posterior = GaussianPosterior(net, Categorical(), mean, sd)
    assert channel_signal_to_noise(posterior)["0.weight"].tolist() == [0, float("inf"), 5]


@pytest.mark.parametrize("fraction", [0.0, 0.03, 0.25, 0.5, 0.8])
def test_the_lowest_units_of_all_layers_go_exactly(fraction: float) -> None:
    posterior = gaussian(mlp())
    masks = channel_masks(posterior, fraction)
    by_hand = ratios_by_hand(posterior, ["0", "2"])
    ranked = sorted((r, layer, u) for layer, own in by_hand.items() for u, r in enumerate(own))
    gone = {(layer, unit) for _, layer, unit in ranked[: round(fraction * 16)]}
    for layer in by_hand:
        for unit, row in enumerate(masks[f"{layer}.weight"]):
            assert row.unique().tolist() == [(layer, unit) not in gone]
    assert torch.equal(masks["0.bias"], masks["0.weight"][:, 0])
    assert set(masks) == {"0.weight", "0.bias", "2.weight"}


def test_each_layer_by_itself() -> None:
    masks = channel_masks(gaussian(mlp()), 0.5, scope="layer")
    assert [int(masks[name][:, 0].sum()) for name in ("0.weight", "2.weight")] == [5, 3]


def test_protected_layers_keep_their_units() -> None:
    masks = channel_masks(gaussian(mlp()), 0.5, protect="0.*")
    assert set(masks) == {"2.weight"}
    assert int(masks["2.weight"][:, 0].sum()) == 3


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1),
    )  # fmt: skip


@pytest.mark.parametrize("protect", [["1.*", "2.*"], "1.weight", "2.bias", "0.bias"])
def test_what_would_go_with_a_unit_protects_it(protect: str | list[str]) -> None:
    masks = channel_masks(gaussian(depthwise()), 0.5, protect=protect)
    assert set(masks) == {"4.weight", "4.bias"}
    alone = gaussian(depthwise()[:5])
    with pytest.raises(ConfigurationError, match=r"'0' would take '.*' along, which is protected"):
        channel_masks(alone, 0.5, protect=protect)


def test_units_of_half_precision_are_ranked_as_they_are() -> None:
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.ReLU(), nn.Linear(3, 1))
    rows = torch.tensor([[1e-4, 1e-4], [3e-4, 3e-4], [2e-4, 2e-4]]).half()
    sd = torch.full((3, 2), 1e-4).half()
    posterior = GaussianPosterior(net, Categorical(), {"0.weight": rows}, {"0.weight": sd})
    found = channel_signal_to_noise(posterior)["0.weight"]
    expected = (rows.double() / sd.double())[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    large = GaussianPosterior(net, Categorical(), {"0.weight": rows * 1e4}, {"0.weight": sd / 100})
    found = channel_signal_to_noise(large)["0.weight"]  # beyond the largest number of float16
    assert found.isfinite().all()
    assert found.argsort().tolist() == [0, 2, 1]


def test_pruning_again_is_pruning_once() -> None:
    posterior = gaussian(cnn())
    once = prune(posterior, 0.7, unit="channel")
    twice = prune(prune(posterior, 0.3, unit="channel"), 0.7, unit="channel")
    for name, mean in once.mean.items():
        assert torch.equal(mean, twice.mean[name])
    same = prune(posterior, 0, unit="channel")
    assert all(torch.equal(mean, same.mean[name]) for name, mean in posterior.mean.items())


def test_a_removed_unit_is_exactly_zero_where_it_is_read() -> None:
    """Through BatchNorms of three kinds and a depthwise convolution, in every draw."""
    posterior = prune(gaussian(cnn()), 0.5, unit="channel", protect="8.*")
    masks = channel_masks(gaussian(cnn()), 0.5, protect="8.*")
    names = ["0.weight", "1.weight", "1.bias", "3.weight", "3.bias", "7.weight", "7.bias"]
    assert set(masks) == {*names, "1.running_mean", "4.running_mean", "7.running_mean"}
    gone = ~masks["0.weight"].flatten(1)[:, 0]
    assert int(gone.sum()) == 3
    outputs: list[Tensor] = []
    posterior.net[8].register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    posterior.mode = "loop"
    posterior.predict(torch.randn(5, 1, 6, 6), draws=3)
    assert len(outputs) == 3
    for output in outputs:
        channels = output.view(5, 6, 9)
        assert bool((channels[:, gone] == 0).all())
        assert bool((channels[:, ~gone] != 0).any((0, 2)).all())


def test_layers_that_cannot_be_followed() -> None:
    posterior = gaussian(residual())
    with pytest.raises(ConfigurationError) as caught:
        channel_masks(posterior, 0.5)
    for words in ("of 2 layers", "'0' (at add: it joins", "'1.conv2' (at add", "protect=['0.*', "
                  "'1.conv2.*']", 'rest="keep"', 'rest="weight"'):  # fmt: skip
        assert words in str(caught.value)
    kept = channel_masks(posterior, 0.5, rest="keep")
    assert set(kept) == {
        "1.conv1.weight", "1.bn1.weight", "1.bn1.bias", "1.bn1.running_mean",
    }  # fmt: skip
    protected = channel_masks(posterior, 0.5, protect=["0.*", "1.conv2.*"])
    assert all(torch.equal(mask, protected[name]) for name, mask in kept.items())
    both = channel_masks(posterior, 0.5, rest="weight")
    assert set(both) == {*kept, "0.weight", "1.conv2.weight"}
    ratios = [
        (posterior.mean[n].abs() / posterior.sd[n]).flatten()
        for n in ("0.weight", "1.conv2.weight")
    ]
    flat = torch.cat(ratios)
    mask = torch.cat([both[n].flatten() for n in ("0.weight", "1.conv2.weight")])
    assert int((~mask).sum()) == round(0.5 * len(flat))
    assert float(flat[~mask].max()) <= float(flat[mask].min())


def test_nothing_to_follow() -> None:
    line = gaussian(nn.Linear(3, 2))
    with pytest.raises(
        ConfigurationError, match=r"'' gives the network's outputs.*unit=\"weight\""
    ):
        channel_masks(line, 0.5, rest="keep")
    lstm = gaussian(nn.Sequential(nn.LSTM(3, 2)))
    with pytest.raises(ConfigurationError, match="No layer of the network has units"):
        channel_masks(lstm, 0.5, rest="keep")
    assert set(channel_masks(lstm, 0.5, rest="weight")) == {"0.weight_ih_l0", "0.weight_hh_l0"}


def test_a_layer_never_vanishes_and_too_much_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 1))
    posterior = gaussian(net)
    posterior.mean["2.weight"].mul_(1e-3)
    posterior.mean["2.bias"].mul_(1e-3)
    with pytest.warns(UserWarning, match=r"2\.weight"):
        masks = channel_masks(posterior, 0.5)
    assert int(masks["2.weight"][:, 0].sum()) == 1
    assert int(masks["0.weight"][:, 0].sum()) == 4
    with pytest.raises(ConfigurationError, match=r"largest fraction is 0\.8"):
        channel_masks(posterior, 0.9)
    for wrong in (1.0, -0.1, float("nan")):
        with pytest.raises(ConfigurationError, match="fraction="):
            channel_masks(posterior, wrong)


def test_a_posterior_without_variances_is_refused() -> None:
    net = mlp()
    with pytest.raises(ConfigurationError, match="holds a single draw"):
        channel_masks(DrawsPosterior(net, Categorical(), [dict(net.named_parameters())]), 0.5)


def members(count: int) -> list[Posterior]:
    nets = [mlp() for _ in range(count)]
    return [DrawsPosterior(net, Categorical(), [dict(net.named_parameters())]) for net in nets]


def test_the_members_of_an_ensemble_lose_the_same_units() -> None:
    torch.manual_seed(0)
    parts = members(4)
    mixture = MixturePosterior(parts)
    draws = DrawsPosterior(mixture.net, Categorical(), [part._draws[0] for part in parts])
    ours, theirs = channel_masks(mixture, 0.5), channel_masks(draws, 0.5)
    assert all(torch.equal(mask, theirs[name]) for name, mask in ours.items())


def test_low_rank_units_use_both_parts_of_the_variance() -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    mean = {"0.weight": torch.tensor([[1.0, 1.0], [1.0, 1.0]])}
    variance = {"0.weight": torch.tensor([[1.0, 1.0], [3.0, 3.0]])}
    columns = {"0.weight": torch.stack([torch.tensor([[3.0, 3.0], [0.0, 0.0]])] * 2)}
    posterior = LowRankPosterior(net, Categorical(), mean, variance, columns)
    found = channel_signal_to_noise(posterior)["0.weight"]
    np.testing.assert_allclose(found.numpy(), [(2 / 19) ** 0.5, (2 / 3) ** 0.5], rtol=1e-6)


def test_no_warning_without_a_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        masks = channel_masks(gaussian(mlp()), 0.5)
    assert not all(bool(mask.all()) for mask in masks.values())
