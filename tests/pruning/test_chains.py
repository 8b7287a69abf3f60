"""Who feeds whom, on networks written by hand; and why a layer cannot be followed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.pruning.chains import Chains, Companion, Reader, find_chains
from tests.nets import SequenceLSTM, SequenceTransformer, TokenEmbedding


class Functional(nn.Module):
    """Convolutions and two linear layers around a body that is given."""

    def __init__(self, body: Callable[[Tensor], Tensor], positions: int = 9) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(4 * positions, 2)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.conv(x)))


def test_a_multilayer_perceptron() -> None:
    net = nn.Sequential(
        nn.Linear(3, 8),
        nn.BatchNorm1d(8),
        nn.Dropout(),
        nn.Linear(8, 4),
        nn.Tanh(),
        nn.Linear(4, 2),
    )
    chains = find_chains(net)
    assert chains.followed["0"].readers == (Reader("3", 1, (Companion("1"),)),)
    assert chains.followed["3"].readers == (Reader("5"),)
    assert [chain.units for chain in chains.followed.values()] == [8, 4]
    assert (chains.outputs, chains.obstacles) == (["5"], {})


def test_a_convolutional_network_with_a_depthwise_layer_and_two_heads() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(1, 6, 3)
            self.depth = nn.Conv2d(6, 6, 3, groups=6)
            self.norm = nn.BatchNorm2d(6)
            self.left, self.right = nn.Linear(6 * 4, 3), nn.Linear(6, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = F.relu(self.one(x))
            left = self.left(torch.flatten(F.max_pool2d(self.norm(self.depth(x)), 2), 1))
            return left, self.right(F.adaptive_avg_pool2d(x, 1).flatten(1)).squeeze(-1)

    chains = find_chains(Net())
    through = (Companion("depth"), Companion("norm"))
    assert chains.followed["one"].readers == (Reader("left", 4, through), Reader("right", 1))
    assert chains.followed["one"].companions == through
    assert (chains.outputs, chains.obstacles) == (["left", "right"], {})


FOLLOWED: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "flatten": (lambda x: torch.flatten(x, 1), 9),
    "flatten by name": (lambda x: torch.flatten(x, start_dim=1), 9),
    "method": (lambda x: x.relu().flatten(1), 9),
    "view": (lambda x: x.view(x.size(0), -1), 9),
    "reshape": (lambda x: x.reshape(x.shape[0], -1), 9),
    "view of a size": (lambda x: x.view((x.size()[0], -1)), 9),
    "mean": (lambda x: x.mean((2, 3)), 1),
    "mean from the end": (lambda x: F.silu(x).mean([-1, -2], keepdim=True).flatten(1), 1),
    "pools": (lambda x: F.avg_pool2d(F.max_pool2d(F.gelu(x), 1), 1).flatten(1).contiguous(), 9),
    "clamped": (lambda x: F.hardtanh(x, -2, 2).flatten(1), 9),
    "other sizes unused": (lambda x: (x.shape[1], x.view(x.shape[0], -1))[1], 9),
    "prelu": (nn.Sequential(nn.PReLU(), nn.Flatten()), 9),
    "flattened twice": (nn.Sequential(nn.Flatten(), nn.Flatten()), 9),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_operations_that_are_followed(name: str) -> None:
    body, positions = FOLLOWED[name]
    chains = find_chains(Functional(body, positions))
    assert chains.followed["conv"].readers == (Reader("head", positions),), chains


JOINS = "joins the units with other values"
UNKNOWN = "not known to act on each unit by itself"
BLOCKED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "residual": (lambda x: (x + x.relu()).flatten(1), JOINS),
    "scaled": (lambda x: (x * 2).flatten(1), JOINS),
    "concatenated": (lambda x: torch.cat([x, x], 1).flatten(1), JOINS),
    "sigmoid": (lambda x: torch.sigmoid(x).flatten(1), "not zero at zero"),
    "softplus module": (nn.Sequential(nn.Softplus(), nn.Flatten()), "not zero at zero"),
    "softmax": (lambda x: F.softmax(x, 1).flatten(1), UNKNOWN),
    "layer norm": (nn.Sequential(nn.LayerNorm(3), nn.Flatten()), UNKNOWN),
    "group norm": (nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten()), UNKNOWN),
    "permuted": (lambda x: x.permute(0, 2, 3, 1).flatten(1), UNKNOWN),
    "partly flattened": (lambda x: x.flatten(2).flatten(1), UNKNOWN),
    "fixed view": (lambda x: x.view(-1, 36), "may fix the number of units"),
    "mixed view": (lambda x: x.view(x.size(0) * 2, -1), "may fix the number of units"),
    "channels read": (lambda x: x.view(x.shape[0], x.shape[1] * 9), "reads the number of"),
    "number of units": (lambda x: x.flatten(1) / x.size(1), "reads the number of units|not known"),
    "another attribute": (lambda x: x.mT.flatten(1), "it reads .mT"),
    "whole shape": (lambda x: torch.zeros(x.shape).flatten(1), "reads the number of units"),
    "pool over units": (lambda x: F.max_pool3d(x, 1).flatten(1), "positions of a unit alone"),
    "mean over units": (lambda x: x.mean(1).flatten(1), "other axes than the positions"),
    "clamped off zero": (lambda x: F.hardtanh(x, 1, 2).flatten(1), "from 1 to 2 does not keep"),
    "prelu of channels": (nn.Sequential(nn.PReLU(4), nn.Flatten()), UNKNOWN),
    "indices": (lambda x: F.max_pool2d(x, 1, return_indices=True)[0].flatten(1), "indices"),
    "wrong axis": (lambda x: x, "axis of the units"),
}


@pytest.mark.parametrize("name", BLOCKED)
def test_operations_that_are_not(name: str) -> None:
    body, words = BLOCKED[name]
    chains = find_chains(Functional(body))
    assert not chains.followed
    assert chains.outputs == ["head"]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(str(chains.obstacles["conv"]))


def test_operations_on_outputs_are_no_obstacle() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.mean, self.scale = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x).relu()
            return torch.cat([self.mean(x), F.softplus(self.scale(x))], -1).log_softmax(-1)

    chains = find_chains(Net())
    assert (list(chains.followed), chains.outputs) == (["body"], ["mean", "scale"])
    assert [reader.name for reader in chains.followed["body"].readers] == ["mean", "scale"]
    assert chains.obstacles == {}


def shared() -> nn.Module:
    middle = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(4, 4), middle, nn.ReLU(), middle, nn.Linear(4, 1))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1))
    net[2].weight = net[0].weight
    return net


class UsedOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) @ self.one.weight


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    net[1].register_forward_hook(lambda module, inputs, output: output + 1)
    return net


class MyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def sequence_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(5), nn.Linear(6, 1))


class Frames(nn.Module):
    """Takes (examples, frames, channels, height, width); ``view`` says by which number of rows."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.view, self.conv = view, nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(16 if view == "frames" else 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = x.flatten(0, 1)
        units = torch.relu(self.conv(frames))
        if self.view == "flattened":
            units = units.flatten(1)
        rows = frames.size(0) if self.view == "frames" else x.size(0)
        return self.head(units.view(rows, -1))


class Steps(nn.Module):
    """The channels of a sequence become its last axis, and the steps the second."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.conv, self.line = nn.Conv1d(2, 4, 1), nn.Linear(4, 6)
        self.norm, self.head, self.last = nn.BatchNorm1d(6), nn.Linear(6, 1), last

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).transpose(1, 2)
        return self.head(self.norm(self.line(x[:, -1] if self.last else x)))


@pytest.mark.parametrize(
    ("net", "words"),
    [
        (Frames("examples"), {"conv": "at view: it views by the first size of 'x'"}),
        (Frames("flattened"), {"conv": "at view: it views by the first size of 'x'"}),
        (Steps(), {"line": "'norm', BatchNorm1d: it normalises the second axis"}),
        (shared(), {"0": "'1', Linear: it is called 2 times", "1": "it is called 2 times"}),
        (tied(), {"0": "shares a tensor", "2": "shares a tensor"}),
        (UsedOutside(), {"one": "used outside", "two": JOINS}),
        (hooked(), {"0": "'1', ReLU: it has a forward hook"}),
        (nn.Sequential(nn.Linear(4, 4), MyLinear(4, 4), nn.Linear(4, 1)), {"0": "is a subclass"}),
        (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 8, 1, groups=2)), {"0": "2 groups"}),
        (nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.Conv2d(4, 1, 1)), {"0": "feeds it"}),
        (nn.Sequential(nn.Linear(4, 4), nn.MaxPool1d(2), nn.Linear(2, 1)), {"0": "alone"}),
        (sequence_batch_norm(), {"0": "reads 5 inputs, which are not those of 6 units"}),
        (nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(6, 1)), {"0": "reads 6 inputs"}),
        (nn.Sequential(nn.ConvTranspose2d(4, 3, 2), nn.Conv2d(3, 1, 1)), {"0": "not one of"}),
        (SequenceLSTM(2), {"lstm": "LSTM is not one of"}),
        (SequenceTransformer(2), {"encoder.layers.0.linear1": "lies inside of 'encoder'"}),
        (TokenEmbedding(2), {"embed": "Embedding is not one of"}),
        (nn.LSTM(2, 3), {"": "it is the whole network"}),
    ],
)
def test_layers_that_are_not_followed(net: nn.Module, words: dict[str, str]) -> None:
    chains = find_chains(net)
    for layer, reason in words.items():
        assert reason in str(chains.obstacles[layer])
        assert layer not in chains.followed


def test_frames_in_the_batch_are_followed_where_rows_stay_rows() -> None:
    assert find_chains(Frames("frames")).followed["conv"].readers == (Reader("head", 4),)


def test_one_step_of_a_sequence_has_features() -> None:
    assert find_chains(Steps(last=True)).followed["line"].companions == (Companion("norm"),)


def test_layers_that_are_not_called_and_weights_without_a_layer() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 4))
            self.one, self.extra = nn.Linear(3, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            if self.training:
                x = self.extra(x)
            return F.linear(x, self.weight)

    obstacles = find_chains(Net()).obstacles
    assert "not called in a forward pass in evaluation mode" in str(obstacles["extra"])
    assert "not those of a layer that is called" in str(obstacles[""])
    assert str(obstacles["one"]).startswith("'one' (at linear: ")


def test_a_network_of_one_layer_gives_outputs() -> None:
    assert find_chains(nn.Linear(2, 3)) == Chains(outputs=[""])


def test_an_untraceable_network_is_quoted_and_left_as_it_was() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.one(x)
            return self.kept if x.sum() > 0 else x

    net = Net()
    with pytest.raises(ConfigurationError, match=r"cannot trace .*TraceError: .*unit=\"weight\""):
        find_chains(net)
    assert not hasattr(net, "kept")
    assert net.training


def test_the_inner_convolutions_of_residual_blocks() -> None:
    chains = find_chains(torchvision.models.resnet18(num_classes=3))
    inner = [f"layer{stage}.{block}.conv1" for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert list(chains.followed) == inner
    first = chains.followed["layer1.0.conv1"]
    assert first.readers == (Reader("layer1.0.conv2", 1, (Companion("layer1.0.bn1"),)),)
    assert chains.outputs == ["fc"]
    assert len(chains.obstacles) == 1 + 8 + 3
    assert all("joins the units" in str(one) for one in chains.obstacles.values())


def test_inverted_residuals_shrink_inside() -> None:
    block = torchvision.models.mobilenetv2.InvertedResidual(4, 4, 1, expand_ratio=3)
    net = nn.Sequential(nn.Conv2d(1, 4, 1), block, nn.Conv2d(4, 1, 1))
    chains = find_chains(net)
    assert list(chains.followed) == ["1.conv.0.0"]
    names = [one.name for one in chains.followed["1.conv.0.0"].companions]
    assert names == ["1.conv.0.1", "1.conv.1.0", "1.conv.1.1"]
