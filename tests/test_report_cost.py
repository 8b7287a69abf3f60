"""The benchmark of reports runs, and judges as it says; no test looks at a measured time."""

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from benchmarks import report_cost
from benchmarks.report_cost import DEFAULT, WITHOUT, Turns
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.posteriors import DrawsPosterior, WeightPosterior


@pytest.fixture
def _logging() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("_logging")
def test_it_measures_every_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "figures.json"
    report_cost.main(["--quick", "--rounds", "1", "--steps", "2", "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["command"].startswith("python -m benchmarks.report_cost --quick --rounds 1")
    rows = result["settings"]
    assert list(rows) == list(report_cost.SETTINGS)
    assert [row["pages"] for row in rows.values()] == [
        0,
        1,
        1,
        3,
    ]  # the last epoch is the end of the fit too
    for row in rows.values():
        assert 0 < row["predicting_seconds"][0] < row["fit_seconds"][0]
    for setting, row in rows.items():
        assert (0 < row["cost"] < 1) if setting != WITHOUT else "cost" not in row
    hooks, difference = result["bars"]
    assert (hooks["value"], hooks["limit"]) == (rows[DEFAULT]["cost"], 0.05)
    assert difference["value"] == rows[DEFAULT]["difference"]
    assert "an epoch without the callback" in capsys.readouterr().out


def test_predictions_are_taken_out_of_both_sides() -> None:
    plain = Turns(fit=[10.0, 20.0], predicting=[1.0, 2.0], hooks=[0.0, 0.0])
    ours = Turns(fit=[11.5, 22.0], predicting=[2.0, 2.0], hooks=[0.2, 0.6], pages=5)
    assert report_cost.costs(ours, plain) == pytest.approx([0.05, 0.1])
    rows = report_cost.summarise({WITHOUT: plain, DEFAULT: ours}, epochs=10)
    assert rows[DEFAULT]["difference"] == pytest.approx(0.075)
    assert rows[DEFAULT]["cost"] == pytest.approx(0.025)
    assert rows[DEFAULT]["page_milliseconds"] == pytest.approx(1e3 * 0.4 / 5)
    assert rows[DEFAULT]["added_predictions"] == pytest.approx(0.5 / 15)
    assert rows[WITHOUT]["epoch_milliseconds"] == pytest.approx(1500)
    assert [bar["passed"] for bar in report_cost.judge(rows)] == [True, False]
    rows[DEFAULT] |= {"cost": 0.051, "difference": 0.049}
    assert [bar["passed"] for bar in report_cost.judge(rows)] == [False, True]
    assert report_cost.judge({WITHOUT: rows[WITHOUT]}) == []


def test_the_clock_is_taken_off_again() -> None:
    original = WeightPosterior.predict
    net = nn.Linear(2, 3)
    posterior = DrawsPosterior(net, Categorical(), [dict(net.named_parameters())])
    start = time.perf_counter()
    with report_cost.predictions_timed() as seconds:
        posterior.predict(torch.zeros(1, 2))
        posterior.predict(torch.zeros(1, 2))
    assert len(seconds) == 2
    assert 0 < sum(seconds) < time.perf_counter() - start
    assert WeightPosterior.predict is original


def test_the_clock_of_hooks_leaves_predictions_out() -> None:
    predicting: list[float] = []

    class Slow(pl.Callback):
        def on_fit_start(self, trainer: object, pl_module: object) -> None:
            time.sleep(0.02)
            predicting.append(0.015)

    callback = Slow()
    seconds = report_cost.clock_hooks(callback, predicting)
    callback.on_fit_start(None, None)
    callback.on_fit_end(None, None)  # not its own
    assert len(seconds) == 1
    assert seconds[0] >= 0.005
