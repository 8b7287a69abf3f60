"""Headlines and figures, read back from what the loggers wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from pytorch_lightning.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

from lightning_bnn.callbacks import CalibrationReport
from lightning_bnn.report import report
from lightning_bnn.report.loggers import headlines, log_figures
from tests.callbacks.test_calibration_report import loader, variational
from tests.trainers import quiet_trainer


def figures() -> dict[str, Any]:
    figure = Figure(figsize=(1, 1))
    figure.subplots().plot([0, 1])
    return {"reliability": figure}


def test_headlines() -> None:
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet([1, 1, 1], size=100)
    targets = generator.integers(0, 3, size=100)
    made = report(probabilities, targets, ood={"far": probabilities[:50]}).numbers
    block = made["models"][0]
    assert headlines(made, "model") == {
        "adaptive_ece": block["scalars"]["adaptive_ece"],
        "classwise_ece": block["scalars"]["classwise_ece"],
        "aurc": block["scalars"]["aurc"],
        "coverage_at_risk": block["scalars"]["coverage_at_risk"],
        "excess_nll": block["scalars"]["excess_nll"],
        "auroc_far": block["shift"]["far"]["by"]["entropy"]["auroc"],
    }
    means = generator.normal(size=100)
    far = (means[:50], 1.0)
    made = report(means, generator.normal(size=100), scales=1.0, ood={"far": far}).numbers
    assert set(headlines(made, "model")) == {"sharpness", "epistemic_share", "bias", "auroc_far"}


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name="", version="")
    callback = CalibrationReport(tmp_path / "reports", every_n_epochs=2)
    trainer = quiet_trainer(
        max_epochs=3, callbacks=[callback], logger=[logger, CSVLogger(tmp_path / "csv")]
    )
    trainer.fit(variational(), loader(), loader(40, seed=1))
    logger.experiment.flush()
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "scalars": 0}).Reload()
    tags = events.Tags()
    pictures = [tag for tag in tags["images"] if tag.startswith("val/")]
    assert pictures
    # two pages: after the second epoch, and of the third after the fit
    assert [image.step for image in events.Images(pictures[0])] == [8, 12]
    assert events.Images(pictures[0])[0].encoded_image_string.startswith(b"\x89PNG")
    logged = [scalar.value for scalar in events.Scalars("val_aurc")]
    blocks = [callback.reports[page].numbers["models"][0] for page in callback.reports]
    wanted = [block["scalars"]["aurc"] for block in blocks]
    assert logged == pytest.approx(wanted, abs=1e-6)


def test_after_fit_goes_to_loggers(tmp_path: Path) -> None:
    """Nothing validated the last weights, so that the module cannot log any more."""
    logger = CSVLogger(tmp_path, name="", version="")
    callback = CalibrationReport(tmp_path / "reports")
    trainer = quiet_trainer(
        max_epochs=3, check_val_every_n_epoch=2, callbacks=[callback], logger=logger
    )
    trainer.fit(variational(), loader(), loader(40, seed=1))
    logger.save()
    text = (tmp_path / "metrics.csv").read_text()
    header = text.splitlines()[0].split(",")
    column = [row.split(",")[header.index("val_aurc")] for row in text.splitlines()[1:]]
    wanted = callback.reports["fit.html"].numbers["models"][0]["scalars"]["aurc"]
    assert [float(value) for value in column if value] == pytest.approx([wanted])


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(name="test", save_dir=tmp_path, offline=True)
    log_figures([logger], figures(), "val", step=3)
    wandb.finish()
    assert list(tmp_path.rglob("media/images/val/reliability_*.png"))


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no data base
    logger = MLFlowLogger("test", tracking_uri=tmp_path.as_uri())
    log_figures([logger], figures(), "val", step=3)
    assert mlflow.MlflowClient(tracking_uri=tmp_path.as_uri()).get_run(logger.run_id)
    assert list(tmp_path.rglob("artifacts/val/reliability-00000003.png"))
