"""Every strategy on every kind of network: fit, test, predict, save, load, the same predictions."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_bnn import SGMCMC, DeepEnsemble, Posterior, VariationalBNN
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.likelihoods import Categorical, HeteroscedasticGaussian
from lightning_bnn.predictive import Predictive
from lightning_bnn.priors import Normal
from lightning_bnn.samplers import SGHMC
from tests.nets import NETS, loader, make_data
from tests.trainers import quiet_trainer

TASKS = {"classification": (Categorical, 3), "regression": (HeteroscedasticGaussian, 4)}
METRICS = {
    "classification": {"test_accuracy", "test_nll", "test_brier", "test_ece"},
    "regression": {"test_rmse", "test_nll", "test_crps", "test_coverage"},
}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", NETS)
def test_fit_test_predict_save_load(name: str, task: str, tmp_path: Path) -> None:
    likelihood, outputs = TASKS[task]
    net = NETS[name][0](outputs)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    data = make_data(name, task)
    bnn = VariationalBNN(net, likelihood(), Normal(0.0, 1.0), predict_draws=3, seed=0)
    start = bnn.family.mean.detach().clone()

    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(bnn, loader(data, shuffle=True), loader(data))
    (results,) = trainer.test(bnn, loader(data), verbose=False)
    batches = trainer.predict(bnn, loader(data))

    # pretrained weights are the means to start with, and the user's network stays as it was
    layout = bnn.family.layout
    assert torch.equal(start, layout.flatten(dict(net.named_parameters())))
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    moved = {
        key: (value != 0).any() for key, value in layout.views(bnn.family.mean - start).items()
    }
    assert all(moved.values()), moved

    assert METRICS[task] <= set(results)
    joined = Predictive.concatenate(batches)
    assert len(joined) == len(data)
    assert joined.draws == 3

    posterior = bnn.posterior()
    inputs = data.tensors[0][:7]
    expected = posterior.predict(inputs, draws=5)
    assert expected.mean.isfinite().all()
    assert (expected.epistemic > 0).any()
    posterior.save(tmp_path / "posterior")
    torch.manual_seed(99)
    again = Posterior.load(tmp_path / "posterior", NETS[name][0](outputs)).predict(inputs, draws=5)
    torch.testing.assert_close(again.mean, expected.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again.epistemic, expected.epistemic, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_sampled_fit_test_predict_save_load(name: str, tmp_path: Path) -> None:
    """Two chains, each network with a task; draws on the disk and a saved copy predict alike."""
    task = "regression" if name in ("mlp", "lstm") else "classification"
    likelihood, outputs = TASKS[task]
    net = NETS[name][0](outputs)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    data = make_data(name, task)
    sampler = partial(SGHMC, lr=1e-4)
    bnn = SGMCMC(net, likelihood(), Normal(0.0, 1.0), sampler, chains=2, predict_draws=3, seed=0)
    assert all(torch.equal(value[0], before[key]) for key, value in bnn.current_draws().items())
    collector = SampleCollector(burn_in=2, every=2, dirpath=tmp_path / "draws")

    trainer = quiet_trainer(max_epochs=2, callbacks=[collector])
    trainer.fit(bnn, loader(data, shuffle=True), loader(data))
    (results,) = trainer.test(bnn, loader(data), verbose=False)
    joined = Predictive.concatenate(trainer.predict(bnn, loader(data)))

    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert METRICS[task] <= set(results)
    assert (len(joined), joined.draws) == (len(data), 3)
    posterior = bnn.posterior()
    assert len(posterior) == 4  # after steps 4 and 6, of two chains
    inputs = data.tensors[0][:7]
    expected = posterior.predict(inputs)
    assert expected.mean.isfinite().all()
    assert (expected.epistemic > 0).any()
    posterior.save(tmp_path / "saved")
    for place in ("draws", "saved"):
        again = Posterior.load(tmp_path / place, NETS[name][0](outputs)).predict(inputs)
        torch.testing.assert_close(again.mean, expected.mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_ensemble_fit_test_predict_save_load(name: str, tmp_path: Path) -> None:
    """Two members of each network, which start anew, with a task."""
    task = "classification" if name in ("mlp", "lstm") else "regression"
    likelihood, outputs = TASKS[task]
    net = NETS[name][0](outputs)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    data = make_data(name, task)
    ensemble = DeepEnsemble(net, likelihood(), Normal(0.0, 1.0), members=2, seed=0)
    start = {key: value.clone() for key, value in ensemble.current_draws().items()}

    trainer = quiet_trainer(max_epochs=2)
    trainer.fit(ensemble, loader(data, shuffle=True), loader(data))
    (results,) = trainer.test(ensemble, loader(data), verbose=False)
    joined = Predictive.concatenate(trainer.predict(ensemble, loader(data)))

    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    moved = {key: (value != start[key]).any() for key, value in ensemble.current_draws().items()}
    assert all(moved.values()), moved
    assert METRICS[task] <= set(results)
    assert (len(joined), joined.draws) == (len(data), 2)
    posterior = ensemble.posterior()
    inputs = data.tensors[0][:7]
    expected = posterior.predict(inputs)
    assert expected.mean.isfinite().all()
    assert (expected.epistemic > 0).any()
    posterior.save(tmp_path / "posterior")
    again = Posterior.load(tmp_path / "posterior", NETS[name][0](outputs)).predict(inputs)
    torch.testing.assert_close(again.mean, expected.mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("estimator", ["flipout", "local"])
@pytest.mark.parametrize("name", NETS)
def test_per_example_estimators_run_on_every_network(name: str, estimator: str) -> None:
    net = NETS[name][0](3)
    data = make_data(name, "classification")
    bnn = VariationalBNN(net, Categorical(), Normal(0.0, 1.0), estimator=estimator)
    before = bnn.family.rho.detach().clone()
    quiet_trainer(max_epochs=1).fit(bnn, loader(data))
    assert (bnn.family.rho != before).float().mean() > 0.9


def test_batchnorm_statistics_travel_with_the_posterior(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    data = make_data("mlp", "classification")
    bnn = VariationalBNN(net, Categorical(), Normal(0.0, 1.0))
    quiet_trainer(max_epochs=2).fit(bnn, loader(data))
    posterior = bnn.posterior()
    assert not torch.equal(posterior.fixed["1.running_mean"], net[1].running_mean)
    posterior.save(tmp_path / "posterior")
    loaded = Posterior.load(tmp_path / "posterior", net)
    assert torch.equal(loaded.fixed["1.running_mean"], posterior.fixed["1.running_mean"])
