"""The noise that a pilot finds, by a closed form; what follows it, alone, resumed and by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import DeepEnsemble
from lightning_bnn.ensembles.pilot import NoisePilot, held_out
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import Normal
from tests.nets import make_data
from tests.trainers import quiet_trainer
from tests.truth.linear_regression import LinearRegression

PROBLEM = LinearRegression.make(examples=400)


def closed_form(rows: np.ndarray) -> float:
    """The root mean square on the other rows of the ridge regression with learned noise on these.

    The minimum over w and s of the mean energy, in which rows count 1/0.8, by alternating.
    """
    x, y = PROBLEM.inputs.numpy(), PROBLEM.targets.numpy()[:, 0]
    inside, outside, variance = x[rows], x[~rows], 1.0
    for _ in range(100):
        precision = inside.T @ inside / 0.8 / variance + np.eye(x.shape[1]) / PROBLEM.prior_sd**2
        weights = np.linalg.solve(precision, inside.T @ y[rows] / 0.8 / variance)
        variance = np.square(y[rows] - inside @ weights).mean()
    return float(np.sqrt(np.square(y[~rows] - outside @ weights).mean()))


def linear(members: Any, likelihood: Any, optimizer: Any, start: Any = None) -> DeepEnsemble:
    net = PROBLEM.net()
    count = members if isinstance(members, int) else len(members)
    return DeepEnsemble(
        net, likelihood, Normal(0.0, PROBLEM.prior_sd), members, seed=3, mode="stacked",
        start=[net] * count if start is None else start, optimizer=optimizer,
        randomise="targets and anchors",
    )  # fmt: skip


def fit_linear(ensemble: DeepEnsemble, steps: int, *callbacks: Callback) -> None:
    data = TensorDataset(PROBLEM.inputs, PROBLEM.targets)
    everything = [list(range(len(data)))] * steps
    trainer = quiet_trainer(max_epochs=1, callbacks=list(callbacks))
    trainer.fit(ensemble, DataLoader(data, batch_sampler=everything))


def test_the_noise_is_that_of_the_closed_form() -> None:
    """On linear regression, for each of eight members within 3 %, and near to the true noise.

    Of 80 residuals the root mean square has a relative standard error of 8 %, the mean over eight
    members, which share examples, of about 4 %: 0.6 to 0.8 for the true 0.7 is three of them and
    more. The seed is fixed.
    """
    ensemble = linear(8, Gaussian(learn=True), partial(Adam, lr=0.03))
    fit_linear(ensemble, 1200)
    noise = ensemble.pilot.noise
    rows = held_out(ensemble._seeds(), torch.arange(400)).numpy()
    assert (rows.mean(1) > 0.1).all()
    expected = [closed_form(~held) for held in rows]
    np.testing.assert_allclose(noise[:, 0], expected, rtol=0.03)
    assert len(set(noise[:, 0].tolist())) == 8
    assert 0.6 < noise.mean() < 0.8
    # it is held to the end, and is what members predict with
    torch.testing.assert_close(ensemble.bank.learned.detach(), noise.log().float())
    scales = [float(part.likelihood.log_scale.exp()) for part in ensemble.posterior().components]
    np.testing.assert_allclose(scales, noise[:, 0], rtol=1e-6)


class AtEndOfPilot(Callback):
    """Keeps the weights that the pilot ends with."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == module.pilot.steps:
            self.weights = {n: t[0].clone() for n, t in module.current_draws().items()}


def test_after_the_pilot_a_member_is_trained_as_with_the_noise_given() -> None:
    """From where the pilot ended, for three fifths of the steps, to rounding."""
    net, sgd, watch = PROBLEM.net(), partial(SGD, lr=0.05, momentum=0.9), AtEndOfPilot()
    piloted = linear([5], Gaussian(learn=True), sgd, start=[net])
    fit_linear(piloted, 80, watch)
    noise = float(piloted.pilot.noise)
    net.load_state_dict(watch.weights)
    given = linear([5], Gaussian(noise), sgd, start=[net])
    fit_linear(given, 48)
    torch.testing.assert_close(piloted.weights, given.weights, rtol=1e-5, atol=1e-6)
    other = linear([5], Gaussian(2 * noise), sgd, start=[net])
    fit_linear(other, 48)
    assert (piloted.weights - other.weights).abs().max() > 1e-2


# -------------------------------------------------------------------- networks


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()


def make(members: Any = 3, **options: Any) -> DeepEnsemble:
    likelihood = options.pop("likelihood", None) or Gaussian([1.0, 1.0], learn=True).double()
    defaults: dict[str, Any] = {"seed": 5, "mode": "loop", "optimizer": partial(Adam, lr=0.01)}
    return DeepEnsemble(
        build, likelihood, Normal(), members,
        **{**defaults, "randomise": "targets and anchors", **options},
    )  # fmt: skip


class Watch(Callback):
    """Saves a checkpoint at a step, and records rates."""

    def __init__(self, step: int = -1, path: Any = None) -> None:
        self.step, self.path = step, path
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def fit(ensemble: DeepEnsemble, *callbacks: Any, ckpt: Any = None, epochs: int = 8) -> Any:
    """Of 24 steps ten are the pilot."""
    inputs, targets = (tensor.double() for tensor in make_data("mlp", "regression").tensors)
    data = TensorDataset(inputs, targets * torch.tensor([1.0, 20.0]))
    trainer = quiet_trainer(max_epochs=epochs, callbacks=list(callbacks))
    torch.manual_seed(0)
    train, val = (DataLoader(data, 16, shuffle=shuffle) for shuffle in (True, False))
    trainer.fit(ensemble, train, val, ckpt_path=ckpt)
    return trainer


def test_a_member_alone_finds_and_becomes_what_it_does_beside_others() -> None:
    together, alone = make(3), make([2])
    trainer = fit(together)
    fit(alone)
    assert together.pilot.steps == 10
    assert torch.equal(together.pilot.noise[2:], alone.pilot.noise)
    for name, tensor in alone.current_draws().items():
        assert torch.equal(together.current_draws()[name][2:], tensor)
    # one scale for each output
    assert (together.pilot.noise[:, 1] > 5 * together.pilot.noise[:, 0]).all()
    logged = trainer.callback_metrics["noise_sd"]
    torch.testing.assert_close(logged, together.pilot.noise.mean().float())
    assert (together.best.epoch >= 3).all()  # the pilot is not scored


@pytest.mark.parametrize("step", [3, 10, 11, 20])
def test_resume_is_exact(tmp_path: Path, step: int) -> None:
    """In the pilot, at its end and after it."""
    path = tmp_path / "run.ckpt"
    whole, resumed = make(), make(seed=9)
    fit(whole, Watch(step, path))
    fit(resumed, ckpt=path)
    assert torch.equal(whole.pilot.noise, resumed.pilot.noise)
    for name, tensor in whole.current_draws().items():
        assert torch.equal(tensor, resumed.current_draws()[name]), name
    assert torch.equal(whole.bank.learned, resumed.bank.learned)


def test_optimizer_and_schedule_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    schedule = {"scheduler": partial(ExponentialLR, gamma=0.9), "scheduler_interval": "step"}
    with caplog.at_level("INFO"):
        fit(make(**schedule), watch)
    expected = [0.01 * 0.9**step for length in (10, 14) for step in range(length)]
    np.testing.assert_allclose(watch.rates, expected)
    assert "A pilot of 10 steps found the noise" in caplog.text


def test_a_second_fit_keeps_the_noise() -> None:
    ensemble = make()
    fit(ensemble)
    noise = ensemble.pilot.noise
    fit(ensemble, epochs=2)
    assert ensemble.pilot.noise is noise


def test_data_too_few_to_hold_out() -> None:
    """Said, and the learned noise stands in."""
    ensemble = linear([0], Gaussian(learn=True), partial(SGD, lr=0.01))
    data = TensorDataset(PROBLEM.inputs[:1], PROBLEM.targets[:1])
    held = held_out(ensemble._seeds(), torch.arange(1))
    assert not held.any()
    with pytest.warns(UserWarning, match=r"(?s)held out no example of 1.*Gaussian\(scale"):
        quiet_trainer(max_epochs=8).fit(ensemble, DataLoader(data))
    assert 0.5 < float(ensemble.pilot.noise) < 1.5


def test_snapshots_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"snapshots=.*Gaussian\(scale=0.1\)"):
        make(snapshots=2)


def test_the_lowest_part_counts() -> None:
    pilot = NoisePilot(2, 1)
    pilot.steps = 10
    for step in range(10):
        sizes = torch.tensor([5.0 - step // 2, 1.0 + step // 2])
        pilot.add(slice(0, 2), sizes[:, None].expand(2, 4), torch.tensor([[True, False] * 2] * 2))
        pilot.end_step(step)
    assert pilot.end().tolist() == [[1.0], [1.0]]
