"""What may be removed: which weights and units, by which ratio; what a removed unit leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import (
    GaussianPosterior,
    Posterior,
)
from lightning_bnn.pruning import prune as prune_posterior
from lightning_bnn.pruning.masks import pruning_masks
from lightning_bnn.pruning.removable import candidates, find_removable
from lightning_bnn.selection import last_layer
from tests.pruning.posteriors import gaussian, gaussian_of


def every(net: nn.Module) -> list[str]:
    return [name for name, _ in net.named_parameters()]


class Kinds(nn.Module):
    """Normalisation of every kind, a two-axis weight in one, biases with three axes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm([2, 4])
        self.group = nn.GroupNorm(2, 4)
        self.lstm = nn.LSTM(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.slope = nn.PReLU(4)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight  # tied: one tensor, one name


def test_weights_of_two_axes_outside_of_normalisation():
    net = Kinds()
    assert candidates(net, every(net)) == [
        "embed.weight",
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    ]
    assert candidates(net, ["lstm.weight_hh_l0", "lstm.bias_hh_l0"]) == ["lstm.weight_hh_l0"]
    assert candidates(net, []) == []


def test_protection_in_every_form():
    net = gaussian().net  # frozen, as the network of each posterior
    names = every(net)
    assert candidates(net, names) == ["0.weight", "5.weight"]
    for protect in ("5.*", net[5], last_layer, ["*", "!0.*"], lambda given: ["5.weight"]):
        assert candidates(net, names, protect) == ["0.weight"]
    assert candidates(net, names, "*.bias") == ["0.weight", "5.weight"]  # they were already
    assert not any(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.parametrize(
    ("protect", "message"),
    [
        ("nothing.*", "'nothing.*' matches no parameter. Their names begin with .'0.weight'"),
        (nn.Linear(8, 3), "Linear chosen as protected holds no parameter of the network"),
        ("*", "leaves nothing to prune of"),
    ],
)
def test_refusals(protect, message):
    net = gaussian().net
    with pytest.raises(ConfigurationError, match=message):
        candidates(net, every(net), protect)
    assert not any(parameter.requires_grad for parameter in net.parameters())


@pytest.mark.parametrize("change", [parametrizations.weight_norm, spectral_norm])
def test_tensors_from_which_a_weight_is_computed_are_no_weights(change):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), change(nn.Linear(4, 4)), nn.Linear(4, 1))
    assert candidates(net, every(net)) == ["0.weight", "3.weight"]
    posterior = gaussian_of(net)
    with pytest.raises(ConfigurationError) as caught:
        find_removable(posterior)
    for words in ("weight is computed from '2.", "remove_parametrizations", "protect=['2."):
        assert words in str(caught.value)
    protected = find_removable(posterior, protect="2.*")
    fixed = tuple(name for name in every(net) if name.startswith("2."))
    for found in (protected, find_removable(gaussian_of(net, fixed))):  # they do not vary
        assert list(found.weights) == ["0.weight", "3.weight"]


def test_a_network_that_torch_has_pruned_before():
    """Its parameter is called weight_orig; the mask is a buffer, applied before each forward."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    prune.random_unstructured(net[0], "weight", amount=0.5)
    posterior = gaussian_of(net)
    small = prune_posterior(posterior, 0.5)
    mask = pruning_masks(posterior, 0.5)["0.weight_orig"]
    draw = {name: tensor[0] for name, tensor in small.sample(1).items()}
    assert torch.equal(draw["0.weight_orig"] != 0, mask)
    inputs = torch.randn(5, 3)
    hidden = inputs @ (draw["0.weight_orig"] * net[0].weight_mask).T + draw["0.bias"]
    expected = hidden.relu() @ draw["2.weight"].T + draw["2.bias"]
    found = torch.func.functional_call(small.net, {**small.fixed, **draw}, inputs)
    torch.testing.assert_close(found, expected)
    with pytest.raises(ConfigurationError, match=r"call torch.nn.utils.prune.remove first"):
        prune_posterior(posterior, 0.5, unit="channel")


# ------------------------------------------------------------------------------------------ units


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


class Dense(nn.Module):
    """Channels that are concatenated, and others between them that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (nn.Conv2d(i, 4, 1) for i in (1, 4, 4))
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(72, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.head(torch.cat([x, self.last(self.norm(self.inner(x)))], 1).flatten(1))


def unit_masks(posterior: Posterior, fraction: float, **options: Any) -> dict[str, Tensor]:
    return pruning_masks(posterior, fraction, unit="channel", **options)


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
    posterior = gaussian_of(mlp())
    found = find_removable(posterior, "channel").units
    by_hand = ratios_by_hand(posterior, ["0", "2"])
    assert list(found) == ["0.weight", "2.weight"]
    for layer, ratios in by_hand.items():
        np.testing.assert_allclose(found[f"{layer}.weight"].numpy(), ratios, rtol=1e-6)


@pytest.mark.parametrize("fraction", [0.03, 0.5, 0.8])
def test_the_lowest_units_of_all_layers_go_exactly(fraction: float) -> None:
    posterior = gaussian_of(mlp())
    masks = unit_masks(posterior, fraction)
    by_hand = ratios_by_hand(posterior, ["0", "2"])
    ranked = sorted((r, layer, u) for layer, own in by_hand.items() for u, r in enumerate(own))
    gone = {(layer, unit) for _, layer, unit in ranked[: round(fraction * 16)]}
    for layer in by_hand:
        for unit, row in enumerate(masks[f"{layer}.weight"]):
            assert row.unique().tolist() == [(layer, unit) not in gone]
    assert torch.equal(masks["0.bias"], masks["0.weight"][:, 0])
    assert set(masks) == {"0.weight", "0.bias", "2.weight"}


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1),
    )  # fmt: skip


@pytest.mark.parametrize("protect", [["1.*", "2.*"], "1.weight", "2.bias", "0.bias"])
def test_what_would_go_with_a_unit_protects_it(protect: str | list[str]) -> None:
    masks = unit_masks(gaussian_of(depthwise()), 0.5, protect=protect)
    assert set(masks) == {"4.weight", "4.bias"}
    alone = gaussian_of(depthwise()[:5])
    with pytest.raises(ConfigurationError, match=r"'0' would take '.*' along, which is protected"):
        unit_masks(alone, 0.5, protect=protect)


def test_a_removed_unit_is_exactly_zero_where_it_is_read() -> None:
    """Through BatchNorms of three kinds and a depthwise convolution, in every draw."""
    posterior = prune_posterior(gaussian_of(cnn()), 0.5, unit="channel", protect="8.*")
    masks = unit_masks(gaussian_of(cnn()), 0.5, protect="8.*")
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


def test_channels_that_are_added_go_together() -> None:
    posterior = gaussian_of(residual())
    found = find_removable(posterior, "channel").units
    assert list(found) == ["0.weight", "1.conv1.weight"]
    layers = [["0.weight", "0.bias"], ["1.conv2.weight"]]
    names = [name for layer in layers for name in layer]
    for unit, ratio in enumerate(found["0.weight"].tolist()):
        mean, sd = (
            np.concatenate([tensors[name][unit].numpy().ravel() for name in names])
            for tensors in (posterior.mean, posterior.sd)
        )
        assert ratio == pytest.approx(np.linalg.norm(mean) / np.linalg.norm(sd), rel=1e-6)
    masks = unit_masks(posterior, 0.5, scope="layer")
    kept = masks["0.bias"]
    assert int(kept.sum()) == 2
    for name in (*names, "1.bn2.weight", "1.bn2.bias", "1.bn2.running_mean"):
        assert torch.equal(masks[name].flatten(1).all(1) if masks[name].ndim > 1 else masks[name],
                           kept)  # fmt: skip


def test_channels_that_are_added_to_fixed_ones_stay() -> None:
    fixed = ("0.weight", "0.bias")
    masks = unit_masks(gaussian_of(residual(), fixed), 0.5)
    assert set(masks) == {
        "1.conv1.weight", "1.bn1.weight", "1.bn1.bias", "1.bn1.running_mean",
    }  # fmt: skip
    fixed += ("1.conv1.weight",)
    with pytest.raises(ConfigurationError, match=r"'0' would take '0.weight' along.*not vary"):
        unit_masks(gaussian_of(residual(), fixed), 0.5)


def test_layers_that_cannot_be_followed() -> None:
    posterior = gaussian_of(Dense())
    with pytest.raises(ConfigurationError) as caught:
        unit_masks(posterior, 0.5)
    for words in ("'first' (at cat: it is not known", "'last' (at cat", "protect=['first.*"
                  "', 'last.*']", 'rest="keep"', 'rest="weight"'):  # fmt: skip
        assert words in str(caught.value)
    kept = unit_masks(posterior, 0.5, rest="keep")
    assert set(kept) == {
        "inner.weight", "inner.bias", "norm.weight", "norm.bias", "norm.running_mean",
    }  # fmt: skip
    protected = unit_masks(posterior, 0.5, protect=["first.*", "last.*"])
    assert all(torch.equal(mask, protected[name]) for name, mask in kept.items())
    both = unit_masks(posterior, 0.5, rest="weight")
    single = ("first.weight", "last.weight")
    assert set(both) == {*kept, *single}
    flat = torch.cat([(posterior.mean[n].abs() / posterior.sd[n]).flatten() for n in single])
    mask = torch.cat([both[n].flatten() for n in single])
    assert int((~mask).sum()) == round(0.5 * len(flat))
    assert float(flat[~mask].max()) <= float(flat[mask].min())


def test_nothing_to_follow() -> None:
    line = gaussian_of(nn.Linear(3, 2))
    with pytest.raises(
        ConfigurationError, match=r"'' gives the network's outputs.*unit=\"weight\""
    ):
        unit_masks(line, 0.5, rest="keep")
    lstm = gaussian_of(nn.Sequential(nn.LSTM(3, 2)))
    with pytest.raises(ConfigurationError, match="No layer of the network has units"):
        unit_masks(lstm, 0.5, rest="keep")
    assert set(unit_masks(lstm, 0.5, rest="weight")) == {"0.weight_ih_l0", "0.weight_hh_l0"}


def test_a_layer_never_vanishes_and_too_much_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 1))
    posterior = gaussian_of(net)
    posterior.mean["2.weight"].mul_(1e-3)
    posterior.mean["2.bias"].mul_(1e-3)
    with pytest.warns(UserWarning, match=r"2\.weight"):
        masks = unit_masks(posterior, 0.5)
    assert int(masks["2.weight"][:, 0].sum()) == 1
    assert int(masks["0.weight"][:, 0].sum()) == 4
    with pytest.raises(ConfigurationError, match=r"largest fraction is 0\.8"):
        unit_masks(posterior, 0.9)
    for wrong in (1.0, -0.1, float("nan")):
        with pytest.raises(ConfigurationError, match="fraction="):
            unit_masks(posterior, wrong)
