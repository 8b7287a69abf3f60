"""What callbacks ask of strategies, and of modules that are none."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_bnn import SGMCMC, VariationalBNN
from lightning_bnn.callbacks.sources import source_of
from lightning_bnn.ensembles import MemberBatch
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.samplers import HMC
from lightning_bnn.strategies import DeepEnsemble, Strategy
from tests.callbacks.fits import Plain, network

TRAINED = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
HEAD = ["3.weight", "3.bias"]


def frozen() -> nn.Module:
    net = network()
    net[:3].requires_grad_(False)
    return net


def plain_with_frozen() -> Plain:
    module = Plain()
    module.body = frozen()
    return module


@pytest.mark.parametrize(
    ("make", "ids", "trained"),
    [
        (Plain, [0], [f"body.{name}" for name in TRAINED]),
        (plain_with_frozen, [0], [f"body.{name}" for name in HEAD]),
        (lambda: VariationalBNN(network(), Gaussian(), bayesian="3.*"), [0], TRAINED),
        (lambda: VariationalBNN(frozen(), Gaussian()), [0], HEAD),
        (lambda: SGMCMC(network(), Gaussian(), chains=[4, 7]), [4, 7], TRAINED),
        (lambda: SGMCMC(network(), Gaussian(), bayesian="3.*", warm_up=3), [0], HEAD),
        (lambda: DeepEnsemble(network(), Gaussian(), members=[2, 5, 6]), [2, 5, 6], TRAINED),
        (lambda: DeepEnsemble(frozen(), Gaussian()), [0, 1, 2, 3, 4], HEAD),
    ],
)
def test_a_source_describes_itself(make: Any, ids: Any, trained: Any) -> None:
    module = make()
    source = source_of(module)
    assert (source is module) == isinstance(module, Strategy)
    assert source.ids == ids
    assert source.trained == trained
    assert source.alive.tolist() == [True] * len(ids)
    draws = source.current_draws()
    assert set(trained) <= set(draws)
    assert all(len(tensor) == len(ids) for name, tensor in draws.items() if name in trained)
    batch = (torch.randn(3, 2), torch.randn(3, 1))
    assert source.inputs_of(batch, 0) is batch[0]


def test_the_steps_before_the_first_draw() -> None:
    """The warm-up, and what the sampler needs to adapt; none where nothing settles."""
    sampler = partial(HMC, lr=0.1, adapt_steps=4)
    bnn = SGMCMC(nn.Linear(2, 1), Gaussian(), sampler=sampler, warm_up=3, num_data=9)
    bnn.configure_optimizers()
    assert bnn.settling_steps == 7
    assert (
        source_of(Plain()).settling_steps
        == source_of(DeepEnsemble(network(), Gaussian())).settling_steps
        == 0
    )


def test_members_with_their_own_batches_and_noise() -> None:
    ensemble = DeepEnsemble(
        network(), Gaussian(learn=True), members=2, independent_batches=True, num_data=9
    )
    inputs = torch.randn(2, 4, 3)
    batch = MemberBatch((inputs, torch.randn(2, 4, 1)))
    assert torch.equal(ensemble.inputs_of(batch, 1), inputs[1])
    ensemble.learned.data[:] = torch.tensor([[0.0], [1.0]])
    scales = [ensemble.likelihood_of(row).log_scale.item() for row in (0, 1)]
    assert scales == [0.0, 1.0]
