"""The default schedule: its formula, the fits that follow it, and how they resume."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bnn import DeepEnsemble, VariationalBNN
from lightning_bnn.callbacks import SWAGMoments
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.strategies.schedule import peak_rate, schedule_factor
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")

ROWS = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.ones(24))
BATCHES = 6  # in an epoch
PEAK = 0.005
RESTORED = 0.01  # the peak where the best weights by validation are restored


class Stream(IterableDataset):
    """Data without a length."""

    def __iter__(self) -> Any:
        return iter(ROWS)


class Rates(pl.Callback):
    """Note the learning rates of each group in each step."""

    def __init__(self) -> None:
        self.seen: dict[int, list[float]] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen[trainer.global_step] = [group["lr"] for group in optimizer.param_groups]

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))


def variational(**options: Any) -> VariationalBNN:
    return VariationalBNN(net(), Gaussian(0.5), seed=4, num_data=24, **options)


def ensemble(**options: Any) -> DeepEnsemble:
    options = {"members": 2, "mode": "loop", "restore_best": False, **options}
    return DeepEnsemble(net(), Gaussian(0.5), seed=4, num_data=24, **options)


every_strategy = pytest.mark.parametrize("make", [variational, ensemble])


def fit(bnn: Any, data: Any = ROWS, ckpt: Path | None = None, **options: Any) -> list[Any]:
    """Fit, by default 4 epochs; the rates of all steps, one by one where there is one group."""
    noted = Rates()
    callbacks = [noted, *options.pop("callbacks", [])]
    options = {"max_epochs": 4, "callbacks": callbacks, **options}
    torch.manual_seed(0 if ckpt is None else 99)
    loader = DataLoader(data, batch_size=4, shuffle=data is ROWS)
    trainer = quiet_trainer(**options)
    trainer.fit(bnn, loader, ckpt_path=ckpt)
    return [rates[0] if len(rates) == 1 else rates for _, rates in sorted(noted.seen.items())]


def schedule(total: float, steps: int | None = None, peak: float = PEAK) -> list[float]:
    """The rates that the docstring of the module gives, computed here by themselves."""
    warm_up = 100 if total == math.inf else min(max(10, round(0.05 * total)), int(total) // 4)
    rates = [peak * (step + 1) / warm_up for step in range(warm_up)]
    if total == math.inf:
        return [*rates, *[peak] * 10**4][:steps]
    rest = total - warm_up
    later = [peak / 2 * (1 + math.cos(math.pi * step / rest)) for step in range(int(rest))]
    return [*rates, *later][:steps]


@pytest.mark.parametrize("total", [1, 3, 8, 40, 41, 1000, math.inf])
def test_the_factor_is_that_of_the_formula(total: float) -> None:
    expected = schedule(total, 2000, peak=1.0)
    found = [schedule_factor(step, total) for step in range(len(expected))]
    assert found == pytest.approx(expected, abs=1e-12)
    assert total == math.inf or schedule_factor(int(total) + 5, total) == 0.0


@every_strategy
@pytest.mark.parametrize(
    ("options", "total"),
    [
        ({}, 24),
        ({"max_epochs": 9, "max_steps": 14}, 14),
        ({"accumulate_grad_batches": 4}, 8),
        ({"limit_train_batches": 3}, 12),
        ({"fast_dev_run": True}, 1),
    ],
    ids=["epochs", "steps", "accumulated", "limited", "trial"],
)
def test_a_fit_follows_it_to_its_end(make: Callable[..., Any], options: Any, total: int) -> None:
    bnn = make()
    assert fit(bnn, **options) == pytest.approx(schedule(total))
    assert bnn.peak_lr == PEAK


def test_gradients_that_are_accumulated_by_epoch() -> None:
    windows = GradientAccumulationScheduler({0: 1, 2: 4})  # 6, 6, 2 and 2 steps
    assert fit(variational(), callbacks=[windows]) == pytest.approx(schedule(16))


@pytest.mark.parametrize(
    ("data", "options"),
    [(ROWS, {"max_epochs": -1, "max_time": {"seconds": 1}}), (Stream(), {"max_epochs": 20})],
    ids=["time", "no length"],
)
def test_a_fit_of_unknown_length_keeps_the_peak(data: Any, options: Any) -> None:
    rates = fit(variational(), data, **options)
    assert rates == pytest.approx(schedule(math.inf, len(rates)))


@every_strategy
def test_what_the_options_mean(make: Any) -> None:
    mine = partial(SGD, lr=0.01)
    steps = [0.01 * 0.1 ** (step // BATCHES) for step in range(24)]
    assert fit(make(scheduler=None)) == [1e-3] * 24
    assert fit(make(optimizer=mine)) == [0.01] * 24
    assert fit(make(optimizer=mine, scheduler="cosine")) == pytest.approx(schedule(24, peak=0.01))
    by_epoch = partial(StepLR, step_size=1)
    assert fit(make(optimizer=mine, scheduler=by_epoch)) == pytest.approx(steps)
    with pytest.raises(ConfigurationError, match="scheduler= is 'auto' or 'cosine'; got 'lin"):
        make(scheduler="linear")


def test_members_with_optimizers_of_their_own() -> None:
    optimizers = [partial(Adam, lr=0.01), partial(SGD, lr=0.1)]
    expected = [[rate, 10 * rate] for rate in schedule(24, peak=0.01)]
    found = fit(bnn := ensemble(optimizer=optimizers, scheduler="cosine"))
    assert torch.tensor(found).allclose(torch.tensor(expected))
    assert bnn.peak_lr == 0.1
    assert fit(ensemble(optimizer=optimizers)) == [[0.01, 0.1]] * 24


def test_snapshots_have_a_schedule_of_their_own() -> None:
    rates = fit(bnn := ensemble(snapshots=2))
    assert rates[0] == rates[12] == PEAK, "each cycle is annealed from the peak"
    assert bnn.peak_lr is None
    with pytest.raises(ConfigurationError, match="leave scheduler= out"):
        ensemble(snapshots=2, scheduler="cosine")


# -------------------------------------------------------------------- resume


def saver(folder: Path, step: int) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=step, save_top_k=-1)


@every_strategy
def test_a_resumed_fit_is_bit_equal(make: Any, tmp_path: Path) -> None:
    whole = make()
    rates = fit(whole, callbacks=[saver(tmp_path, 8)], enable_checkpointing=True)
    for step in (8, 16):  # both in the middle of an epoch
        resumed = make()
        assert fit(resumed, ckpt=tmp_path / f"step={step}.ckpt") == rates[step:]
        for name, tensor in whole.state_dict().items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(tensor, resumed.state_dict()[name]), name


@every_strategy
def test_a_fit_that_resumes_with_another_length_follows_its_schedule(
    make: Any, tmp_path: Path
) -> None:
    fit(make(), callbacks=[saver(tmp_path, 12)], enable_checkpointing=True)
    ckpt = tmp_path / "step=12.ckpt"
    assert fit(make(), ckpt=ckpt, max_epochs=10) == pytest.approx(schedule(60)[12:])
    assert fit(make(), ckpt=ckpt, max_epochs=3) == pytest.approx(schedule(18)[12:])


@every_strategy
def test_a_checkpoint_without_a_schedule(make: Any, tmp_path: Path) -> None:
    """As version 0.1 wrote them: the fit resumes without one, unless it is asked for."""
    whole = make(scheduler=None)
    fit(whole, callbacks=[saver(tmp_path, 8)], enable_checkpointing=True)
    resumed, ckpt = make(), tmp_path / "step=8.ckpt"
    assert fit(resumed, ckpt=ckpt) == [1e-3] * 16
    first, second = whole.posterior().mean, resumed.posterior().mean
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert resumed.peak_lr is None
    asked = fit(make(scheduler="cosine"), ckpt=ckpt)
    assert asked == pytest.approx(schedule(16)), "over the steps that are left"
    assert fit(resumed) == pytest.approx(schedule(24)), "a later fit has one again"


@every_strategy
def test_a_trainer_that_fits_again_begins_the_schedule_anew(make: Any) -> None:
    noted, bnn = Rates(), make()
    trainer = quiet_trainer(max_epochs=2, callbacks=[noted])
    loader = DataLoader(ROWS, batch_size=4)
    trainer.fit(bnn, loader)
    trainer.fit_loop.max_epochs = 6
    trainer.fit(bnn, loader)
    rates = [rate for (rate,) in noted.seen.values()]
    assert rates == pytest.approx([*schedule(12), *schedule(24)])


# -------------------------------------------------------------------- the rate


@every_strategy
def test_a_tuner_finds_the_peak(make: Any, tmp_path: Path) -> None:
    bnn, options = make(), {"default_root_dir": tmp_path, "max_epochs": 4}
    finder = LearningRateFinder(min_lr=1e-6, max_lr=1e-2, num_training_steps=20)
    rates = fit(bnn, callbacks=[finder], **options)
    assert rates[-24:] == pytest.approx(schedule(24, peak=bnn.lr))  # those before it are trials


def test_trained_weights_get_the_rate_of_constant_training() -> None:
    fresh, trained = net(), net()
    with torch.no_grad():
        trained[0].weight.mul_(3)
    for network, start, rate in [
        (fresh, "reset", PEAK),
        (fresh, "around", PEAK),
        (trained, "reset", PEAK),
        (trained, "around", 1e-3),
        (fresh, [trained, trained], 1e-3),
        (trained, [fresh, fresh], PEAK),
        (lambda: net(), "reset", PEAK),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lightning_bnn.strategies.ensemble.rank_zero_warn", lambda text: None)
            bnn: Any = DeepEnsemble(network, Gaussian(0.5), members=2, start=start, mode="loop")
        fit(bnn, max_epochs=1)
        assert bnn.peak_lr == rate, start
        assert bnn.hparams["optimizer"] == bnn.hparams_initial["optimizer"] == f"Adam(lr={rate:g})"
    bnn = VariationalBNN(trained, Gaussian(0.5))
    fit(bnn, max_epochs=1)
    assert bnn.peak_lr == 1e-3


def test_wide_layers_get_a_lower_rate() -> None:
    for fan_in, rate in ((10, 0.005), (625, 0.005), (10_000, 0.00125)):
        assert peak_rate(fan_in) == pytest.approx(rate)
    wide = nn.Sequential(nn.Linear(4, 1600), nn.Tanh(), nn.Linear(1600, 1))
    for bnn in (VariationalBNN(wide, Gaussian(0.5)), DeepEnsemble(wide, Gaussian(0.5), members=2)):
        fit(bnn, max_epochs=1)
        assert bnn.peak_lr == pytest.approx(0.003125)
        assert bnn.hparams["optimizer"] == "Adam(lr=0.00313)"


def test_members_that_go_back_to_their_best_weights_may_go_faster() -> None:
    """But not without the validation rows by which they would go back."""
    loader = DataLoader(ROWS, batch_size=4)
    for make, validated, rate in (
        (partial(ensemble, restore_best=True), True, RESTORED),
        (partial(ensemble, restore_best=True), False, PEAK),
        (ensemble, True, PEAK),
        (variational, True, PEAK),
    ):
        trainer = quiet_trainer(max_epochs=1)
        trainer.fit(bnn := make(), loader, loader if validated else None)
        assert bnn.peak_lr == rate
    assert peak_rate(625, restores=True) == pytest.approx(0.005), "wide layers are the bound"


def test_a_later_fit_of_the_same_strategy_has_the_same_peak() -> None:
    """Though BatchNorm has counted batches by then, by which trained networks are known."""
    bnn = variational()
    assert fit(bnn) == fit(bnn) == pytest.approx(schedule(24))


def test_swag_sets_its_rate_against_the_schedule() -> None:
    swag = SWAGMoments(start=2, lr=0.02, anneal=0)
    rates = fit(ensemble(), callbacks=[swag])
    assert rates[:12] == pytest.approx(schedule(24)[:12])
    assert rates[12:] == [0.02] * 12


def test_a_line_says_which_rates_are_used(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fit(variational(), enable_model_summary=True)
    assert f"of Adam rises to {PEAK:g} in 6 steps and falls to 0 by step 24" in caplog.text
    fit(variational(), Stream(), enable_model_summary=True)
    assert "in 100 steps and stays there: the length of the fit is not known" in caplog.text
    caplog.clear()
    fit(variational(scheduler=None), enable_model_summary=True)
    assert "rises to" not in caplog.text
