"""Snapshot ensembles: cycles of the learning rate, and what is kept at the end of each."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

from lightning_bnn.ensembles.snapshots import SnapshotStore, cycle_ends, cycle_factor
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from tests.nets import loader, make_data, mlp
from tests.strategies.ensembles import fit, make
from tests.trainers import quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")


@pytest.mark.parametrize(("total", "cycles"), [(10, 3), (5, 4), (7, 7), (12, 1), (100, 6)])
def test_cycles_cover_the_whole_training(total: int, cycles: int) -> None:
    ends = cycle_ends(total, cycles)
    lengths = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    assert len(ends) == cycles
    assert sum(lengths) == total
    assert max(lengths) - min(lengths) <= 1
    expected = [
        (math.cos(math.pi * place / length) + 1) / 2
        for length in lengths
        for place in range(length)
    ]
    assert [cycle_factor(step, ends) for step in range(total)] == pytest.approx(expected)
    assert cycle_factor(total, ends) == 0.0


class Watch(Callback):
    """What weights, buffers and learning rates were after each step."""

    def __init__(self) -> None:
        self.states: list[dict[str, torch.Tensor]] = []
        self.rates: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[-1]["lr"])

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.states.append({k: v.clone() for k, v in module.current_draws().items()})


@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.1), [partial(SGD, lr=0.1)] * 3])
def test_members_are_kept_at_the_end_of_each_cycle(optimizer: Any) -> None:
    ensemble = make(optimizer=optimizer, snapshots=3)
    watch = Watch()
    fit(ensemble, 10, callbacks=[watch])
    ends = [3, 6, 10]
    assert watch.rates == pytest.approx([0.1 * cycle_factor(step, ends) for step in range(10)])
    posterior = ensemble.posterior()
    assert len(posterior) == 9
    draws = posterior.sample(9)
    for name, tensor in draws.items():
        expected = torch.cat([watch.states[end - 1][name] for end in ends])
        assert torch.equal(tensor, expected), name
    (batch,) = quiet_trainer().predict(ensemble, DataLoader(torch.randn(5, 4), batch_size=5))
    assert batch.draws == 9


def test_before_the_first_cycle_ends_the_members_serve_as_they_stand() -> None:
    ensemble = make(snapshots=2)
    assert torch.equal(ensemble.posterior().sample(3)["0.weight"],
                       ensemble.current_draws()["0.weight"])  # fmt: skip


def test_snapshots_hold_what_the_likelihood_learned() -> None:
    ensemble = make(
        partial(mlp, 2), likelihood=Gaussian(0.5, learn=True), snapshots=2,
        optimizer=partial(Adam, lr=0.1),
    )  # fmt: skip
    fit(ensemble, 6, data=make_data("mlp", "regression"))
    scales = [float(one.likelihood.log_scale.detach()) for one in ensemble.posterior().components]
    assert len(scales) == 6
    assert scales[3:] == ensemble.bank.learned.detach().flatten().tolist()
    assert scales[0] != scales[3]


def test_a_dropped_member_is_left_out_of_all_snapshots() -> None:
    class Poison(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                with torch.no_grad():
                    module.weights[0, 0] = float("nan")

    ensemble = make(snapshots=2)
    with pytest.warns(UserWarning, match="member 0"):
        fit(ensemble, 6, callbacks=[Poison()])
    posterior = ensemble.posterior()
    assert len(posterior) == 4
    assert posterior.sample(4)["0.weight"].isfinite().all()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_fit_is_bit_equal(accumulate: int, tmp_path: Path) -> None:
    """From the end of a cycle (step 3), from before and after it."""
    ends = []
    for name in (None, "step=2", "step=3", "step=4"):
        ensemble = make(snapshots=3)
        saver = ModelCheckpoint(
            tmp_path / (name or "first"), "{step}", every_n_train_steps=1, save_top_k=-1
        )
        trainer = quiet_trainer(
            max_epochs=3, callbacks=[saver], enable_checkpointing=True,
            accumulate_grad_batches=accumulate,
        )  # fmt: skip
        torch.manual_seed(1 if name is None else 2)
        data = make_data("mlp", "classification")
        path = None if name is None else tmp_path / "first" / f"{name}.ckpt"
        batches = loader(data, shuffle=True, batch_size=16 // accumulate)
        trainer.fit(ensemble, batches, ckpt_path=path)
        assert trainer.global_step == 9
        ends.append(dict(ensemble.state_dict()))
    assert ends[0]["snapshots.taken"] == 3
    for end in ends[1:]:
        assert all(torch.equal(end[key], value) for key, value in ends[0].items())


def test_a_resumed_fit_of_another_length_is_refused(tmp_path: Path) -> None:
    fit(make(snapshots=2), 6).save_checkpoint(tmp_path / "saved.ckpt")
    data = make_data("mlp", "classification")
    with pytest.raises(ConfigurationError, match=r"made with cycle_ends=\[3, 6\].*has \[4, 8\]"):
        quiet_trainer(max_steps=8, max_epochs=-1).fit(
            make(snapshots=2), loader(data), ckpt_path=tmp_path / "saved.ckpt"
        )


def test_a_later_fit_has_cycles_of_its_own() -> None:
    ensemble = make(snapshots=2)
    data = make_data("mlp", "classification")
    watch = Watch()
    trainer = quiet_trainer(max_epochs=2, callbacks=[watch])
    trainer.fit(ensemble, loader(data))
    first = ensemble.posterior().sample(6)["0.weight"]
    trainer.fit_loop.max_epochs = 4
    trainer.fit(ensemble, loader(data))
    assert len(ensemble.posterior()) == 6
    expected = torch.cat([watch.states[8]["0.weight"], watch.states[11]["0.weight"]])
    assert torch.equal(ensemble.posterior().sample(6)["0.weight"], expected)
    assert not torch.equal(first, expected)
    fit(ensemble, 4)
    assert torch.equal(
        ensemble.posterior().sample(6)["0.weight"][3:], ensemble.current_draws()["0.weight"]
    )


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(make_data("mlp", "classification"))


@pytest.mark.parametrize("cycles", [0, -1, 2.5, True])
def test_a_number_of_cycles_is_needed(cycles: Any) -> None:
    with pytest.raises(ConfigurationError, match="snapshots= is a whole number, at least 1"):
        SnapshotStore(cycles, {})
    with pytest.raises(ConfigurationError, match="snapshots= is a whole number, at least 1"):
        make(snapshots=cycles)


def test_a_trial_run_may_be_too_short_for_all_snapshots() -> None:
    ensemble = make(snapshots=5)
    quiet_trainer(fast_dev_run=2).fit(ensemble, loader(make_data("mlp", "classification")))
    assert len(ensemble.snapshots) == 2


def test_bad_input() -> None:
    data = make_data("mlp", "classification")
    with pytest.raises(ConfigurationError, match="length is not known"):
        quiet_trainer(max_epochs=-1).fit(make(snapshots=2), loader(data))
    with pytest.raises(ConfigurationError, match="length is not known"):
        quiet_trainer(max_epochs=2).fit(
            make(snapshots=2, num_data=48), DataLoader(Stream(), batch_size=16)
        )
    with pytest.raises(ConfigurationError, match=r"snapshots=7 .* has 6 steps"):
        quiet_trainer(max_epochs=2).fit(make(snapshots=7), loader(data))
    with pytest.raises(ConfigurationError, match="leave scheduler= out"):
        make(snapshots=2, scheduler=partial(StepLR, step_size=1))
