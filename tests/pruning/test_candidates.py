"""Which parameters may be pruned, and how layers are protected."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.pruning.candidates import candidates, refuse_computed
from lightning_bnn.selection import last_layer, select
from tests.pruning.posteriors import gaussian


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


def test_a_network_in_training_keeps_its_flags():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    before = [parameter.requires_grad for parameter in net.parameters()]
    assert candidates(net, every(net), last_layer) == ["0.weight"]
    assert [parameter.requires_grad for parameter in net.parameters()] == before
    assert select(net) == ["1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("protect", "message"),
    [
        ("nothing.*", "'nothing.*' matches no parameter. Their names begin with .'0.weight'"),
        (nn.Linear(8, 3), "Linear chosen as protected holds no parameter of the network"),
        (["5.weight", 3], "choice of protected weights is made of name patterns.*got 3"),
        (lambda net: ["head"], "protected weights names 'head', which is not a parameter"),
        (["5.*", "!5.*"], "leaves no weight"),
        ("*", "leaves nothing to prune: it takes all of the 2 tensors"),
    ],
)
def test_refusals(protect, message):
    net = gaussian().net
    with pytest.raises(ConfigurationError, match=message):
        candidates(net, every(net), protect)
    assert not any(parameter.requires_grad for parameter in net.parameters())


def old_weight_norm(layer):
    with pytest.warns(FutureWarning):
        return weight_norm(layer)


@pytest.mark.parametrize(
    "change",
    [
        parametrizations.weight_norm,
        parametrizations.orthogonal,
        parametrizations.spectral_norm,
        old_weight_norm,
        spectral_norm,
    ],
)
def test_tensors_from_which_a_weight_is_computed_are_no_weights(change):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), change(nn.Linear(4, 4)), nn.Linear(4, 1))
    assert candidates(net, every(net)) == ["0.weight", "3.weight"]
    with pytest.raises(ConfigurationError) as caught:
        refuse_computed(net, every(net))
    for words in ("weights of '2' are computed", "remove_parametrizations", "protect=['2.*']"):
        assert words in str(caught.value)
    refuse_computed(net, every(net), protect="2.*")
    refuse_computed(net, ["0.weight", "2.bias"])  # they do not vary
    alone = change(nn.Linear(4, 4))
    with pytest.raises(ConfigurationError, match=r"weights of '' are.*protect=\['\*'\]"):
        refuse_computed(alone, every(alone))


def test_weights_that_torch_has_pruned_are_weights():
    net = nn.Sequential(prune.random_unstructured(nn.Linear(3, 4), "weight", amount=0.5))
    assert candidates(net, every(net)) == ["0.weight_orig"]
    refuse_computed(net, every(net))
