"""Every configuration parses; those whose data are at hand also run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_bnn.cli import main
from lightning_bnn.report.networks import instantiate

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
DATA = sorted((Path(__file__).parents[1] / "configs" / "data").glob("*.yaml"))


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("config", DATA, ids=name)
def test_data_can_be_made(config: Path) -> None:
    """A data module reads nothing before it is set up."""
    values = yaml.safe_load(config.read_text())
    assert values["init_args"].get("data_dir") is None
    made = instantiate(values, "data", config)
    assert type(made).__name__ == values["class_path"].rpartition(".")[2]
    assert made.batch_size == values["init_args"]["batch_size"]


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_parses(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", str(config), "--print_config"])
    assert stopped.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert "Unable to serialize" not in str(printed)
    written = yaml.safe_load(config.read_text())
    assert "'/" not in str(written)  # no place of one machine
    assert written["data"]["init_args"].get("data_dir") is None
    assert printed["trainer"]["max_epochs"] == written["trainer"]["max_epochs"]
    schedule = written["model"]["init_args"].get("scheduler", {"class_path": ""})
    if schedule["class_path"].endswith("CosineAnnealingLR"):
        scheduler = schedule["init_args"]
        assert scheduler["T_max"] == written["trainer"]["max_epochs"]


@pytest.mark.parametrize(
    "stem",
    [
        *("digits_vi", "digits_vi_pruned", "toy_vi", "digits_sgmcmc", "toy_sghmc", "toy_hmc"),
        *("digits_ensemble", "digits_ivon", "digits_dropout", "toy_laplace", "toy_polynomial"),
    ],
)
def test_runs(stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = next(path for path in CONFIGS if path.stem == stem)
    options = ["--trainer.fast_dev_run", "1", "--trainer.accelerator", "cpu"]
    assert main(["fit", "--config", str(config), *options]) == 0
    assert not list(tmp_path.rglob("posterior"))  # of a trial run it would be of no use


@pytest.mark.parametrize(
    "stem", ["mnist_vi", "cifar10_vi", "uci_vi", "mnist_ensemble", "uci_ensemble"]
)
def test_says_what_data_are_missing(
    stem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model is made too, so that this checks the network and the prior."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_BNN_DATA", raising=False)
    config = next(path for path in CONFIGS if path.stem == stem)
    options = ["--trainer.fast_dev_run", "1", "--trainer.accelerator", "cpu"]
    assert main(["fit", "--config", str(config), *options]) == 1
    assert "LIGHTNING_BNN_DATA" in capsys.readouterr().err


def test_draws_of_each_run_have_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command runs again and again; its draws are read as the configuration says."""
    monkeypatch.chdir(tmp_path)
    stem = "digits_sgmcmc"
    text = next(path for path in CONFIGS if path.stem == stem).read_text()
    config = yaml.safe_load(text)
    config["model"]["init_args"] |= {"warm_up": 1, "predict_draws": 2}
    config["trainer"] |= {"max_epochs": 2, "check_val_every_n_epoch": 1, "accelerator": "cpu"}
    config["trainer"] |= {"enable_progress_bar": False, "enable_model_summary": False}
    config["trainer"]["callbacks"][0]["init_args"] |= {"burn_in": 1, "every": 1}
    config["trainer"]["callbacks"][1]["init_args"] |= {"every_n_epochs": 1}
    config["model"]["init_args"].pop("scheduler", None)
    Path("config.yaml").write_text(yaml.safe_dump(config))
    for run in range(2):
        assert main(["fit", "--config", "config.yaml"]) == 0
        folder = f"runs/{stem}/version_{run}/draws"
        assert Path(folder, "manifest.json").exists()
    said = f"--posterior runs/{stem}/version_0/draws"
    assert said in text
    assert main(["test", "--config", "config.yaml", *said.split()]) == 0
