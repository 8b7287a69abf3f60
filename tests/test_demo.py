"""The demo's fits do what the README says of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_bnn import Posterior, demo
from lightning_bnn.nets import MLP


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
def test_digits_are_no_worse_than_plain_adam() -> None:
    """Same network, optimizer, schedule and seed; on all 719 digits that neither has seen."""
    posterior, data = demo.fit_digits()
    inputs, targets = demo.held_out(data)
    ours = demo.evaluate(posterior, inputs, targets)
    plain = demo.evaluate(demo.fit_plain_digits(), inputs, targets)
    assert ours["accuracy"] >= 0.97
    assert ours["nll"] <= plain["nll"]
    assert ours["ece"] <= plain["ece"]


@pytest.mark.filterwarnings("ignore:You passed in a .val_dataloader. but have no")
def test_demo_writes_a_picture_and_posteriors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("fit_toy", "fit_digits", "fit_plain_digits"):
        monkeypatch.setattr(demo, name, partial(getattr(demo, name), epochs=1))
    demo.main(["--out", str(tmp_path)])
    assert (tmp_path / "predictive.png").stat().st_size > 10_000
    loaded = Posterior.load(tmp_path / "toy_posterior", MLP(1, [50, 50], 1))
    assert loaded.predict(torch.zeros(3, 1)).mean.shape == (3, 1)
    assert "719 held-out examples" in capsys.readouterr().out
