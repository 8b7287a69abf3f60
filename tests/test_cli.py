"""The command line, mostly in process: each run is a small network on a few batches of digits."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from lightning_bnn import Posterior, cli
from lightning_bnn.callbacks import SWAGMoments
from lightning_bnn.cli import main
from lightning_bnn.nets import MLP

MODEL: dict[str, Any] = {
    "class_path": "lightning_bnn.VariationalBNN",
    "init_args": {
        "net": {
            "class_path": "lightning_bnn.nets.MLP",
            "init_args": {"inputs": 64, "hidden": [8], "outputs": 10},
        },
        "likelihood": "lightning_bnn.likelihoods.Categorical",
        "prior": {
            "*.bias": {"class_path": "lightning_bnn.priors.Laplace"},
            "*": {"class_path": "lightning_bnn.priors.Normal", "init_args": {"scale": 0.5}},
        },
        "bayesian": ["*", "!1.bias"],
        "predict_draws": 3,
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "scheduler": {
            "class_path": "torch.optim.lr_scheduler.ExponentialLR",
            "init_args": {"gamma": 0.5},
        },
    },
}


def configuration(folder: Path, **changes: Any) -> str:
    """Write a configuration whose runs go to ``folder/runs``; changes are of the model."""
    model = {**MODEL, "init_args": {**MODEL["init_args"], **changes}}
    logger = {
        "class_path": "pytorch_lightning.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "runs"},
    }
    checkpoint = {
        "class_path": "pytorch_lightning.callbacks.ModelCheckpoint",
        "init_args": {"filename": "{epoch}", "save_top_k": -1},
    }
    content = {
        "seed_everything": 1,
        "model": model,
        "data": {"class_path": "lightning_bnn.data.Digits", "init_args": {"batch_size": 32}},
        "trainer": {
            "max_epochs": 2,
            "limit_train_batches": 3,
            "limit_val_batches": 1,
            "accelerator": "cpu",
            "logger": logger,
            "callbacks": [checkpoint],
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
        },
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return str(path)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from lightning_bnn.data import Digits

    data = Digits()
    data.setup()
    inputs, targets = data.splits.test.tensors
    return inputs, targets


def metrics(run: Path) -> dict[str, float]:
    with open(run / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: float(value) for row in rows for name, value in row.items() if value}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished fit."""
    folder = tmp_path_factory.mktemp("cli")
    assert main(["fit", "--config", configuration(folder)]) == 0
    return folder / "runs" / "version_0"


# -------------------------------------------------------------------- words and help


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in (*cli.LIGHTNING_COMMANDS, *cli.OTHER_COMMANDS):
        assert f"\n  {command} " in text
    assert main([]) == 0
    assert capsys.readouterr().out == text
    assert main(["fti", "--config", "x.yaml"]) == 2
    assert "'fti'" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("lightning-bnn")


def test_other_commands_are_given_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(argv: list[str]) -> int:
        seen.append(argv)
        return 3

    monkeypatch.setitem(sys.modules, "lightning_bnn.demo", SimpleNamespace(main=run))  # type: ignore[arg-type]
    assert main(["demo", "--quick", "x"]) == 3
    assert seen == [["--quick", "x"]]


def test_help_of_fit_begins_with_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "LONGEST_LIST", 60)  # other tests have strategies of their own
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: lightning-bnn fit --config FILE [options]\n")
    places = [text.index(word) for word in ("--posterior", "--ckpt_path", "--model ", "--data ")]
    assert places == sorted(places)
    assert places[-1] < text.index("--trainer.max_epochs")
    assert "lightning_bnn.VariationalBNN" in text
    assert "lightning_bnn.data.Digits" in text
    assert "registry" not in text[: text.index("--trainer")]
    with pytest.raises(SystemExit):
        main(["fit", "--model.help", "VariationalBNN"])
    text = capsys.readouterr().out
    assert "--model.kl_warmup" in text
    assert "lightning_bnn.priors.Laplace" in text
    assert "torch.nn.ReLU6" not in text  # endless lists are spared


@pytest.mark.parametrize(
    "choice",
    ["3.*", ["*", "!1.bias"], "lightning_bnn.selection.last_layer", None],
)
def test_printed_configuration_is_one_again(
    choice: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path, bayesian=choice)
    printed = []
    for _ in range(2):
        with pytest.raises(SystemExit) as stopped:
            main(["fit", "--config", config, "--print_config"])
        assert stopped.value.code == 0
        printed.append(capsys.readouterr().out)
        config = str(tmp_path / "printed.yaml")
        Path(config).write_text(printed[-1])
    assert printed[0] == printed[1]
    assert yaml.safe_load(printed[0])["model"]["init_args"]["bayesian"] == choice


# -------------------------------------------------------------------- fit


def test_fit_leaves_configuration_checkpoints_and_posterior(fitted: Path) -> None:
    posterior = Posterior.load(fitted / "posterior", MLP(64, [8], 10))
    weights = posterior.sample(2)
    assert sorted(weights) == ["1.weight", "3.bias", "3.weight"]
    assert "1.bias" in posterior.fixed
    assert (fitted / "config.yaml").is_file()
    assert sorted(path.name for path in (fitted / "checkpoints").iterdir()) == [
        "epoch=0.ckpt",
        "epoch=1.ckpt",
    ]


def test_configuration_reaches_the_strategy(tmp_path: Path, monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setattr(cli.BayesianCLI, "after_fit", lambda self: seen.append(self))
    assert main(["fit", "--config", configuration(tmp_path), "--model.temperature", "0.5"]) == 0
    strategy, trainer = seen[0].model, seen[0].trainer
    assert strategy.target.temperature == 0.5
    assert strategy.predict_draws == 3
    priors = {type(prior).__name__: prior.scale for _, _, prior, _, _ in strategy.prior.segments()}
    assert priors == {"Normal": 0.5, "Laplace": 1.0}
    assert isinstance(trainer.optimizers[0], torch.optim.Adam)
    # after two epochs of ExponentialLR
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**2)


@pytest.mark.parametrize(
    ("changes", "peak", "last"),
    [
        ({"scheduler": None}, None, 0.01),
        ({"scheduler": "cosine"}, 0.01, 0.0),
        ({"scheduler": "auto"}, None, 0.01),
        ({"scheduler": "auto", "optimizer": None}, 0.005, 0.0),
    ],
)
def test_schedules_have_names(
    changes: Any, peak: float | None, last: float, tmp_path: Path, monkeypatch: Any
) -> None:
    seen = []
    monkeypatch.setattr(cli.BayesianCLI, "after_fit", lambda self: seen.append(self))
    assert main(["fit", "--config", configuration(tmp_path, **changes)]) == 0
    assert seen[0].model.peak_lr == peak
    assert seen[0].trainer.optimizers[0].param_groups[0]["lr"] == last


def test_a_learned_prior_scale_from_a_file(tmp_path: Path, monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setattr(cli.BayesianCLI, "after_fit", lambda self: seen.append(self))
    scale = {"class_path": "lightning_bnn.priors.Learned", "init_args": {"by": "layer"}}
    prior = {"class_path": "lightning_bnn.priors.Normal", "init_args": {"scale": scale}}
    file = configuration(tmp_path, prior={"1.bias": "lightning_bnn.priors.Normal", "*": prior})
    assert main(["fit", "--config", file]) == 0
    assert set(seen[0].model.prior_scales()) == {"1.weight", "3.*"}
    text = next(tmp_path.rglob("config.yaml")).read_text()
    assert "lightning_bnn.priors.Learned" in text


def test_a_family_from_a_file(tmp_path: Path, monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setattr(cli.BayesianCLI, "after_fit", lambda self: seen.append(self))
    family = {"class_path": "lightning_bnn.families.LowRank", "init_args": {"rank": 3}}
    assert main(["fit", "--config", configuration(tmp_path, family=family)]) == 0
    assert seen[0].model.family.columns.shape[0] == 3
    text = next(tmp_path.rglob("config.yaml")).read_text()
    assert "lightning_bnn.families.LowRank" in text


def test_functions_choose_the_bayesian_weights(tmp_path: Path) -> None:
    config = configuration(tmp_path, bayesian="lightning_bnn.selection.last_layer")
    where = tmp_path / "elsewhere"
    options = ["--posterior", str(where), "--trainer.fast_dev_run", "1"]
    assert main(["fit", "--config", config, *options]) == 0
    posterior = Posterior.load(where, MLP(64, [8], 10))
    assert sorted(posterior.sample(1)) == ["3.bias", "3.weight"]


def layer(name: str, **options: Any) -> dict[str, Any]:
    return {"class_path": f"torch.nn.{name}", "init_args": options}


@pytest.mark.parametrize(
    "layers",
    [
        ["torch.nn.Flatten", layer("Linear", in_features=64, out_features=10)],
        [
            # the digits are grey, and torchvision's networks take three colours
            layer("Conv2d", in_channels=1, out_channels=3, kernel_size=1),
            {
                "class_path": "torchvision.models.get_model",
                "init_args": {"name": "shufflenet_v2_x0_5"},
                "dict_kwargs": {"num_classes": 10},
            },
        ],
    ],
    ids=["layers", "torchvision"],
)
def test_networks_from_layers_and_torchvision(layers: list[Any], tmp_path: Path) -> None:
    net = {"class_path": "lightning_bnn.nets.sequential", "init_args": {"layers": layers}}
    config = configuration(tmp_path, net=net, prior=None, bayesian=None)
    options = ["--data.batch_size", "2", "--trainer.fast_dev_run", "1"]
    assert main(["fit", "--config", config, *options]) == 0


def test_a_network_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = "from lightning_bnn.nets import MLP\n\n\nclass Mine(MLP):\n    pass\n"
    (tmp_path / "folder_of_a_user.py").write_text(network)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    net = {**MODEL["init_args"]["net"], "class_path": "folder_of_a_user.Mine"}
    assert main(["fit", "--config", configuration(tmp_path, net=net)]) == 0
    assert sys.path[-1] == str(tmp_path)  # behind what is installed


def test_resumed_fit_equals_the_whole_one(fitted: Path, tmp_path: Path) -> None:
    checkpoint = str(fitted / "checkpoints" / "epoch=0.ckpt")
    config = configuration(tmp_path)
    assert main(["fit", "--config", config, "--ckpt_path", checkpoint]) == 0
    net = MLP(64, [8], 10)
    inputs = digits()[0][:8]
    one = Posterior.load(fitted / "posterior", net).predict(inputs, draws=4)
    other = Posterior.load(tmp_path / "runs/version_0/posterior", net).predict(inputs, draws=4)
    assert torch.equal(one.outputs, other.outputs)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")
def test_resuming_into_the_same_folder_is_allowed(fitted: Path, tmp_path: Path) -> None:
    config = configuration(tmp_path)
    options = ["--trainer.logger.version", "0"]
    assert main(["fit", "--config", config, "--trainer.max_epochs", "1", *options]) == 0
    with pytest.raises(RuntimeError, match="NOT exist"):
        main(["fit", "--config", config, *options])
    last = str(tmp_path / "runs" / "version_0" / "checkpoints" / "epoch=0.ckpt")
    assert main(["fit", "--config", config, "--ckpt_path", last, *options]) == 0


def test_own_errors_come_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configuration(tmp_path)
    assert main(["fit", "--config", config, "--model.draws", "0"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "lightning-bnn fit: draws= is a whole number, at least 1; got 0."
    )
    config = configuration(tmp_path, prior={"class_path": "Normal", "init_args": {"scale": -1.0}})
    assert main(["fit", "--config", config]) == 1
    assert "scale= is a number greater than 0" in capsys.readouterr().err


def test_wrong_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--config", configuration(tmp_path), "--model.tempreature", "1"])
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert "tempreature" in text
    assert len(text.splitlines()) < 30


# -------------------------------------------------------------------- validate, test, predict


def test_checkpoint_and_posterior_give_the_same_metrics(fitted: Path, tmp_path: Path) -> None:
    config = configuration(tmp_path)
    checkpoint = ["--ckpt_path", str(fitted / "checkpoints" / "epoch=1.ckpt")]
    posterior = ["--posterior", str(fitted / "posterior")]
    assert main(["test", "--config", config, *checkpoint]) == 0
    assert main(["test", "--config", config, *posterior]) == 0
    first, second = (metrics(tmp_path / "runs" / f"version_{run}") for run in (0, 1))
    assert first == second
    inputs, targets = digits()
    predictive = Posterior.load(fitted / "posterior", MLP(64, [8], 10)).predict(inputs, draws=3)
    expected = (predictive.mode == targets).float().mean().item()  # type: ignore[attr-defined]
    assert first["test_accuracy"] == pytest.approx(expected)
    assert main(["validate", "--config", config, *posterior]) == 0
    assert "val_accuracy" in metrics(tmp_path / "runs" / "version_2")


@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")
def test_the_saved_configuration_serves_every_command(fitted: Path) -> None:
    config = str(fitted / "config.yaml")
    before = Path(config).read_text()
    options = ["--posterior", str(fitted / "posterior"), "--trainer.logger.version", "0"]
    for command in ("validate", "test", "predict"):
        assert main([command, "--config", config, *options]) == 0
    assert Path(config).read_text() == before


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_an_untrained_network_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--config", configuration(tmp_path)]) == 1
    assert "--ckpt_path" in capsys.readouterr().err


def test_predict_writes_a_file(
    fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--posterior", str(fitted / "posterior")]
    assert main(["predict", "--config", configuration(tmp_path), *options]) == 0
    path = tmp_path / "runs" / "version_0" / "predictions.csv"
    assert capsys.readouterr().out.splitlines()[-1] == f"The predictions are in {path}"
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    inputs, _ = digits()
    predictive = Posterior.load(fitted / "posterior", MLP(64, [8], 10)).predict(inputs, draws=3)
    assert [int(row["class"]) for row in rows] == predictive.mode.tolist()  # type: ignore[attr-defined]


def test_the_package_is_a_program(tmp_path: Path) -> None:
    options = ["--trainer.fast_dev_run", "1", "--posterior", str(tmp_path / "posterior")]
    words = ["-m", "lightning_bnn", "fit", "--config", configuration(tmp_path), *options]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"The posterior is in {tmp_path / 'posterior'}"
    assert json.loads((tmp_path / "posterior" / "manifest.json").read_text())
    assert "LeafSpec" not in done.stderr


def test_draws_that_lie_on_the_disk_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Path(__file__).parents[1] / "configs" / "digits_sgmcmc.yaml"
    options = {
        "model.init_args.warm_up": 2, "model.init_args.chains": 2, "trainer.max_epochs": 1,
        "trainer.limit_val_batches": 0, "trainer.accelerator": "cpu",
        "trainer.enable_progress_bar": "false", "trainer.enable_model_summary": "false",
    }  # fmt: skip
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    collect = [
        "--trainer.callbacks=lightning_bnn.callbacks.SampleCollector",
        "--trainer.callbacks.every=1",
        "--trainer.callbacks.dirpath=draws",
    ]
    assert main(["fit", "--config", str(config), *arguments, *collect]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"The posterior is in {tmp_path / 'draws'}"
    assert not list(tmp_path.rglob("posterior"))
    options = ["--posterior", "draws", "--trainer.logger", "false", "--trainer.accelerator", "cpu"]
    assert main(["test", "--config", str(config), *options]) == 0


@pytest.mark.parametrize("snapshots", [1, 3])
def test_several_posteriors_of_swag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    snapshots: int,
) -> None:  # fmt: skip
    """Each has a folder of its own; one without enough snapshots fails no fit."""
    saved: list[str] = []
    posterior = SimpleNamespace(save=saved.append)

    def made(number: int) -> SWAGMoments:
        swag = SWAGMoments()
        zero, moments = torch.zeros(1, 1), None
        if number:
            moments = {"count": number, "mean": zero, "squares": zero, "deviations": []}
        swag.load_state_dict({"moments": moments})
        monkeypatch.setattr(swag, "posterior", lambda: posterior)
        return swag

    own: Any = object.__new__(cli.BayesianCLI)
    own.trainer = SimpleNamespace(
        callbacks=[made(snapshots), made(2)], is_global_zero=True, log_dir=None
    )
    fit = SimpleNamespace(posterior="out/", trainer=SimpleNamespace(fast_dev_run=False))
    own.config, own.model = SimpleNamespace(fit=fit), SimpleNamespace(posterior=lambda: posterior)
    own.after_fit()
    said = capsys.readouterr().out
    first = ["out_swag_1"] if snapshots == 3 else []
    assert saved == ["out/", *first, "out_swag_2"]
    assert ("no posterior of SWAG in out_swag_1: it needs 2 snapshots" in said) == (snapshots < 2)
    assert "The posterior of SWAG is in out_swag_2" in said


def test_an_ensemble_leaves_its_posterior_and_that_of_swag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = Path(__file__).parents[1] / "configs" / "digits_ensemble.yaml"
    quiet = ["--trainer.logger", "false", "--trainer.accelerator", "cpu"]
    fit = [
        "--model.members", "2", "--trainer.max_epochs", "4", "--trainer.limit_train_batches", "2",
        "--trainer.limit_val_batches", "0", "--trainer.enable_progress_bar", "false",
        "--trainer.enable_model_summary", "false",
        "--trainer.callbacks=lightning_bnn.callbacks.SWAGMoments",
        "--trainer.callbacks.start=1", "--trainer.callbacks.rank=3",
    ]  # fmt: skip
    assert main(["fit", "--config", str(config), *quiet, *fit]) == 0
    said = capsys.readouterr().out.splitlines()
    paths = [tmp_path / "posterior", tmp_path / "posterior_swag"]
    assert said[-2:] == [
        f"The posterior is in {paths[0]}",
        f"The posterior of SWAG is in {paths[1]}",
    ]
    net = MLP(64, [100], 10)
    assert len(Posterior.load(paths[0], net)) == 2  # type: ignore[arg-type]
    assert len(Posterior.load(paths[1], net).components) == 2  # type: ignore[attr-defined]
    for path in paths:
        assert main(["test", "--config", str(config), "--posterior", str(path), *quiet]) == 0


def test_an_error_that_quotes_a_file_does_not_steer_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "\x1b[2J").write_text("a name that clears the screen")
    assert main(["status", "--storage", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert r"found: \x1b[2J" in said
    assert "\x1b" not in said
