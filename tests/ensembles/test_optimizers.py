"""Optimizers of stacked members: one for all where it keeps them apart, else one for each."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.optim import LBFGS, SGD, Adadelta, Adafactor, Adagrad, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau, StepLR

from lightning_bnn.ensembles.optimizers import MemberOptimizers, MemberSchedulers, make_optimizer
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.selection import FlatLayout
from tests.nets import loader, make_data, mlp
from tests.strategies.ensembles import (
    SCALE,
    assert_member_equals,
    batch_norm_net,
    fit,
    make,
    networks,
    train_plainly,
)
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


class WholeNorm(SGD):
    """Steps of a length that all parameters together decide."""

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        with torch.no_grad():
            for parameter in parameters:
                parameter.sub_(self.defaults["lr"] * parameter.grad / norm)
        return loss


STACKED = [
    (nn.Parameter(torch.ones(3, 8)), FlatLayout({"a": torch.ones(2, 3), "b": torch.ones(2)}))
]


@pytest.mark.parametrize(
    "optimizer", [SGD, Adam, partial(Adam, fused=True), AdamW, RMSprop, Adagrad, Adadelta]
)
def test_optimizers_of_single_elements_step_all_members_at_once(optimizer: Any) -> None:
    made = make_optimizer(partial(optimizer, lr=0.1), None, STACKED)
    assert not isinstance(made, MemberOptimizers)


@pytest.mark.parametrize("optimizer", [Adafactor, WholeNorm, LBFGS])
def test_optimizers_of_whole_tensors_are_one_for_each_member(optimizer: Any) -> None:
    made = make_optimizer(partial(optimizer, lr=0.1), None, STACKED)
    assert isinstance(made, MemberOptimizers)


def test_an_optimizer_of_ones_own_says_that_it_looks_at_single_elements() -> None:
    """And one of a single member has nobody to keep apart from."""

    class Own(SGD):
        elementwise = True

    alone = [(nn.Parameter(torch.ones(1, 8)), STACKED[0][1])]
    assert type(make_optimizer(partial(Own, lr=0.1), None, STACKED)) is Own
    assert type(make_optimizer(partial(Adafactor, lr=0.1), None, alone)) is Adafactor


@pytest.mark.parametrize("optimizer", [Adafactor, WholeNorm])
def test_members_are_kept_apart_as_networks_trained_alone(optimizer: Any) -> None:
    """Each sees the layers of its own network, as in a plain loop."""
    ensemble = make(optimizer=partial(optimizer, lr=0.01))
    plain = networks(ensemble, batch_norm_net)
    trainer = fit(ensemble, 20, precision="64-true")
    assert isinstance(trainer.optimizers[0], MemberOptimizers)
    data = make_data("mlp", "classification")
    for index, net in enumerate(plain):
        train_plainly(net.double(), partial(optimizer, lr=0.01), data, 20)
        assert_member_equals(ensemble, index, net, rtol=1e-7, atol=1e-9)


RATES = (0.2, 0.05, 0.01)


@pytest.mark.parametrize("each", ["both", "optimizer", "scheduler"])
def test_every_member_has_an_optimizer_and_a_schedule_of_its_own(each: str) -> None:
    optimizers = [partial(SGD, lr=rate, momentum=0.9) for rate in RATES]
    schedules = [partial(ExponentialLR, gamma=gamma) for gamma in (0.9, 0.8, 1.0)]
    if each == "scheduler":
        optimizers = [optimizers[0]] * 3
    if each == "optimizer":
        schedules = [schedules[0]] * 3
    ensemble = make(
        optimizer=optimizers[0] if each == "scheduler" else optimizers,
        scheduler=schedules[0] if each == "optimizer" else schedules,
        scheduler_interval="step",
    )
    plain = networks(ensemble, batch_norm_net)
    fit(ensemble, 20, precision="64-true")
    data = make_data("mlp", "classification")
    for index, net in enumerate(plain):
        train_plainly(net.double(), optimizers[index], data, 20, schedules[index])
        assert_member_equals(ensemble, index, net, rtol=1e-8, atol=1e-10)


def test_a_resumed_fit_of_different_optimizers_is_bit_equal(tmp_path: Path) -> None:
    ends = []
    for name in (None, "step=2", "step=3"):
        ensemble = make(
            optimizer=[partial(Adam, lr=0.01), partial(SGD, lr=0.1, momentum=0.9), Adafactor],
            scheduler=[partial(StepLR, step_size=1), partial(ExponentialLR, gamma=0.5),
                       partial(OneCycleLR, max_lr=0.1, total_steps=20, cycle_momentum=False)],
            scheduler_interval="step",
        )  # fmt: skip
        saver = ModelCheckpoint(tmp_path / (name or "first"), "{step}", every_n_train_steps=1,
                                save_top_k=-1)  # fmt: skip
        trainer = quiet_trainer(max_epochs=3, callbacks=[saver], enable_checkpointing=True)
        path = None if name is None else tmp_path / "first" / f"{name}.ckpt"
        trainer.fit(ensemble, loader(make_data("mlp", "classification")), ckpt_path=path)
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        ends.append((ensemble.weights.detach().clone(), rates))
    for weights, rates in ends[1:]:
        assert torch.equal(weights, ends[0][0])
        assert rates == ends[0][1]


def test_the_state_of_member_optimizers_makes_a_round_trip() -> None:
    def step(optimizer: MemberOptimizers, weights: nn.Parameter) -> None:
        optimizer.zero_grad()
        weights.square().sum().backward()
        optimizer.step()

    layout = FlatLayout({"a": torch.ones(2, 3)})
    first = nn.Parameter(torch.rand(2, 6))
    makers = [partial(Adam, lr=0.1), partial(SGD, lr=0.1, momentum=0.9)]
    optimizer = MemberOptimizers(makers, [(first, layout)])
    schedule = MemberSchedulers([partial(StepLR, step_size=1)] * 2, optimizer)
    step(optimizer, first)
    schedule.step()
    second = nn.Parameter(first.detach().clone())
    other = MemberOptimizers(makers, [(second, layout)])
    resumed = MemberSchedulers([partial(StepLR, step_size=1)] * 2, other)
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(deepcopy(schedule.state_dict()))
    assert other.param_groups[1] is other.members[1].param_groups[0]
    for _ in range(2):
        step(optimizer, first)
        step(other, second)
        schedule.step()
        resumed.step()
        assert schedule.get_last_lr() == resumed.get_last_lr()
    assert torch.equal(first, second)


def test_learning_rates_of_all_members_are_monitored(tmp_path: Path) -> None:
    ensemble = make(
        optimizer=[partial(SGD, lr=rate) for rate in RATES], scheduler=partial(StepLR, step_size=9)
    )
    seen: dict[str, float] = {}

    class Look(Callback):
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            seen.update(trainer.callback_metrics)

    logger = CSVLogger(tmp_path)
    fit(
        ensemble, 3, logger=logger, log_every_n_steps=1,
        callbacks=[LearningRateMonitor("step"), Look()],
    )  # fmt: skip
    rates = [float(value) for name, value in sorted(seen.items()) if "lr-" in name]
    assert rates == pytest.approx(list(RATES))


def test_an_optimizer_of_several_gradients_a_step_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"LBFGS.*gradients several times in a step"):
        fit(make(optimizer=partial(LBFGS, lr=0.1)))


def test_a_single_member_may_have_such_an_optimizer() -> None:
    ensemble = make(members=1, optimizer=partial(LBFGS, lr=0.1))
    (net,) = networks(ensemble, batch_norm_net)
    fit(ensemble, 3, precision="64-true", batch_size=48)
    net.double()
    optimizer = LBFGS(net.parameters(), lr=0.1)
    inputs, targets = make_data("mlp", "classification").tensors

    def closure() -> Any:
        optimizer.zero_grad()
        squares = sum((p**2).sum() for p in net.parameters())
        energy = nn.functional.cross_entropy(net(inputs.double()), targets)
        loss = energy + squares / (2 * SCALE**2 * 48)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert_member_equals(ensemble, 0, net, rtol=1e-6, atol=1e-8)


def test_a_schedule_of_one_member_that_waits_for_a_metric_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"ReduceLROnPlateau.*those of all members"):
        fit(make(scheduler=[ReduceLROnPlateau] * 3))


def test_an_optimizer_that_does_not_take_the_layers_is_refused() -> None:
    """Muon orthogonalises whole matrices, and takes nothing else."""
    with pytest.raises(ConfigurationError, match=r"optimizer of member 0 could not be made"):
        fit(make(partial(mlp, 3), optimizer=partial(torch.optim.Muon, weight_decay=0.0)))


def test_weight_decay_in_one_members_optimizer_is_refused() -> None:
    rates = [partial(SGD, lr=0.1)] * 2 + [partial(SGD, lr=0.1, weight_decay=0.1)]
    with pytest.raises(ConfigurationError, match="counts the prior twice"):
        fit(make(optimizer=rates))


def test_what_is_not_an_optimizer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="optimizer= makes an optimizer"):
        fit(make(optimizer=lambda parameters: list(parameters)))
