"""SG-MCMC without numbers: its phases, what they find, and that they resume to the last bit."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import SGMCMC
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import Normal
from lightning_bnn.samplers import HMC, SGHMC
from lightning_bnn.samplers.warm_up import WarmUp
from tests.trainers import quiet_trainer
from tests.truth.linear_regression import LinearRegression

pytestmark = pytest.mark.filterwarnings("ignore:The chains do not agree")

EXAMPLES, BATCH = 40, 8  # five steps an epoch


def data(seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, 3, generator=generator)
    noise = 0.3 * torch.randn(EXAMPLES, 1, generator=generator)
    return TensorDataset(inputs, inputs[:, :1].sin() + noise)


def make(**options: Any) -> SGMCMC:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return SGMCMC(net, Gaussian(0.3), **{"chains": 3, "seed": 5, "mode": "loop", **options})


def fit(
    bnn: SGMCMC, *callbacks: Callback, epochs: int = 60, validation: bool = True, **options: Any
) -> pl.Trainer:
    path = options.pop("path", None)
    trainer = quiet_trainer(max_epochs=epochs, callbacks=list(callbacks), **options)
    torch.manual_seed(3 if path is None else 4)
    loaders = [DataLoader(data(), BATCH, shuffle=True)]
    loaders += [DataLoader(data(2), EXAMPLES)] if validation else []
    trainer.fit(bnn, *loaders, ckpt_path=path)
    return trainer


class Phases(Callback):
    """Note, step by step, which chains are warmed up and whether the step was one of sampling."""

    def __init__(self) -> None:
        self.warm: list[int] = []
        self.sampling: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        optimizer = trainer.optimizers[0]
        warm = (~optimizer.ended).sum() if optimizer.warming_up else 0
        self.warm.append(int(warm))
        self.sampling.append(pl_module.sampling)


class Save(Callback):
    """Write a checkpoint after each of some steps."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def test_the_shares_of_the_phases() -> None:
    """Of 300 steps 0.6 warm up, a quarter of the rest adapts; without validation none ends early"""
    phases, collector, bnn = Phases(), SampleCollector(), make()
    fit(bnn, phases, collector, validation=False)
    assert phases.warm == [3] * 179 + [0] * 121  # as it stands after a step
    assert phases.sampling == [False] * (180 + 30) + [True] * 90
    assert collector.steps[0] > 210 + 9
    assert 10 <= len(collector.steps) <= 50
    assert bnn.measured_temperatures.keys() == {"temperature", "configurational_temperature"}


def test_a_warm_up_ends_early_where_validation_stops_to_improve() -> None:
    """And from the best weights, for each chain by itself."""
    phases, bnn = Phases(), make(warm_up_optimizer=partial(torch.optim.Adam, lr=0.1))
    trainer = fit(bnn, phases)
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, WarmUp)
    assert phases.warm[100] < 3
    assert optimizer.ended.all()
    assert bnn.best is not None
    assert (bnn.best.epoch >= 0).all()


@pytest.mark.parametrize(
    ("options", "fits", "steps"),
    [
        # in the warm-up, while some chains still warm up, adaptation, burn-in, sampling
        ({}, {}, (23, 150, 195, 225, 271)),
        ({"warm_up_optimizer": partial(torch.optim.Adam, lr=0.1)}, {}, (40, 100, 135, 155, 250)),
        # one chain in cycles: in the second warm-up, and in the second sampling
        ({"chains": 1, "cycles": 2}, {"validation": False}, (173, 280)),
    ],
)
def test_resume_is_exact_through_every_phase(
    tmp_path: Path, options: Any, fits: Any, steps: Any
) -> None:
    whole, bnn = SampleCollector(), make(**options)
    fit(bnn, whole, Save(tmp_path, *steps), **fits)
    for step in steps:
        resumed, again = SampleCollector(), make(**options)
        fit(again, resumed, path=tmp_path / f"{step}.ckpt", **fits)
        assert torch.equal(bnn.weights, again.weights), step
        assert resumed.steps == whole.steps, step
        first, second = whole.posterior().sample(len(whole)), resumed.posterior().sample(len(whole))
        assert all(torch.equal(first[name], second[name]) for name in first), step
        means, found = bnn.measured_temperatures, again.measured_temperatures
        assert all(torch.equal(means[name], found[name]) for name in means), step
        rates = [one.sampler.step_sizes.rates for one in (bnn, again)]
        assert torch.equal(*rates), step


def fit_hmc(adapt: int, *callbacks: Callback, steps: int = 40, **options: Any) -> SGMCMC:
    """A full batch; ``adapt`` transitions of L = 5."""
    bnn = make(chains=2, sampler=partial(HMC, leapfrog_steps=5, adapt_steps=adapt))
    torch.manual_seed(3)
    trainer = quiet_trainer(max_epochs=steps, callbacks=list(callbacks))
    trainer.fit(bnn, DataLoader(data(), EXAMPLES), ckpt_path=options.get("path"))
    return bnn


def test_the_warm_up_of_hmc_takes_as_many_steps_as_a_transition_has_gradients(
    tmp_path: Path,
) -> None:
    """A quarter of 40 steps, five of Adam's in each; and it resumes to the last bit."""
    phases = Phases()
    bnn = fit_hmc(4, phases, Save(tmp_path, 6, 12))
    assert phases.warm == [2] * 9 + [0] * 31
    ended = torch.load(tmp_path / "12.ckpt", weights_only=True)["optimizer_states"][0]
    first = ended["warm_up"]["first"]["state"]
    assert {int(state["step"]) for state in first.values()} == {10 * 5}
    for step in (6, 12):
        again = fit_hmc(4, path=tmp_path / f"{step}.ckpt")
        assert torch.equal(bnn.weights, again.weights), step


@pytest.mark.parametrize("lr", [None, 0.1])
def test_a_chain_goes_through_its_phases_as_it_would_alone(lr: float | None) -> None:
    options = {} if lr is None else {"warm_up_optimizer": partial(torch.optim.Adam, lr=lr)}
    together, alone = make(chains=3, **options), make(chains=[1], cycles=1, **options)
    fit(together)
    fit(alone)
    assert torch.equal(together.weights[1], alone.weights[0])
    assert together.sampler.step_sizes.rates[1] == alone.sampler.step_sizes.rates[0]


def test_few_chains_go_through_cycles() -> None:
    phases, collector, bnn = Phases(), SampleCollector(), make(chains=1)
    fit(bnn, phases, collector, validation=False, epochs=160)  # 800 steps: two cycles of 400
    assert [step for step in range(1, 800) if phases.warm[step] > phases.warm[step - 1]] == [400]
    assert phases.sampling[240:400] == [False] * 80 + [True] * 80
    assert phases.sampling[640:800] == [False] * 80 + [True] * 80
    assert 35 <= len(collector.steps) <= 50
    assert {step > 400 for step in collector.steps} == {True, False}


def test_a_fit_of_unknown_length_has_phases_of_fixed_lengths() -> None:
    bnn = make()
    trainer = quiet_trainer(max_epochs=-1, max_steps=-1, callbacks=[_StopAt(30)])
    trainer.fit(bnn, DataLoader(data(), BATCH))
    optimizer = trainer.optimizers[0]
    assert (optimizer.steps, optimizer.cycle, bnn.sampler.adapt_steps) == (1000, None, 1000)
    with pytest.raises(ConfigurationError, match="length is not known"):
        quiet_trainer(max_epochs=-1).fit(make(cycles=2), DataLoader(data(), BATCH))


class _StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *batch: Any) -> None:
        trainer.should_stop = trainer.global_step >= self.step


def test_what_was_found_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Also without a logger."""
    with caplog.at_level(logging.INFO):
        fit(make(), SampleCollector())
    assert "found the step sizes" in caplog.text
    assert "temperature of their momenta" in caplog.text
    assert "SampleCollector took" in caplog.text


def test_chains_that_are_too_hot_are_warned_of() -> None:
    hot = make(sampler=partial(SGHMC, lr=0.05), warm_up=50)
    with pytest.warns(UserWarning, match="sampled at another temperature than T = 1"):
        fit(hot, epochs=60, log_every_n_steps=1)


@pytest.mark.filterwarnings("default:The chains do not agree")
def test_chains_that_disagree_are_warned_of() -> None:
    """A sine has two branches of a mirrored network; chains of 90 steps do not meet."""
    with pytest.warns(UserWarning, match=r"R-hat reaches .* more chains make it better"):
        fit(make(), SampleCollector())


def test_a_chain_that_stands_still_is_named() -> None:
    class Hold(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *batch: Any) -> None:
            if not module.sampler.adapting:
                module.sampler.step_sizes.rates[2] = 1e-16
                module.sampler.state[module.weights]["velocity"][2] = 0.0

    with pytest.warns(UserWarning, match=r"chains \[2\] hardly move"):
        fit(make(), Hold(), SampleCollector())


@pytest.mark.slow
def test_the_whole_of_it_on_linear_regression() -> None:
    """The program without numbers, against the closed form.

    Eight chains of some 1,000 steps, an autocorrelation time estimated as 100: the mean of a weight
    has a standard error of about sd/√80 = 0.11 sd, a variance one of 16 %, and the mean over the
    five variances one of 7 %; the step that was found heats by 5 %. Tolerances are at 4.5 standard
    errors, five weights: false alarms below 1e-3 if that estimate holds.
    """
    problem = LinearRegression.make()
    torch.manual_seed(0)
    bnn = SGMCMC(
        nn.Linear(5, 1, bias=False).double(),
        Gaussian(problem.noise_sd),
        Normal(0.0, problem.prior_sd),
        chains=8,
        seed=1,
    )
    loader = DataLoader(TensorDataset(problem.inputs, problem.targets), 24, shuffle=True)
    quiet_trainer(max_epochs=600, callbacks=[SampleCollector()]).fit(bnn, loader)
    drawn = bnn.posterior().sample(10**4)["weight"].flatten(1).numpy()
    covariance = np.linalg.inv(problem.precision)
    sd = np.sqrt(np.diag(covariance))
    assert len(drawn) >= 80
    assert np.abs((drawn.mean(0) - problem.mean) / sd).max() < 0.5
    ratio = drawn.var(0) / sd**2
    assert np.abs(ratio - 1).max() < 0.75
    assert 0.75 < ratio.mean() < 1.35
    measured = bnn.measured_temperatures["temperature"]
    assert ((measured > 0.9) & (measured < 1.1)).all()
