"""What a recipe makes is what it was written of, and nothing else is made."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from lightning_bnn.errors import PosteriorFormatError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.nets import MLP, ConvNet
from lightning_bnn.network import describe
from lightning_bnn.priors import Normal
from lightning_bnn.recipes import bounded, make, network_recipe, recipe
from lightning_bnn.samplers import SGHMC
from tests.nets import SequenceLSTM

IMAGE = torch.rand(2, 3, 32, 32)
NETWORKS: dict[str, tuple[Any, Any]] = {
    "layers": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding="same", padding_mode="reflect"),
            nn.BatchNorm2d(4, momentum=0.3),
            nn.ReLU(inplace=True),
            nn.Sequential(nn.AvgPool2d(4), nn.Flatten()),
            nn.LayerNorm(256, bias=False),
            nn.Dropout(0.3),
            nn.Linear(256, 4, bias=False),
            nn.Unflatten(1, (2, 2)),
        ),
        IMAGE,
    ),
    "ConvNet": (ConvNet(3, 32, 5, (2, 3), 7, nn.Tanh), IMAGE),
    "MLP": (MLP(4, [3], 2, nn.GELU), torch.rand(2, 4)),
    "LSTM": (nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), torch.rand(2, 5, 3)),
    "GRU": (nn.GRU(3, 4), torch.rand(2, 5, 3)),
    "Embedding": (nn.Sequential(nn.Embedding(9, 3, padding_idx=0)), torch.arange(4)),
    "resnet18": (torchvision.models.resnet18(num_classes=3), IMAGE),
    "vgg11_bn": (torchvision.models.vgg11_bn(num_classes=3, dropout=0.5), IMAGE),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_made_again(name: str) -> None:
    net, inputs = NETWORKS[name]
    made = make(json.loads(json.dumps(network_recipe(net))))
    assert describe(made) == describe(net)
    made.load_state_dict(net.state_dict())
    first, second = (one.eval()(inputs) for one in (net, made))
    first, second = (one[0] if isinstance(one, tuple) else one for one in (first, second))
    assert torch.equal(first, second)


def changed_resnet() -> nn.Module:
    net = torchvision.models.resnet18(num_classes=3)
    net.conv1 = nn.Conv2d(1, 64, 7)
    return net


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2))
    net[0].register_forward_hook(lambda module, inputs, outputs: outputs + 1)
    return net


def patched() -> nn.Module:
    net = nn.Linear(2, 2)
    net.forward = lambda inputs: inputs  # type: ignore[method-assign]
    return net


class Odd(nn.Linear):
    """A layer of the user's own."""


class Thrice(nn.Sequential):
    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return 3 * super().__call__(inputs)


def repeated() -> nn.Module:
    act, layer = nn.Tanh(), nn.Linear(4, 4)
    return nn.Sequential(layer, act, layer, act)


def patched_inside() -> nn.Module:
    net = torchvision.models.resnet18(num_classes=3)
    net._forward_impl = lambda inputs: inputs  # type: ignore[method-assign]
    return net


def six_heads() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 16, 12, 6, 768, 3072, num_classes=3)


OTHERS: dict[str, Any] = {
    "subclass that is called otherwise": lambda: Thrice(nn.Linear(2, 1)),
    "repeated": repeated,
    "patched inside": patched_inside,
    "six heads": six_heads,
    "relu RNN": lambda: nn.RNN(4, 3, nonlinearity="relu"),
    "norm first": lambda: nn.Transformer(4, 2, 1, 1, 8, norm_first=True),
    "gelu": lambda: nn.Transformer(4, 2, 1, 1, 8, activation="gelu"),
    "transform": lambda: torchvision.models.googlenet(
        num_classes=3, aux_logits=False, init_weights=False, transform_input=True
    ),
    "drop rate": lambda: torchvision.models.densenet121(num_classes=3, drop_rate=0.5),
    "stochastic depth": lambda: torchvision.models.convnext_tiny(
        num_classes=3, stochastic_depth_prob=0.9
    ),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", OTHERS)
def test_options_that_do_not_show_are_seen(name: str) -> None:
    assert network_recipe(OTHERS[name]()) is None


@pytest.mark.parametrize(
    "build", [changed_resnet, hooked, patched, lambda: SequenceLSTM(2), lambda: Odd(2, 1),
              lambda: nn.Sequential(Odd(2, 1))],
)  # fmt: skip
def test_a_network_that_would_not_be_the_same_has_no_recipe(build: Any) -> None:
    assert network_recipe(build()) is None


@pytest.mark.parametrize(
    "value",
    [3, "all", None, [1, 2], nn.ReLU, partial(nn.Linear, 3, bias=False), Normal(0.0, 0.5),
     {"*bias": Normal(1.0, 0.5), "*": Normal()}, Gaussian([0.1, 0.2]), partial(SGHMC, lr=1e-3)],
)  # fmt: skip
def test_an_option_is_made_again(value: Any) -> None:
    import lightning_bnn.strategies  # noqa: F401 (which says what options may be made of)

    made = make(json.loads(json.dumps(recipe(value))))
    assert repr(made) == repr(
        partial(nn.Linear, in_features=3, bias=False)
        if isinstance(value, partial) and value.func is nn.Linear
        else value
    )


@pytest.mark.parametrize(
    "attack",
    [
        {"of": "subprocess.call", "with": {"args": ["id"]}},
        {"of": "os.system"},
        {"of": "builtins.eval", "partial": {"source": "1"}},
        {"of": "torch.nn.modules.linear.os.system", "with": {"command": "id"}},
        {"of": "torch.nn.utils.rnn.torch.load", "with": {"f": "x"}},
        {"of": "torch.load", "with": {"f": "x"}},
        {"of": "torch.hub.load", "with": {"repo_or_dir": "x", "model": "y"}},
        {"of": "torchvision.models.get_model_builder", "with": {"name": "resnet18"}},
        {"of": "lightning_bnn.storage.store.write", "with": {}},
        {"of": ["torch.nn.Linear"], "with": {}},
        {"of": "torch.nn.Linear", "with": {"in_features": {"of": "os.getpid", "with": {}}}},
        {"of": "torch.nn.Linear", "with": {"in_features": "x", "out_features": 1}},
        {"of": "torch.nn.Linear", "with": {"odd": 1}},
        {"of": "torch.nn.Sequential", "children": {"0": {"of": "os.getpid", "with": {}}}},
        {"of": "torch.nn.Linear", "with": [1, 2]},
        {"of": "torch.nn.Linear", "with": "weight"},
        {"of": "torch.nn.Sequential", "children": ["0"]},
        {"of": "torch.nn.Sequential", "children": {"0": 3}},
        {"of": "torch.nn.Linear", "partial": 3},
        {"entries": 3},
        {"entries": [[1, 2, 3]]},
        {"entries": [[[1], 2]]},
        {"of": "torch.nn.Sequential", "children": {"a.b": {"of": "torch.nn.ReLU", "with": {}}}},
        {"of": "torchvision.models.resnet18", "with": {"weights": "DEFAULT"}},
        {"of": "torchvision.models.resnet18"},
        {"anything": 1},
        {"__reduce__": 1},
        # memory and time: not where it is tried first, without shapes, any number of copies
        {
            "of": "torch.nn.Linear",
            "with": {"in_features": 9**9, "out_features": 9, "device": "cpu"},
        },
        {"of": "torch.nn.Linear", "partial": {"in_features": 9, "device": "cpu"}},
        {"of": "torch.nn.LazyLinear", "with": {"out_features": 3}},
        {"of": "torch.nn.TransformerEncoder", "with": {"encoder_layer": 0, "num_layers": 9**9}},
    ],
)
def test_nothing_else_is_made(attack: Any) -> None:
    with pytest.raises(
        PosteriorFormatError, match=r"not on the list|cannot be made|expected|alone"
    ):
        make(attack)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("LSTM", {"input_size": 3, "hidden_size": 3, "num_layers": 10**9}),
        ("Transformer", {"num_encoder_layers": 10**9}),
    ],
)
def test_a_number_of_layers_takes_no_endless_time(name: str, arguments: dict[str, Any]) -> None:
    with (
        torch.device("meta"),
        bounded(5000),
        pytest.raises(PosteriorFormatError, match="takes more"),
    ):
        make({"of": f"torch.nn.{name}", "with": arguments})


def test_a_large_known_network_is_within_the_bound_of_loading() -> None:
    net = torchvision.models.resnet50(num_classes=3)
    with torch.device("meta"), bounded(1000 * (10 + len(describe(net)))) as bound:
        make(network_recipe(net))
    assert bound.calls > 0.5 * 1000 * len(describe(net))
