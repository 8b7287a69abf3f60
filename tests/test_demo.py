"""The demo's toy fit does what the README says of it, and the demo writes what it says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_bnn import Posterior, demo, demo_digits
from lightning_bnn.nets import MLP


@pytest.mark.slow
def test_toy_regression_is_unsure_beside_the_data() -> None:
    posterior, data = demo.fit_toy()
    grid = data.grid(281)
    predictive = posterior.predict(grid, draws=256)
    sd = predictive.variance.sqrt().flatten()
    inside = (grid.flatten() >= 0) & (grid.flatten() <= 0.5)
    assert min(sd[0], sd[-1]) >= 3 * sd[inside].mean()
    error = (predictive.mean - data.noise_free(grid)).flatten()[inside]
    assert error.square().mean().sqrt() < 0.05


@pytest.mark.filterwarnings("ignore:You passed in a .val_dataloader. but have no")
def test_demo_writes_a_picture_posteriors_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "fit_toy", partial(demo.fit_toy, epochs=1))
    short = {"fit_plain": 1, "fit_variational": 1, "fit_chains": 5, "fit_ensemble": 1}
    for name, epochs in short.items():
        monkeypatch.setattr(demo_digits, name, partial(getattr(demo_digits, name), epochs=epochs))
    demo.main(["--out", str(tmp_path)])

    assert (tmp_path / "predictive.png").stat().st_size > 10_000
    loaded = Posterior.load(tmp_path / "toy_posterior", MLP(1, [50, 50], 1))
    assert loaded.predict(torch.zeros(3, 1)).mean.shape == (3, 1)
    numbers = json.loads((tmp_path / "report.json").read_text())
    names = ["plain Adam", "variational", "SG-MCMC", "deep ensemble"]
    assert [block["name"] for block in numbers["models"]] == names
    for name in ("report.html", "variational/fit.html"):
        assert "<html" in (tmp_path / name).read_text(encoding="utf-8")
    own = json.loads((tmp_path / "variational" / "fit.json").read_text())
    assert own["data"]["examples"] == 359  # the validation digits

    output = capsys.readouterr().out
    printed = " ".join(output.split())
    assert "360 test examples" in printed
    for name in ("Toy regression ", *(f"Digits, {name} " for name in names)):
        # no terminal: one line for each fit, at its end
        lines = [line for line in output.splitlines() if line.startswith(name) and "━" in line]
        assert len(lines) == 1
        assert "5/5" in lines[0] if "SG-MCMC" in name else "1/1" in lines[0]
    assert " ".join(numbers["summary"][0]["text"].split()) in printed
