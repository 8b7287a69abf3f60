"""The command, in process, on the posterior of a short fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from lightning_bnn import Posterior
from lightning_bnn.cli import main
from tests.test_cli import configuration

DATA = Path(__file__).parents[2] / "configs" / "data"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    assert main(["fit", "--config", configuration(folder)]) == 0
    return folder / "runs" / "version_0"


def command(*words: str | Path) -> int:
    return main(["report", *map(str, words)])


def test_report(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "report.html"
    code = command(
        "--posterior", run / "posterior", "--posterior", run, "--name", "first", "--name", "same",
        "--data", DATA / "digits.yaml", "--ood", f"rotated={DATA / 'digits_rotated.yaml'}",
        "--out", out, "--draws", "5",
    )  # fmt: skip
    assert code == 0
    printed = capsys.readouterr().out
    numbers = json.loads(out.with_suffix(".json").read_text())
    assert f"The report is in {out}" in printed
    assert numbers["summary"][0]["text"] in printed
    first, same = numbers["models"]
    assert (first["name"], first["draws"], same["name"]) == ("first", 5, "same")
    assert first["scalars"] == same["scalars"]
    assert first["shift"]["rotated"]["examples"] == 360
    assert first["temperature"]["fitted_on"] == "validation"
    assert out.read_text().startswith("<!doctype html>")


def test_data_of_a_fit_and_default_names(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("--posterior", run / "posterior", "--data", run / "config.yaml") == 0
    numbers = json.loads((tmp_path / "report.json").read_text())
    assert [block["name"] for block in numbers["models"]] == ["version_0"]


def test_a_posterior_without_configuration(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(run / "posterior", moved)
    words = ["--posterior", moved, "--data", DATA / "digits.yaml", "--out", tmp_path / "r.html"]
    assert command(*words) == 0  # a network of known layers
    monkeypatch.setattr("lightning_bnn.posteriors.weights.network_recipe", lambda net: None)
    Posterior.load(moved).save(moved)
    assert command(*words) == 1
    assert "--config FILE" in capsys.readouterr().err
    assert command(*words, "--config", run / "config.yaml") == 0


def test_wrong_words(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--posterior", run, "--data", DATA / "digits.yaml", "--out", tmp_path / "r.html"]
    for extra, text in (
        (["--ood", "rotated.yaml"], "NAME=FILE"),
        (["--name", "a", "--name", "b"], "--name is given once"),
        (["--config", tmp_path / "none.yaml"], "none.yaml"),
        (["--name", ""], "--name is given once"),
        (["--ood", "a=x.yaml", "--ood", "a=y.yaml"], "once for each name"),
        (["--out", tmp_path / "page.txt"], "name of a page"),
        (["--out", f"{DATA / 'digits.yaml'}/page.html"], "--out cannot be written"),
    ):
        assert command(*words, *extra) == 1
        assert text in capsys.readouterr().err
    nowhere = ["--posterior", tmp_path / "nowhere", "--data", DATA / "digits.yaml"]
    for extra in ([], ["--config", run / "config.yaml"]):
        assert command(*nowhere, *extra) == 1
        said = capsys.readouterr().err
        assert f"no posterior in {tmp_path / 'nowhere'}" in said
    flat = tmp_path / "flat.yaml"
    flat.write_text(
        yaml.safe_dump(
            {"class_path": "lightning_bnn.data.ToyRegression", "init_args": {"batch_size": 10}}
        )
    )
    assert command("--posterior", run, "--data", flat, "--out", tmp_path / "r.html") == 1
    assert "does not go through" in capsys.readouterr().err
    assert not list(tmp_path.glob("r.*"))


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command("--help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: lightning-bnn report --posterior FOLDER")
    for option in ("--posterior", "--data", "--out", "--ood", "--name", "--config", "--draws"):
        assert option in text
