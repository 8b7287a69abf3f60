"""Where members start: new initial values, as the network's own code gives them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.initialise import reset_network, start_members


class OwnWay(nn.Module):
    """A parent that initialises its child in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 500)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.layer.weight, 0.0, 0.01)
        nn.init.zeros_(self.layer.bias)


class Bare(nn.Module):
    """Parameters without reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Knows(nn.Module):
    """A parent that initialises the parameter of a child that cannot itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bare = Bare()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.bare.scale)


class Scaled(nn.Linear):
    """A layer with a parameter that its inherited reset_parameters does not know."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.gain = nn.Parameter(torch.ones(3))


def test_a_parent_has_the_last_word() -> None:
    fresh = reset_network(OwnWay(), 0)
    # 2000 numbers: the relative error of their scale is 1.6 %, and 10 % are six of these
    assert fresh.layer.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert fresh.layer.bias.abs().max() == 0


def test_a_transformer_is_reset_as_it_was_built() -> None:
    torch.manual_seed(0)
    net = nn.Transformer(32, 2, 1, 1, 32, batch_first=True)
    fresh = reset_network(net, 1)
    for name, parameter in net.named_parameters():
        # at least 1024 numbers in the random ones: 10 % are more than four standard errors
        built, found = (p.detach().std().item() for p in (parameter, fresh.get_parameter(name)))
        if parameter.ndim > 1:
            assert found == pytest.approx(built, rel=0.1), name
            assert not torch.equal(parameter, fresh.get_parameter(name))


def test_a_parent_may_reset_what_a_child_cannot() -> None:
    assert reset_network(Knows(), 0).bare.scale.std() > 0


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_what_no_reset_reaches_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'1' \(Scaled\).*'gain' is not reached by its"):
        reset_network(nn.Sequential(nn.Linear(2, 2), Scaled()), 0)
    with pytest.raises(ConfigurationError, match="'weight_g' is not reached"):
        reset_network(nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 3))), 0)
    with pytest.raises(ConfigurationError, match=r"'net' \(Bare\).* but no reset_parameters"):
        reset_network(Bare(), 0)


def test_frozen_and_tied_weights_and_statistics() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), Scaled())
    net[2].weight = net[0].weight
    net[3].requires_grad_(False)
    net[1].running_mean.fill_(7.0)
    fresh = reset_network(net, 0)
    assert fresh[2].weight is fresh[0].weight
    assert fresh[1].running_mean.abs().max() == 0
    assert torch.equal(fresh[3].weight, net[3].weight)
    assert all(p.isfinite().all() for p in fresh.parameters())


def test_a_function_builds_a_new_network_in_each_call() -> None:
    net = nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match="in net= gave the same network twice; build a"):
        start_members(net, lambda: net, range(2), 0, 0.1, "member", "net")


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(2, 1)


def test_a_function_that_sets_a_seed_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="gave the same weights to all members"):
        start_members(nn.Linear(2, 1), seeded, range(3), 0, 0.1, "member", "net")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start_members(nn.Linear(2, 1), seeded, [1], 0, 0.1, "member", "net")
        start_members(nn.Linear(2, 1), lambda: nn.Linear(2, 1), range(3), 0, 0.1, "member", "net")


class Features(nn.Module):
    """Random features, another set in each network."""

    def __init__(self, persistent: bool, constant: bool = False) -> None:
        super().__init__()
        features = torch.ones(2, 8) if constant else torch.randn(2, 8)
        self.register_buffer("features", features, persistent=persistent)
        self.out = nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(torch.cos(inputs @ self.features))


def test_buffers_of_a_members_own_are_saved_with_it() -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigurationError, match=r"'features' of the network of chain 0.*persist"):
        start_members(Features(False), lambda: Features(False), range(2), 0, 0.1)
    stacked = start_members(Features(True), lambda: Features(True), range(2), 0, 0.1)
    assert not torch.equal(*stacked["features"])
    stacked = start_members(Features(False, True), lambda: Features(False, True), range(2), 0, 0.1)
    assert "features" not in stacked
