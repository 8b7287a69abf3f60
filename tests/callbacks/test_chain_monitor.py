from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from lightning_bnn import SGMCMC, VariationalBNN
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.callbacks.chain_monitor import ENOUGH, ChainMonitor
from lightning_bnn.diagnostics import diagnose
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.samplers import SGLD
from tests.callbacks.fits import save
from tests.trainers import quiet_trainer

GENERATOR = torch.Generator().manual_seed(2)
INPUTS = torch.randn(40, 2, generator=GENERATOR)
TARGETS = INPUTS @ torch.tensor([[1.0], [2.0]]) + 0.3 * torch.randn(40, 1, generator=GENERATOR)
DATA = TensorDataset(INPUTS, TARGETS)


def loader(shuffle: bool = True) -> DataLoader:
    return DataLoader(DATA, batch_size=20, shuffle=shuffle)


def long_epochs() -> DataLoader:
    """140 batches an epoch: a short epoch costs more time than its steps."""
    return DataLoader(DATA, batch_size=20, sampler=RandomSampler(DATA, True, 2800))


def strategy(lr: float = 0.1, net: nn.Module | None = None, **options: Any) -> SGMCMC:
    torch.manual_seed(0)
    sampler = partial(SGLD, lr=lr)
    likelihood = Gaussian(0.3)
    return SGMCMC(
        nn.Linear(2, 1) if net is None else net, likelihood, sampler=sampler,
        **{"chains": 3, "seed": 1, "mode": "loop", **options},
    )  # fmt: skip


def fit(bnn: SGMCMC, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    train = options.pop("train", None) or loader()
    validation, checkpoint = options.pop("validation", None), options.pop("ckpt_path", None)
    trainer = quiet_trainer(callbacks=list(callbacks), **options)
    trainer.fit(bnn, train, validation, ckpt_path=checkpoint)
    return trainer


class Log(pl.Callback):
    """Keeps what was logged, by step."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *rest: Any) -> None:
        if "rhat_max" in trainer.callback_metrics:
            self.seen[trainer.global_step] = float(trainer.callback_metrics["rhat_max"])


@pytest.mark.slow
def test_chains_that_agree_give_no_warning() -> None:
    """Of 15 sets of 4 chains of 400 independent draws none reached an R-hat of 1.007."""
    monitor = ChainMonitor(every_n_steps=2, burn_in=40, elements=8)
    trainer = fit(strategy(lr=0.1), monitor, max_steps=1240, train=long_epochs())
    assert monitor.diagnosis().converged
    assert float(trainer.callback_metrics["ess_min"]) > 400


def test_a_few_records_are_logged_and_called_few() -> None:
    """Of 15 sets of 4 chains of 100 independent draws the worst R-hat was 1.025."""
    monitor, log = ChainMonitor(every_n_steps=2, burn_in=40, elements=8), Log()
    with pytest.warns(UserWarning, match="120 draws per chain are too few to judge"):
        trainer = fit(strategy(lr=0.1), monitor, log, max_steps=280, train=long_epochs())
    diagnosis = monitor.diagnosis()
    assert (diagnosis.chains, diagnosis.draws) == (3, monitor.recorded) == (3, 120)
    assert list(diagnosis.function) == ["mean_log_likelihood", "prediction"]
    assert diagnosis.max_rhat < 1.05
    assert min(log.seen) == 40 + 2 * ENOUGH
    assert float(trainer.callback_metrics["ess_min"]) > 100
    assert len(set(log.seen.values())) < 30  # not computed anew at each of the records


def test_chains_that_do_not_move_give_one_warning_at_the_end() -> None:
    monitor = ChainMonitor(every_n_steps=1, elements=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(strategy(lr=1e-6), monitor, max_steps=70, train=long_epochs())
    ours = [w for w in caught if "ChainMonitor" in str(w.message)]
    assert len(ours) == 1
    assert ours[0].category is UserWarning
    assert "R-hat reaches" in str(ours[0].message)
    assert "longer burn-in" in str(ours[0].message)
    assert float(trainer.callback_metrics["rhat_max"]) > 1.05


@pytest.mark.filterwarnings("ignore:ChainMonitor")
def test_the_record_is_what_the_chains_predict() -> None:
    """The collector's draws at the same steps, through the posterior."""
    monitor = ChainMonitor(every_n_steps=2, burn_in=10, inputs=(INPUTS, TARGETS), examples=8)
    collector = SampleCollector(burn_in=10, every=2)
    bnn = strategy()
    fit(bnn, monitor, collector, max_steps=60, train=long_epochs())
    expected = diagnose(bnn.posterior(), (INPUTS, TARGETS), examples=8, elements=32)
    found = monitor.diagnosis()
    assert found.labels == expected.labels
    np.testing.assert_allclose(found.rhat, expected.rhat, rtol=1e-6)
    np.testing.assert_allclose(found.chain_ess, expected.chain_ess, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:ChainMonitor")
def test_nothing_is_recorded_before_the_collectors_burn_in_or_in_a_warm_up() -> None:
    burning, warming = ChainMonitor(every_n_steps=2), ChainMonitor(every_n_steps=2)
    fit(strategy(), burning, SampleCollector(burn_in=12, every=4), max_steps=24)
    fit(strategy(warm_up=12), warming, max_steps=24)
    assert burning.recorded == warming.recorded == (24 - 12) // 2


@pytest.mark.filterwarnings("ignore:ChainMonitor")
@pytest.mark.parametrize("given", [True, False])
def test_validation_data_are_watched_if_they_are_checked_first(given: bool) -> None:
    validation = DataLoader(TensorDataset(100 + INPUTS[:5], TARGETS[:5]), batch_size=5)
    monitor = ChainMonitor(every_n_steps=1)
    fit(strategy(), monitor, max_steps=12, validation=validation if given else None)
    watched = monitor._record.watched.examples
    assert watched is not None
    assert (float(watched.inputs.min()) > 50) == given


class Noisy(nn.Module):
    """Draws random numbers even in evaluation mode."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + 0.01 * torch.randn_like(inputs)


def network() -> nn.Module:
    """With parts that behave otherwise in training, and keep statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), Noisy(), nn.Linear(4, 1)
    )


@pytest.mark.filterwarnings("ignore:ChainMonitor")
def test_the_training_is_not_disturbed() -> None:
    weights = []
    for callbacks in ([], [ChainMonitor(every_n_steps=3)]):
        bnn = strategy(lr=1e-3, net=network())
        pl.seed_everything(3)
        fit(bnn, *callbacks, max_steps=20)
        assert bnn.net.training
        weights.append({name: tensor.clone() for name, tensor in bnn.state_dict().items()})
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


@pytest.mark.filterwarnings("ignore:ChainMonitor", "ignore:.*has shuffling enabled")
@pytest.mark.parametrize(("step", "before"), [(15, True), (18, True), (18, False)])
def test_a_resumed_fit_continues_the_record(tmp_path: Path, step: int, before: bool) -> None:
    """Also from a checkpoint that was made in the same step, but before the record."""
    path = tmp_path / "model.ckpt"
    whole, saver = ChainMonitor(every_n_steps=3, elements=8), save(path, step)
    often = {"validation": DataLoader(DATA, batch_size=8, shuffle=True),
             "check_val_every_n_epoch": 3}  # fmt: skip
    pl.seed_everything(3)
    order = [saver, whole] if before else [whole, saver]
    fit(strategy(), *order, max_steps=36, **often)
    resumed = ChainMonitor(every_n_steps=3, elements=8)
    pl.seed_everything(4)
    fit(strategy(), resumed, max_steps=36, **often, ckpt_path=path)
    assert whole.recorded == resumed.recorded == 12
    for name, rows in whole._record.values.items():
        assert torch.equal(torch.stack(rows), torch.stack(resumed._record.values[name])), name
    assert np.array_equal(whole.diagnosis().rhat, resumed.diagnosis().rhat)
    assert whole._record.worst == resumed._record.worst is not None


@pytest.mark.filterwarnings("ignore:ChainMonitor")
def test_a_test_of_an_earlier_checkpoint_leaves_the_record_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    monitor, bnn = ChainMonitor(every_n_steps=1, elements=8), strategy()
    trainer = fit(bnn, monitor, save(path, 6), max_steps=12)
    for count in (12, 20):
        trainer.test(bnn, loader(shuffle=False), ckpt_path=path, verbose=False)
        assert monitor.recorded == count
        trainer.fit_loop.epoch_loop.max_steps = 20
        trainer.fit(bnn, loader())
        assert monitor.recorded == 20
    fresh = ChainMonitor(every_n_steps=1)
    fresh_trainer = quiet_trainer(callbacks=[fresh])
    fresh_trainer.test(strategy(), loader(shuffle=False), ckpt_path=path, verbose=False)
    assert fresh.recorded == 6  # it had no record to lose
    fit(strategy(chains=2), monitor, max_steps=12)
    assert monitor.diagnosis().draws == 12  # other chains start a new record


@pytest.mark.filterwarnings("ignore:ChainMonitor")
def test_a_callback_may_stop_the_training_by_it() -> None:
    """Epochs are of 2 steps: most of them have no new value, the first none at all."""
    stop = EarlyStopping("rhat_max", stopping_threshold=math.inf, patience=99, strict=False)
    trainer = fit(strategy(), ChainMonitor(every_n_steps=1, elements=8), stop, max_steps=40)
    assert trainer.global_step == ENOUGH  # the first value is below infinity
    stop = EarlyStopping("rhat_max", stopping_threshold=0.5, patience=99, strict=False)
    fit(strategy(), ChainMonitor(2, elements=8), log := Log(), stop, max_steps=30)
    assert sorted(log.seen) == list(range(2 * ENOUGH, 31))


def test_too_few_records_are_said() -> None:
    fit(strategy(), ChainMonitor(every_n_steps=50), fast_dev_run=True)  # a trial says nothing
    monitor = ChainMonitor(every_n_steps=50)
    with pytest.warns(UserWarning, match=r"recorded the chains 0 times.*Lower every_n_steps"):
        fit(strategy(), monitor, max_steps=10)
    with pytest.raises(ConfigurationError, match="recorded nothing yet"):
        monitor.diagnosis()


@pytest.mark.filterwarnings("ignore:ChainMonitor")
def test_one_chain_and_classes() -> None:
    torch.manual_seed(0)
    bnn = SGMCMC(nn.Linear(2, 3), Categorical(), sampler=partial(SGLD, lr=0.05), chains=1, seed=1)
    classes = DataLoader(TensorDataset(INPUTS, torch.arange(40) % 3), batch_size=20)
    monitor = ChainMonitor(every_n_steps=1, examples=6, elements=10)
    trainer = fit(bnn, monitor, train=classes, max_steps=40)
    assert math.isfinite(float(trainer.callback_metrics["rhat_max"]))
    assert len(monitor.diagnosis().labels) == 11
    assert "One chain" in monitor.diagnosis().advice


def test_only_strategies_with_chains() -> None:
    bnn: Any = VariationalBNN(nn.Linear(2, 1), Gaussian(0.3))
    with pytest.raises(ConfigurationError, match="chains of SGMCMC; got VariationalBNN"):
        fit(bnn, ChainMonitor(), max_steps=2)


@pytest.mark.parametrize(
    "options",
    [{"every_n_steps": 0}, {"examples": 0}, {"elements": 0}, {"burn_in": -1}],
)
def test_bad_options(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="is a whole number, at least"):
        ChainMonitor(**options)
