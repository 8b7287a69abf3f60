"""The pruning curve in the pages of a run: where it is, of what, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.loggers import CSVLogger
from sklearn.metrics import accuracy_score, log_loss

from lightning_bnn import DeepEnsemble
from lightning_bnn.callbacks import CalibrationReport, calibration_report
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.pruning import prune
from lightning_bnn.pruning.section import Pruning
from tests.callbacks.test_calibration_report import data, fit, loader, net, pages, variational

FRACTIONS = (0.0, 0.5, 0.7)


def curves(folder: Path) -> dict[str, dict[str, Any] | None]:
    """The curve of the first model on each page."""
    found = {}
    for name in pages(folder):
        numbers = json.loads((folder / name).with_suffix(".json").read_text())
        found[name.removesuffix(".html")] = numbers["models"][0].get("pruning")
    return found


def test_after_a_fit_a_validation_and_a_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    monkeypatch.setattr(calibration_report, "shows_figures", lambda logger: True)
    monkeypatch.setattr(
        calibration_report,
        "log_figures",
        lambda loggers, figures, stage, step: sent.append(f"{stage}: {' '.join(sorted(figures))}"),
    )
    callback = CalibrationReport(tmp_path, every_n_epochs=2, pruning=FRACTIONS)
    bnn = variational()
    # the last epoch makes a page of its own, which has no curve and cannot serve for the fit
    logger = CSVLogger(tmp_path / "logs")
    trainer = fit(bnn, callback, limit_test_batches=2, logger=logger, max_epochs=4)
    trainer.validate(bnn, loader(40, seed=1), verbose=False)
    trainer.test(bnn, [loader(50, seed=2), loader(45, seed=3)], verbose=False)
    assert callback._parts == []
    made = curves(tmp_path)
    assert made.pop("epoch-0001") is None
    assert made.pop("epoch-0003") is None
    assert sorted(made) == ["fit", "test-1", "test-2", "validation"]
    assert made["fit"] == made["validation"]
    for name, count, seed in (("fit", 40, 1), ("test-1", 32, 2), ("test-2", 32, 3)):
        size = {"fit": 40, "test-1": 50, "test-2": 45}[name]
        inputs, targets = (part[:count] for part in data(size, seed).tensors)
        block = made[name]
        assert block is not None
        for fraction, result in zip(FRACTIONS, block["results"], strict=True):
            pruned = prune(bnn.posterior(), fraction)
            probabilities = pruned.predict(inputs, draws=4).mean.double().numpy()
            probabilities /= probabilities.sum(1, keepdims=True)
            wanted = {
                "accuracy": accuracy_score(targets, probabilities.argmax(1)),
                "nll": log_loss(targets, probabilities, labels=[0, 1, 2]),
            }
            found = {key: result["scores"][key] for key in wanted}
            assert found == pytest.approx(wanted, abs=1e-5)
    plain, curve = "calibration errors", "calibration errors pruning"
    assert sent == [f"val: {plain}"] * 2 + [f"val: {curve}"] * 2 + [f"test: {curve}"] * 2


def test_without_variances(tmp_path: Path) -> None:
    callback = CalibrationReport(tmp_path, pruning=FRACTIONS)
    ensemble = DeepEnsemble(net(), Categorical(), members=1)
    fit(ensemble, callback, max_epochs=1)
    block = curves(tmp_path)["fit"]
    assert block is not None
    assert set(block) == {"unavailable"}
    assert any(
        "no pruning by signal to noise" in line for line in callback.reports["fit.html"].summary
    )


def test_a_curve_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no room")

    monkeypatch.setattr(Pruning, "measure", fails)
    callback = CalibrationReport(tmp_path, pruning=FRACTIONS)
    bnn = variational()
    with pytest.warns(UserWarning, match=r"the page fit \(RuntimeError: no room\)"):
        trainer = fit(bnn, callback, max_epochs=1)
    with pytest.raises(RuntimeError, match="no room"):
        trainer.test(bnn, loader(), verbose=False)


@pytest.mark.parametrize("sanity", [0, 2])
def test_what_cannot_be_reached_is_said_before_training(tmp_path: Path, sanity: int) -> None:
    with pytest.raises(ConfigurationError, match="got 1"):
        CalibrationReport(tmp_path, pruning=[0.5, 1.0])
    bnn = variational()
    before = [value.clone() for value in bnn.family.state_dict().values()]
    with pytest.raises(ConfigurationError, match="at most 54 can go"):
        fit(bnn, CalibrationReport(tmp_path, pruning=[0.99]), num_sanity_val_steps=sanity)
    after = bnn.family.state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert np.all([not path.suffix for path in tmp_path.iterdir()])
