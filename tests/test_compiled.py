"""Networks that torch.compile was given: run plain, under their plain names."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_bnn import SGMCMC, DeepEnsemble, Posterior, VariationalBNN
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.network import plain_network
from tests.nets import make_data
from tests.trainers import quiet_trainer

INPUTS, TARGETS = make_data("mlp", "classification").tensors
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def compiled(kind: str) -> Any:
    net = plain()
    if kind == "in place":
        net.compile()
        return net
    if kind == "nested":
        net[0] = torch.compile(net[0])
    if kind in ("inside of a compiled one", "whole"):
        net[0] = torch.compile(net[0]) if kind != "whole" else net[0]
        return torch.compile(net)
    return net


KINDS = ["whole", "nested", "inside of a compiled one", "in place"]


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_weights_are_those_of_the_plain_network(kind: str, tmp_path: Path) -> None:
    net = compiled(kind)
    before = [name for name, _ in net.named_parameters()]
    with pytest.warns(UserWarning, match=r"given to torch\.compile.*it is no faster"):
        bnn = VariationalBNN(net, Categorical(), bayesian="2.*", seed=0)
    assert [name for name, _ in bnn.net.named_parameters()] == NAMES
    assert bnn.family.layout.names == ["2.weight", "2.bias"]
    rows = DataLoader(make_data("mlp", "classification"), batch_size=16)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(bnn, rows)
    assert [name for name, _ in net.named_parameters()] == before, "yours stays as it is"
    posterior = bnn.posterior()
    posterior.save(tmp_path)
    for other in (plain(), compiled(kind), None):  # None: its recipe is in the file
        loaded = Posterior.load(tmp_path, other)
        assert torch.equal(loaded.predict(INPUTS).mean, posterior.predict(INPUTS).mean)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    assert VariationalBNN.load_from_checkpoint(tmp_path / "end.ckpt")


@pytest.mark.parametrize("kind", KINDS[:2])
def test_other_strategies_and_choices(kind: str) -> None:
    net = compiled(kind)
    last = net[2] if kind == "nested" else net._orig_mod[2]
    with pytest.warns(UserWarning, match="torch.compile"):
        chains = SGMCMC(net, Categorical(), chains=2, bayesian=last, num_data=9)
    assert chains.bank.layout.names == ["2.weight", "2.bias"]
    with pytest.warns(UserWarning, match="torch.compile"):
        ensemble = DeepEnsemble(lambda: compiled(kind), Categorical(), members=[0], num_data=9)
    assert ensemble.bank.layout.names == NAMES
    with pytest.warns(UserWarning, match="torch.compile"):
        around = DeepEnsemble(net, Categorical(), members=[0], start="around", num_data=9)
    assert torch.equal(around.current_draws()["0.weight"][0], plain()[0].weight)


def test_the_plain_network_has_the_same_tensors() -> None:
    net = compiled("nested")
    same = plain_network(net)
    assert [id(p) for p in same.parameters()] == [id(p) for p in net.parameters()]
    other = plain()
    assert plain_network(other) is other
    assert list(plain_network(deepcopy(net)).state_dict()) == NAMES
