"""What users would launch, small: networks, data and strategies that travel to workers."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import SGMCMC, DeepEnsemble, MCDropoutBNN, VariationalBNN
from lightning_bnn.launch import unit_seed
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import Posterior
from lightning_bnn.priors import Normal
from lightning_bnn.samplers import SGLD
from tests.trainers import quiet_trainer


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))


def make_data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 2, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 16, shuffle=True)


def make_ensemble(members: list[int], seed: int) -> DeepEnsemble:
    return DeepEnsemble(
        make_net, Gaussian(0.1), Normal(0.0, 1.0), members=members, mode="loop", seed=seed
    )


def make_chains(members: list[int], seed: int) -> SGMCMC:
    return SGMCMC(
        make_net(),
        Gaussian(0.1),
        Normal(0.0, 1.0),
        partial(SGLD, lr=1e-4),
        chains=members,
        start="reset",
        mode="loop",
        seed=seed,
    )


def make_variational() -> VariationalBNN:
    return VariationalBNN(make_net(), Gaussian(0.1), Normal(0.0, 1.0))


def make_dropout() -> MCDropoutBNN:
    return MCDropoutBNN(make_net(), Gaussian(0.1), rate=0.2)


class Slowly(pl.Callback):
    """Take so many seconds for each batch, so that something can happen meanwhile."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(self.seconds)


def fit_by_hand(make_bnn: Any, member: int, seed: int = 0, **options: Any) -> Posterior:
    """The posterior of a member that is trained without the launcher."""
    pl.seed_everything(unit_seed(seed, [member]), workers=True, verbose=False)
    takes = make_bnn.__code__.co_varnames[: make_bnn.__code__.co_argcount]
    given = {
        name: value for name, value in (("members", [member]), ("seed", seed)) if name in takes
    }
    strategy = make_bnn(**given)
    quiet_trainer(**options).fit(strategy, make_data())
    return strategy.posterior()


def same_weights(one: Posterior, other: Posterior, count: int = 1) -> bool:
    """Whether two posteriors of draws are the same bit for bit."""
    left, right = one.sample(count), other.sample(count)
    return list(left) == list(right) and all(_same(left[name], right[name]) for name in left)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other)
