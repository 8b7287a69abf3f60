"""Two processes (gloo) make the pages that one process makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bnn.callbacks import CalibrationReport
from tests.callbacks.ddp_calibration_report import batches, make_bnn, make_callback
from tests.callbacks.test_calibration_report import flat
from tests.trainers import quiet_trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the two processes left."""
    directory = tmp_path_factory.mktemp("ddp")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.callbacks.ddp_calibration_report", str(directory)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return directory


@pytest.fixture(scope="module")
def alone(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> CalibrationReport:
    """Validation and test in one process, with the weights that two have trained."""
    bnn = make_bnn().double()
    bnn.family.load_state_dict(torch.load(directory / "family.pt", weights_only=True))
    callback = make_callback(tmp_path_factory.mktemp("alone"))
    trainer = quiet_trainer(callbacks=[callback], precision="64-true")
    trainer.validate(bnn, batches(41, 1), verbose=False)
    trainer.test(bnn, batches(37, 2), verbose=False)
    return callback


def read(directory: Path, name: str) -> dict[str, Any]:
    return json.loads((directory / name).read_text())


@pytest.mark.parametrize(("page", "single"), [("fit", "validation"), ("test", "test")])
def test_same_numbers(directory: Path, alone: CalibrationReport, page: str, single: str) -> None:
    numbers = read(directory, f"reports/{page}.json")
    wanted = alone.reports[f"{single}.html"].numbers
    assert numbers["data"] == wanted["data"]
    assert flat(numbers) == pytest.approx(flat(wanted), abs=1e-6)
    assert numbers["summary"] == wanted["summary"]
    curve = numbers["models"][0]["pruning"]  # compared above: each process had its share of it
    assert [one["removed"] for one in curve["results"]] == [0, 14, 28]
    whole = curve["results"][0]["scores"]
    assert whole["nll"] == pytest.approx(numbers["models"][0]["scalars"]["nll"], abs=1e-6)


def test_pages(directory: Path) -> None:
    names = sorted(path.name for path in (directory / "reports").glob("*.html"))
    assert names == ["epoch-0001.html", "fit.html", "test.html"]
    numbers = read(directory, "reports/epoch-0001.json")
    assert numbers["data"]["examples"] == 41
    assert numbers["models"][0]["shift"]["far"]["examples"] == 23
    assert "pruning" not in numbers["models"][0]


def test_temperature_uses_every_validation_example_once(
    directory: Path, alone: CalibrationReport
) -> None:
    found = read(directory, "reports/test.json")["models"][0]["temperature"]
    assert found["fitted_on"] == "validation"
    wanted = alone.reports["test.html"].numbers["models"][0]["temperature"]
    assert found["value"] == pytest.approx(wanted["value"], abs=1e-6)


@pytest.mark.parametrize("name", ["batch_sampler", "shuffled"])
def test_samplers(directory: Path, alone: CalibrationReport, name: str) -> None:
    """In another order the examples have other numbers, but what is averaged stays."""
    numbers = read(directory, f"{name}/test.json")
    assert numbers["data"]["examples"] == 37
    wanted = alone.reports["test.html"].numbers["models"][0]["scalars"]
    assert numbers["models"][0]["scalars"] == pytest.approx(wanted, abs=1e-6)


def test_both_processes_log_the_same(directory: Path) -> None:
    first, second = (read(directory, f"found{rank}.json") for rank in (0, 1))
    logged = [
        {name: value for name, value in found["fitted"].items() if name.startswith("val_")}
        for found in (first, second)
    ]
    assert logged[0] == logged[1]
    assert {"val_aurc", "val_excess_nll", "val_auroc_far", "val_nll"} <= set(logged[0])
    assert first["test"] == second["test"]
    block = read(directory, "reports/test.json")["models"][0]
    assert first["test"]["test_aurc"] == pytest.approx(block["scalars"]["aurc"], abs=1e-6)
    assert (first["batch_sampler_reports"], second["batch_sampler_reports"]) == (1, 0)


def test_a_failure_reaches_both(directory: Path) -> None:
    first, second = (read(directory, f"found{rank}.json")["failure"] for rank in (0, 1))
    assert "process 0" not in first
    assert first in second
    folders = [read(directory, f"found{rank}.json")["folder"] for rank in (0, 1)]
    assert "cannot write to the folder" in folders[0]
    assert folders[0] == folders[1]


def test_data_that_share_themselves(directory: Path) -> None:
    assert read(directory, "shared/fit.json")["data"]["examples"] == 41
