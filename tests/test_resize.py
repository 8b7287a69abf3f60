"""A network with layers of other sizes: nothing else of it changes, and nothing is guessed."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import describe, network_tensors
from lightning_bnn.resize import resized


def shapes_of(net: nn.Module) -> dict[str, list[int]]:
    return dict(describe(net))


PAIRS = {
    "linear": (nn.Linear(5, 7), nn.Linear(3, 2)),
    "linear without bias": (nn.Linear(5, 7, bias=False), nn.Linear(3, 2, bias=False)),
    "conv1d": (
        nn.Conv1d(4, 6, 3, stride=2, padding=1, padding_mode="circular"),
        nn.Conv1d(3, 2, 3, stride=2, padding=1, padding_mode="circular"),
    ),
    "conv2d": (
        nn.Conv2d(4, 6, (3, 2), padding="same", dilation=2, padding_mode="reflect", bias=False),
        nn.Conv2d(2, 3, (3, 2), padding="same", dilation=2, padding_mode="reflect", bias=False),
    ),
    "conv3d": (nn.Conv3d(3, 4, 2), nn.Conv3d(2, 1, 2)),
    "depthwise": (nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(4, 4, 3, groups=4)),
    "batch norm": (nn.BatchNorm2d(6, eps=0.1, momentum=0.3), nn.BatchNorm2d(2, 0.1, 0.3)),
    "batch norm, not affine": (nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(2, affine=False)),
    "batch norm without statistics": (
        nn.BatchNorm3d(6, track_running_stats=False),
        nn.BatchNorm3d(2, track_running_stats=False),
    ),
}


def inputs_for(layer: nn.Module) -> Tensor:
    torch.manual_seed(0)
    if isinstance(layer, nn.Linear):
        return torch.randn(3, layer.in_features)
    axes = layer.weight.ndim - 2 if "Conv" in type(layer).__name__ else 0
    axes = axes or {"BatchNorm1d": 0, "BatchNorm2d": 2, "BatchNorm3d": 3}[type(layer).__name__]
    width = getattr(layer, "in_channels", None) or layer.num_features
    return torch.randn(3, width, *[8] * axes)


@pytest.mark.parametrize("name", PAIRS)
def test_a_layer_becomes_as_if_made_with_the_other_size(name: str) -> None:
    before, wanted = PAIRS[name]
    net = nn.Sequential(before)
    made = resized(net, {f"0.{key}": shape for key, shape in shapes_of(wanted).items()})
    assert repr(made[0]) == repr(wanted)
    assert describe(made[0]) == describe(wanted)
    assert made[0].training
    made[0].load_state_dict(wanted.state_dict())
    made.eval(), wanted.eval()
    torch.testing.assert_close(made(inputs_for(wanted)), wanted(inputs_for(wanted)))
    assert shapes_of(net) == {f"0.{key}": list(v.shape) for key, v in before.state_dict().items()}


def test_what_a_layer_carries_is_kept() -> None:
    net = nn.Sequential(nn.Linear(4, 6, dtype=torch.float64), nn.BatchNorm1d(6), nn.Linear(6, 1))
    net[0].requires_grad_(False)
    net[1].eval()
    net[0].note = "mine"
    seen: list[int] = []
    net[0].register_forward_hook(lambda *_: seen.append(1))
    shapes = {"0.weight": (2, 4), "0.bias": (2,), "2.weight": (1, 2)}
    shapes |= {f"1.{key}": (2,) for key in ("weight", "bias", "running_mean", "running_var")}
    made = resized(net, shapes)
    assert (made[0].note, made[0].weight.dtype) == ("mine", torch.float64)
    assert not made[0].weight.requires_grad
    assert made[2].weight.requires_grad
    assert made[0].training
    assert not made[1].training
    made[0](torch.zeros(1, 4, dtype=torch.float64))
    assert seen == [1]
    assert made[1].running_var.tolist() == [1, 1]
    assert torch.equal(made[2].bias, net[2].bias)
    made[2].bias.data.add_(1)
    assert not torch.equal(made[2].bias, net[2].bias)


def test_equal_shapes_change_nothing_whatever_the_layers() -> None:
    net = nn.Sequential(nn.Embedding(3, 4), nn.LSTM(4, 2), nn.LayerNorm(2))
    made = resized(net, shapes_of(net))
    for name, tensor in network_tensors(net).items():
        assert torch.equal(tensor, network_tensors(made)[name])


class MyLinear(nn.Linear):
    pass


def parametrised() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(2, 4))


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(2, 4), "weight", 0.5)


@pytest.mark.parametrize(
    ("layer", "shapes", "words"),
    [
        (MyLinear(2, 4), {"0.weight": (3, 2), "0.bias": (3,)}, "MyLinear is a subclass of Linear"),
        (nn.Embedding(2, 4), {"0.weight": (2, 3)}, "Embedding is not one of Linear"),
        (nn.Conv2d(4, 4, 1, groups=2), {"0.weight": (2, 2, 1, 1)}, "convolution of 2 groups"),
        (parametrised(), {"0.bias": (3,)}, "remove_parametrizations"),
        (pruned(), {"0.bias": (3,)}, "prune.remove"),
        (nn.Linear(2, 4), {"0.weight": (3, 2)}, "do not fit together"),
        (nn.Linear(2, 4), {"0.bias": (3,)}, "do not fit together"),
        (nn.Linear(2, 4), {"0.weight": (4, 2, 1)}, "do not fit together"),
        (nn.Linear(2, 4), {"0.weight": (0, 2), "0.bias": (0,)}, "at least one each"),
        (nn.Conv2d(2, 4, 3), {"0.weight": (4, 2, 3, 1)}, "do not fit together"),
        (nn.BatchNorm1d(4), {"0.weight": (3,)}, "do not fit together"),
        (nn.Linear(2, 4), {"1.weight": (3,)}, r"'1.weight', which is not .* \['0.weight', '0.b"),
    ],
)
def test_what_cannot_be_done_is_said(layer: nn.Module, shapes: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        resized(nn.Sequential(layer), shapes)
