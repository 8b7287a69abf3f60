"""What cannot be made is said before training, and a page that fails costs no training."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_bnn import VariationalBNN
from lightning_bnn.callbacks import CalibrationReport
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical
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
