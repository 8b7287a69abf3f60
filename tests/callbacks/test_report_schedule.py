"""When a validation makes a page, in real fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from lightning_bnn.callbacks import CalibrationReport
from tests.callbacks.test_calibration_report import (
    data,
    loader,
    log_loss,
    pages,
    variational,
)
from tests.trainers import quiet_trainer


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
        (1.0, {"epoch-0001.html": 8, "fit.html": 12}),
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
