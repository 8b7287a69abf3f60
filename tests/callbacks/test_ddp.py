"""Two processes (gloo) have the same draws, moments and pages; one of them writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.ddp_script import batches, make_bnn, make_callback
from tests.callbacks.test_calibration_report import flat
from tests.processes import run_script
from tests.trainers import quiet_trainer


def read(directory: Path, name: str) -> dict[str, Any]:
    return json.loads((directory / name).read_text())


def test_two_processes(tmp_path: Path) -> None:
    """In one test, so that the processes start once."""
    run_script("tests.callbacks.ddp_script", tmp_path)
    first, second = (read(tmp_path, f"found{rank}.json") for rank in (0, 1))
    check_draws(first["draws"], second["draws"])
    check_pages(tmp_path)
    check_answers(tmp_path, first["reports"], second["reports"])


def check_draws(first: Any, second: Any) -> None:
    """The same draws and moments on both, also after a resume; one writes."""
    assert first["whole"].pop("writes") == [False, False, True]
    assert second["whole"].pop("writes") == [False, False, False]
    for seen in (first, second):
        assert "Resume with ckpt_path=" in seen["refused"]  # on both: no rank is left waiting
        seen["resumed"].pop("writes")
        assert seen["whole"] == seen["resumed"] == first["whole"]
    assert first["whole"]["steps"] == [list(range(2, 25, 2))] * 3
    assert first["whole"]["snapshots"] == 4
    own, refreshed, streamed = first["whole"]["draws"]
    assert own != refreshed == streamed


def check_pages(directory: Path) -> None:
    """The pages are those that one process makes with the weights that two have trained."""
    bnn = make_bnn().double()
    bnn.family.load_state_dict(torch.load(directory / "family.pt", weights_only=True))
    alone = make_callback(directory / "alone")
    trainer = quiet_trainer(callbacks=[alone], precision="64-true")
    trainer.validate(bnn, batches(41, 1), verbose=False)
    trainer.test(bnn, batches(37, 2), verbose=False)
    for page, single in (("fit", "validation"), ("test", "test")):
        numbers = read(directory, f"reports/{page}.json")
        wanted = alone.reports[f"{single}.html"].numbers
        assert numbers["data"] == wanted["data"]
        assert flat(numbers) == pytest.approx(flat(wanted), abs=1e-6)
        assert numbers["summary"] == wanted["summary"]
        block = numbers["models"][0]  # compared above: each process had its share of the curve
        assert [result["removed"] for result in block["pruning"]["results"]] == [0, 14, 28]
        whole = block["pruning"]["results"][0]["scores"]
        assert whole["nll"] == pytest.approx(block["scalars"]["nll"], abs=1e-6)
    assert block["temperature"]["fitted_on"] == "validation"
    names = sorted(path.name for path in (directory / "reports").glob("*.html"))
    assert names == ["epoch-0001.html", "fit.html", "test.html"]
    numbers = read(directory, "reports/epoch-0001.json")
    assert numbers["data"]["examples"] == 41
    assert numbers["models"][0]["shift"]["far"]["examples"] == 23
    assert "pruning" not in numbers["models"][0]
    # in another order the examples have other numbers, but what is averaged stays
    for name in ("batch_sampler", "shuffled"):
        numbers = read(directory, f"{name}/test.json")
        assert numbers["data"]["examples"] == 37
        assert numbers["models"][0]["scalars"] == pytest.approx(block["scalars"], abs=1e-6)
    assert read(directory, "shared/fit.json")["data"]["examples"] == 41


def check_answers(directory: Path, first: Any, second: Any) -> None:
    """Both processes log the same, and a failure of one reaches the other."""
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
    assert "process 0" not in first["failure"]
    assert first["failure"] in second["failure"]
    assert "cannot write to the folder" in first["folder"]
    assert first["folder"] == second["folder"]
