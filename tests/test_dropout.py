"""Where dropout acts in a network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_bnn import MCDropoutBNN, mc_dropout
from lightning_bnn.dropout import input_features, inserted_layers
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal
from lightning_bnn.strategies.dropout import Kind


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 6), nn.Conv1d(4, 6, 3), nn.Conv2d(4, 6, 3, groups=2), nn.Conv3d(4, 4, 1),
        nn.ConvTranspose1d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3, groups=2),
    ],
    ids=repr,
)  # fmt: skip
def test_noise_on_the_inputs_is_noise_on_the_weights(layer: nn.Module) -> None:
    torch.manual_seed(0)
    rank = layer.weight.dim() - 2
    inputs, noise = torch.randn(2, 4, *[5] * rank), torch.rand(4)
    weight = layer.weight * noise[input_features(layer)]
    expected = layer(inputs * noise.view(4, *[1] * rank))
    torch.testing.assert_close(functional_call(layer, {"weight": weight}, (inputs,)), expected)


class WithToken(nn.Module):
    """As a vision transformer: a parameter beside the layers, the first of which sees the data."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4))
        self.patches, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.relu(self.patches(inputs) + self.token))


def test_the_first_layer_is_the_one_that_sees_the_data() -> None:
    assert [layer.name for layer in inserted_layers(WithToken(), None, 0.1)] == ["head"]


@pytest.mark.parametrize("kind", ["bernoulli", "concrete"])
def test_a_frozen_layer_has_no_dropout_and_needs_no_prior(kind: Kind) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].requires_grad_(False)
    prior = {"0.*": Normal(), "2.*": Normal()}
    bnn = MCDropoutBNN(net, Categorical(), prior, kind=kind, num_data=8)
    assert bnn.inferred == ["2.weight"]
    bnn.loss((torch.ones(8, 2), torch.zeros(8, dtype=torch.int64))).backward()


def test_one_weight_of_two_layers_has_one_rate() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    net[2].weight = net[1].weight
    assert MCDropoutBNN(net, Categorical()).rates == {"1": 0.1, "2": 0.1}
    with pytest.raises(ConfigurationError, match="'1' and '2' have the same weight"):
        MCDropoutBNN(net, Categorical(), kind="concrete")


class Attention(nn.Module):
    """Reads the rate of one of its dropout layers, as those do that call fused attention."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop, self.body, self.end = nn.Dropout(0.1), nn.Linear(2, 3), nn.Dropout(rate)

    def forward(self, inputs: Tensor) -> Tensor:
        rate = self.drop.p if self.training else 0.0
        outputs: Tensor = self.body(nn.functional.dropout(inputs, rate))
        return outputs if self.end.p == 0 else self.end(outputs)


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
def test_a_layer_of_its_own_that_a_network_does_not_call_is_let_be(kind: Kind) -> None:
    bnn = MCDropoutBNN(Attention(0.5), Categorical(), kind=kind, num_data=8)
    bnn.loss((torch.ones(8, 2), torch.zeros(8, dtype=torch.int64))).backward()
    assert (bnn.posterior().predict(torch.ones(2, 2)).epistemic > 0).all()


def test_a_network_none_of_whose_layers_is_called_is_refused() -> None:
    inputs, targets = torch.ones(8, 2), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(ConfigurationError, match="calls none of its dropout layers"):
        MCDropoutBNN(Attention(0.0), Categorical(), num_data=8).loss((inputs, targets))
    with pytest.raises(ConfigurationError, match="calls none of its dropout layers"):
        mc_dropout(Attention(0.0), Categorical()).predict(inputs)
