"""Every strategy on every kind of network: fit, test, predict, save, load, the same predictions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bnn import (
    IVONBNN,
    SGMCMC,
    DeepEnsemble,
    LaplaceBNN,
    MCDropoutBNN,
    Posterior,
    VariationalBNN,
)
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.families import FullRank, Kronecker, LowRank, RankOne
from lightning_bnn.likelihoods import Categorical, HeteroscedasticGaussian
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import Normal
from lightning_bnn.samplers import SGHMC
from lightning_bnn.selection import last_layer
from tests.nets import NETS, loader, make_data
from tests.trainers import quiet_trainer

TASKS: dict[str, Any] = {
    "classification": (Categorical, 3, {"test_accuracy", "test_nll", "test_brier", "test_ece"}),
    "regression": (HeteroscedasticGaussian, 4, {"test_rmse", "test_nll", "test_crps"}),
}
VARIATIONAL = partial(VariationalBNN, predict_draws=3)
STRATEGIES: dict[str, Any] = {
    "variational": VARIATIONAL,
    "ivon": partial(IVONBNN, predict_draws=3),
    "flipout": partial(VARIATIONAL, estimator="flipout"),
    "local": partial(VARIATIONAL, estimator="local"),
    "chains": partial(SGMCMC, sampler=partial(SGHMC, lr=1e-4), chains=2, predict_draws=3),
    "ensemble": partial(DeepEnsemble, members=3, start="around"),
    "laplace": partial(LaplaceBNN, structure="diagonal", predict_draws=3),
    "last layer": partial(LaplaceBNN, bayesian=last_layer, predict_draws=3),
    "full rank": partial(VARIATIONAL, family=FullRank(), bayesian=last_layer),
    "low rank": partial(VARIATIONAL, family=LowRank(2)),
    "matrix normal": partial(VARIATIONAL, family=Kronecker(longest=64)),
    "rank one": partial(VARIATIONAL, family=RankOne(2)),
    "dropout": partial(MCDropoutBNN, predict_draws=3),
    "concrete dropout": partial(MCDropoutBNN, kind="concrete", predict_draws=3),
}
# with millions of weights
LONG = ("flipout", "local", "laplace", "ivon", "dropout", "concrete dropout")

FAMILIES = ("full rank", "low rank", "matrix normal", "rank one")


def _takes_long(name: str, kind: str) -> bool:
    """Of the families each network has one in the ordinary suite."""
    if kind in FAMILIES:
        return name == "resnet" or list(NETS).index(name) % 4 != FAMILIES.index(kind)
    return name == "resnet" and kind in LONG


PAIRS = [
    pytest.param(name, kind, marks=pytest.mark.slow if _takes_long(name, kind) else ())
    for name in NETS
    for kind in STRATEGIES
]


@pytest.mark.parametrize(("name", "strategy"), PAIRS)
def test_fit_test_predict_save_load(name: str, strategy: str, tmp_path: Path) -> None:
    """Each network has one of the tasks with one strategy, and the other with the next."""
    place = list(NETS).index(name) + list(STRATEGIES).index(strategy)
    task = list(TASKS)[place % 2]
    likelihood, outputs, metrics = TASKS[task]
    net, data = NETS[name][0](outputs), make_data(name, task)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    bnn = STRATEGIES[strategy](net, likelihood(), prior=Normal(0.0, 1.0), seed=0)
    start = {key: value.clone() for key, value in bnn.state_dict().items() if _trains(bnn, key)}
    if strategy == "chains":  # pretrained weights are where the first begins
        draws = bnn.current_draws()
        assert all(torch.equal(value[0], before[key]) for key, value in draws.items())
    collector = [SampleCollector(burn_in=1, dirpath=tmp_path / "draws")]
    trainer = quiet_trainer(max_epochs=1, callbacks=collector if strategy == "chains" else None)
    trainer.fit(bnn, loader(data, shuffle=True), loader(data))
    (results,) = trainer.test(bnn, loader(data), verbose=False)
    joined = Predictive.concatenate(trainer.predict(bnn, loader(data)))

    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    after = bnn.state_dict()
    assert start
    assert all((after[key] != value).float().mean() > 0.9 for key, value in start.items())
    assert metrics <= set(results)
    assert (len(joined), joined.draws) == (len(data), 3)
    posterior, inputs = bnn.posterior(), data.tensors[0][:7]
    expected = posterior.predict(inputs)
    assert expected.mean.isfinite().all()
    assert (expected.epistemic > 0).any()
    posterior.save(tmp_path / "saved")
    for folder in ["saved", *(["draws"] if strategy == "chains" else [])]:
        again = Posterior.load(tmp_path / folder, NETS[name][0](outputs)).predict(inputs)
        torch.testing.assert_close(again.mean, expected.mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(again.epistemic, expected.epistemic, rtol=1e-3, atol=1e-5)


def _trains(bnn: Any, name: str) -> bool:
    return name in dict(bnn.named_parameters()) and bnn.get_parameter(name).requires_grad
