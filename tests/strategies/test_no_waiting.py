"""On an accelerator a training step reads nothing on the host.

A read makes the host wait for the device. There is no accelerator here, so its path is
forced and scalar reads are counted as PyTorch dispatches them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_bnn import SGMCMC, DeepEnsemble, VariationalBNN
from lightning_bnn.errors import NonFiniteError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Laplace, Normal
from lightning_bnn.samplers import BAOA, HMC, PSGLD, SGHMC, SGLD, SGNHT
from lightning_bnn.strategies import Strategy
from tests.nets import loader, make_data, mlp
from tests.trainers import quiet_trainer

READS = ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")


class CountReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in READS:
            self.reads.append(func.name())
        return func(*args, **(kwargs or {}))


class CountInBatches(Callback):
    """Counts from the start of a batch to its end, but for the first of the fit."""

    def __init__(self) -> None:
        self.mode = CountReads()
        self.batches = 0

    def on_train_batch_start(self, *_: Any) -> None:
        if self.batches:
            self.mode.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.batches:
            self.mode.__exit__(None, None, None)
        self.batches += 1


@pytest.fixture
def accelerator_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose values cannot be read without waiting."""
    monkeypatch.setattr(Strategy, "reads_are_free", staticmethod(lambda tensor: False))


def strategies() -> dict[str, Strategy]:
    net = partial(mlp, 3)
    made: dict[str, Strategy] = {
        # a Laplace prior keeps the compiled step of the CPU away, which an accelerator has not
        "variational": VariationalBNN(net(), Categorical(), Laplace()),
        "local": VariationalBNN(net(), Categorical(), Laplace(), estimator="local"),
        "ensemble": DeepEnsemble(net, Categorical(), Normal(), members=3, mode="stacked"),
        "chunks": DeepEnsemble(net, Categorical(), Normal(), members=3, mode="loop", chunk=2),
        "hmc": SGMCMC(net(), Categorical(), sampler=partial(HMC, lr=1e-3), chains=2, mode="loop"),
    }
    for sampler in (SGLD, SGHMC, PSGLD, SGNHT, BAOA):
        made[sampler.__name__] = SGMCMC(
            net(), Categorical(), sampler=partial(sampler, lr=1e-3), chains=2, mode="stacked"
        )
    return made


@pytest.mark.parametrize("name", list(strategies()))
@pytest.mark.usefixtures("accelerator_path")
def test_a_step_reads_nothing(name: str) -> None:
    counted = CountInBatches()
    options = {} if name == "hmc" else {"gradient_clip_val": 1.0}
    trainer = quiet_trainer(max_epochs=2, callbacks=[counted], log_every_n_steps=50, **options)
    data = make_data("mlp", "classification")
    batch_size = len(data) if name == "hmc" else 16
    trainer.fit(strategies()[name], loader(data, batch_size=batch_size))
    assert counted.batches >= 2
    assert counted.mode.reads == []


class Poison(Callback):
    """Weights of the first member or chain that are not finite, after the fourth step."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 4:
            rows = module.family.mean if hasattr(module, "family") else module.weights
            with torch.no_grad():
                rows[0] = torch.nan


@pytest.mark.parametrize("name", ["variational", "SGHMC"])
@pytest.mark.usefixtures("accelerator_path")
def test_the_step_that_went_wrong_is_named_later(name: str) -> None:
    trainer = quiet_trainer(max_epochs=9, callbacks=[Poison()], log_every_n_steps=10)
    with pytest.raises(NonFiniteError, match=r"not finite at step 4\."):
        trainer.fit(strategies()[name], loader(make_data("mlp", "classification"), batch_size=4))
    assert trainer.global_step == 9  # looked at in the tenth step, before it was taken


@pytest.mark.usefixtures("accelerator_path")
def test_a_member_is_dropped_at_once_and_named_later() -> None:
    ensemble = strategies()["ensemble"]
    trainer = quiet_trainer(max_epochs=2, callbacks=[Poison()], log_every_n_steps=10)
    data = make_data("mlp", "classification")
    with pytest.warns(UserWarning, match="member 0 is not finite at step 4: dropped"):
        trainer.fit(ensemble, loader(data, batch_size=4))
    assert ensemble.alive.tolist() == [False, True, True]
    assert ensemble.weights[1:].isfinite().all()
