"""What cannot be made is said before training, and a page that fails costs no training."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import VariationalBNN
from lightning_bnn.callbacks import CalibrationReport
from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods import Bernoulli, Categorical, Gaussian
from lightning_bnn.report.document import Report
from lightning_bnn.report.run import RunModels
from lightning_bnn.report.statistics import Statistics
from tests.callbacks.test_calibration_report import (
    data,
    fit,
    loader,
    log_loss,
    net,
    never_trained,
    pages,
    regression,
    variational,
)
from tests.trainers import quiet_trainer

# -------------------------------------------------------------------- before training


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot write to the folder.*directory="):
        never_trained(CalibrationReport(f"{tmp_path}/file/below"))


class _Silent(VariationalBNN):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        super().validation_step(batch, batch_idx, dataloader_idx)


def test_a_step_that_returns_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="step of _Silent to return"):
        never_trained(CalibrationReport(tmp_path), _Silent(net(), Categorical()))
    # nothing is asked of it where no page is wanted
    fit(_Silent(net(), Categorical()), CalibrationReport(tmp_path, after_fit=False), max_epochs=1)


def test_names_of_classes(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"names 2 classes .* of 3 classes"):
        never_trained(CalibrationReport(tmp_path, class_names=["a", "b"]))
    callback = CalibrationReport(tmp_path, class_names=["a", "b"])
    with pytest.raises(ConfigurationError, match="leave it out of a regression"):
        quiet_trainer(callbacks=[callback]).test(
            variational(Gaussian(0.5), 1), regression(), verbose=False
        )
    labels = DataLoader(TensorDataset(torch.randn(40, 4), torch.arange(80).view(40, 2) % 2), 16)
    quiet_trainer(callbacks=[callback]).test(variational(Bernoulli(), 2), labels, verbose=False)
    assert callback.reports["test.html"].numbers["data"]["class_names"] == ["a", "b"]


def test_every_compared_model_is_tried_on_out_of_distribution_data(tmp_path: Path) -> None:
    images = DataLoader(TensorDataset(torch.randn(20, 1, 8, 8), torch.arange(20) % 3), 10)
    large = DataLoader(torch.randn(20, 1, 12, 12), 10)
    pooled = nn.Sequential(nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    callback = CalibrationReport(tmp_path, ood={"large": large}, compare={"flat": flat})
    trainer = quiet_trainer(max_epochs=1, callbacks=[callback])
    with pytest.raises(DataError, match=r"ood\['large'\], tried on 'flat'"):
        trainer.fit(VariationalBNN(pooled, Categorical()), images, images)
    assert trainer.global_step == 0


def test_a_prediction_asks_for_nothing(tmp_path: Path) -> None:
    callback = CalibrationReport(tmp_path / "reports", compare=[tmp_path / "gone"])
    assert quiet_trainer(callbacks=[callback]).predict(variational(), loader())


# -------------------------------------------------------------------- pages that fail


@pytest.mark.parametrize(
    ("owner", "name", "interval"),
    [
        (Report, "save", 1),
        (Report, "save", 3),  # no validation: the page is made after the last step
        (Statistics, "update", 1),
        (RunModels, "gather_ood", 3),
    ],
)
def test_a_page_that_fails_costs_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, interval: int
) -> None:
    def full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(owner, name, full)
    callback = CalibrationReport(tmp_path)
    with pytest.warns(UserWarning, match=r"page fit \(OSError: the disk is full\)"):
        trainer = fit(variational(), callback, check_val_every_n_epoch=interval)
    assert trainer.global_step == 8
    assert (callback.files, callback.reports) == ([], {})
    with pytest.raises(OSError, match="the disk is full"):
        quiet_trainer(callbacks=[callback]).test(variational(), loader(), verbose=False)
    monkeypatch.undo()
    quiet_trainer(callbacks=[callback]).test(variational(), loader(), verbose=False)
    assert pages(tmp_path) == ["test.html"]


def test_nothing_is_kept(tmp_path: Path) -> None:
    """The callback lets the models go, after errors too, and can be sent to a process."""
    callback = CalibrationReport(tmp_path)
    fit(variational(), callback, max_epochs=1)
    assert "_models" not in vars(callback)
    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert copied.files == callback.files

    class Boom(pl.Callback):
        def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        quiet_trainer(callbacks=[callback, Boom()]).validate(variational(), loader(), verbose=False)
    assert "_models" not in vars(callback)
    assert callback._parts == []


# -------------------------------------------------------------------- validation data of a test


class _Module(pl.LightningDataModule):
    """As Lightning's tutorial has it: validation data are there after a setup for a fit."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.whole, self.calls = whole, []  # type: ignore[var-annotated]

    def setup(self, stage: str) -> None:
        self.calls.append(str(stage))
        torch.rand(1)
        if stage == "fit" or self.whole:
            self.validation = loader(40, seed=1)
        if stage == "test":
            self.test = loader(30, seed=2)

    def val_dataloader(self) -> Any:
        return [self.validation]

    def test_dataloader(self) -> Any:
        return self.test


def temperature(callback: CalibrationReport) -> Any:
    return callback.reports["test.html"].numbers["models"][0]["temperature"]["fitted_on"]


def test_a_data_module_without_validation_data_in_a_test(tmp_path: Path) -> None:
    callback = CalibrationReport(tmp_path)
    module = _Module(whole=False)
    with pytest.warns(UserWarning, match=r"no temperature.*_Module.*AttributeError"):
        quiet_trainer(callbacks=[callback]).test(variational(), datamodule=module, verbose=False)
    assert temperature(callback) == "cross-fit"


def test_a_data_module_is_not_set_up_again(tmp_path: Path) -> None:
    callback = CalibrationReport(tmp_path)
    module = _Module(whole=True)
    ends = []
    for callbacks in ([], [callback]):
        torch.manual_seed(0)
        module.calls.clear()
        quiet_trainer(callbacks=callbacks).test(variational(), datamodule=module, verbose=False)
        ends.append(torch.rand(1))
        assert len(module.calls) == 1
    assert temperature(callback) == "validation"
    assert torch.equal(*ends)


@pytest.mark.parametrize(("limit", "examples"), [(1, 16), (0.5, 16), (0, 0)])
def test_the_limit_of_validation_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float, examples: int
) -> None:
    seen = []
    original = RunModels.gather

    def counted(self: Any, batches: Any, into: Any, *rest: Any, **options: Any) -> None:
        original(self, batches, into, *rest, **options)
        seen.append(next(iter(into.values())).examples)

    monkeypatch.setattr(RunModels, "gather", counted)
    trainer = quiet_trainer(callbacks=[CalibrationReport(tmp_path)], limit_val_batches=limit)
    trainer.test(variational(), datamodule=_Module(whole=True), verbose=False)
    assert sum(seen) == examples


# -------------------------------------------------------------------- batches of another form


class _Named(VariationalBNN):
    def split(self, batch: Any) -> tuple[Any, Any]:
        return batch["x"], batch["y"]


def test_batches_by_name(tmp_path: Path) -> None:
    def named(count: int, seed: int) -> DataLoader:
        rows = loader(count, seed).dataset
        return DataLoader([{"x": x, "y": y} for x, y in rows], 16)  # type: ignore[arg-type]

    callback = CalibrationReport(tmp_path, ood={"far": named(20, 3)}, compare={"plain": net()})
    trainer = quiet_trainer(max_epochs=1, callbacks=[callback])
    trainer.fit(_Named(net(), Categorical()), named(50, 0), named(40, 1))
    numbers = callback.reports["fit.html"].numbers
    assert len(numbers["models"]) == 2
    assert numbers["models"][0]["shift"]["far"]["examples"] == 20


# -------------------------------------------------------------------- when pages are due


class Steps(pl.Callback):
    """The step at which each page was there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, {}  # type: ignore[var-annotated]

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for name in pages(self.folder):
            self.seen.setdefault(name, trainer.global_step)


@pytest.mark.parametrize(
    ("interval", "made"),
    [
        # four batches in an epoch
        (0.5, {"epoch-0001.html": 8, "fit.html": 12}),
        (3, {"epoch-0001.html": 7}),
    ],
)
def test_several_validations_in_an_epoch(
    tmp_path: Path, interval: float, made: dict[str, int]
) -> None:
    """One page of an epoch, of its last validation; that of the fit after the last batch."""
    callback, steps = CalibrationReport(tmp_path, every_n_epochs=2), Steps(tmp_path)
    bnn = variational()
    trainer = quiet_trainer(max_epochs=3, val_check_interval=interval, callbacks=[callback, steps])
    trainer.fit(bnn, loader(), loader(40, seed=1))
    assert steps.seen == made
    assert pages(tmp_path) == ["epoch-0001.html", "fit.html"]
    assert len(callback.files) == 2
    inputs, targets = data(40, seed=1).tensors
    wanted = log_loss(targets, bnn.posterior().predict(inputs, draws=4).mean)
    found = callback.reports["fit.html"].numbers["models"][0]["scalars"]["nll"]
    assert found == pytest.approx(wanted, abs=1e-5)


def test_data_that_no_validation_has_looked_at(tmp_path: Path) -> None:
    callback = CalibrationReport(tmp_path)
    bnn = variational()
    trainer = quiet_trainer(
        max_epochs=2, check_val_every_n_epoch=5, num_sanity_val_steps=0, callbacks=[callback]
    )
    trainer.fit(bnn, loader(), loader(40, seed=1))
    assert callback.reports["fit.html"].numbers["data"]["examples"] == 40
    block = callback.reports["fit.html"].numbers["models"][0]
    logged = trainer.callback_metrics  # a page made after the last validation is logged too
    assert float(logged["val_aurc"]) == pytest.approx(block["scalars"]["aurc"], abs=1e-6)


def test_an_early_stop_after_the_page_of_an_epoch(tmp_path: Path) -> None:
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    callback = CalibrationReport(tmp_path, every_n_epochs=1)
    trainer = quiet_trainer(max_epochs=5, callbacks=[callback, Stop()])
    trainer.fit(variational(), loader(), [loader(40, seed=1), loader(30, seed=2)])
    names = [f"{page}-{index}.html" for page in ("epoch-0001", "fit") for index in (1, 2)]
    assert set(names) <= set(pages(tmp_path))
    assert callback.reports["fit-2.html"].numbers["data"]["examples"] == 30
