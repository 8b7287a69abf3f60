"""Looking at somebody's posterior runs nothing of theirs, whatever lies beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import VariationalBNN
from lightning_bnn.callbacks import CalibrationReport
from lightning_bnn.cli import main
from lightning_bnn.commands.launch import read_recipe
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.report.posteriors import report_posteriors
from lightning_bnn.selection import allow_functions, named_function, select
from tests.trainers import quiet_trainer


class OwnNet(nn.Sequential):
    """A network of the user's own, of which a file cannot say how it is made."""

    def __init__(self, width: int = 3) -> None:
        super().__init__(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))


class OtherNet(OwnNet):
    """Of the same tensors."""


def described(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": name, "init_args": arguments}


def configuration(net: dict[str, Any], bayesian: str | None = None) -> str:
    likelihood = described("lightning_bnn.likelihoods.Gaussian", scale=0.1)
    model = described(
        "lightning_bnn.VariationalBNN", net=net, likelihood=likelihood, bayesian=bayesian
    )
    data = described("lightning_bnn.data.ToyRegression")
    trainer = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False,
               "enable_model_summary": False}  # fmt: skip
    content = {"seed_everything": 0, "model": model, "data": data, "trainer": trainer}
    return yaml.safe_dump(content, sort_keys=False)  # the order of the words of a command


def shell_attack(folder: Path, canary: Path) -> str:
    """A function of the standard library is called with a network that is a list of words."""
    layer = described("torch.nn.Linear", in_features=1, out_features=1)
    words = dict.fromkeys(("sh", "-c", f"id > {canary}"), layer)
    return configuration(described("torch.nn.ModuleDict", modules=words), "subprocess.call")


def module_attack(folder: Path, canary: Path) -> str:
    """A module that lies beside the posterior is imported."""
    text = (
        f"open({str(canary)!r}, 'w').close()\nfrom tests.commands.test_nothing_runs import OwnNet\n"
    )
    (folder / "their_module.py").write_text(text)
    return configuration(described("their_module.OwnNet"))


def function_attack(folder: Path, canary: Path) -> str:
    """So is one that has the function to choose weights."""
    module_attack(folder, canary)
    own = described("tests.commands.test_nothing_runs.OwnNet")
    return configuration(own, "their_module.OwnNet")


ATTACKS = [shell_attack, module_attack, function_attack]


def launched(folder: Path) -> None:
    """The posterior as the one member of a launched run."""
    records, unit = RunRecords(folder), Unit((0,))
    records.begin({"units": [[0]]})
    records.grant(unit, 1)
    strategy().posterior().save(f"{records.folder(unit, 1)}/posterior-00000")
    members = {"posterior": {"0": {"place": "attempt-0001/posterior-00000"}}}
    records.commit(unit, 1, {"members": members, "attempt": 1, "metrics": {}})


def strategy(net: type[nn.Module] = OwnNet) -> VariationalBNN:
    return VariationalBNN(net(), Gaussian(0.1), num_data=10)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(20, 1), torch.randn(20, 1)), 10)


def failing(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigurationError) as raised:
        call()
    return str(raised.value)


def compare(folder: Path, net: Callable[[], nn.Module]) -> None:
    bnn = VariationalBNN(net(), Gaussian(0.1), num_data=10)
    report = CalibrationReport(folder.parent / "pages", compare={"theirs": folder})
    quiet_trainer(callbacks=[report]).test(bnn, loader(), verbose=False)


# what looks at a posterior, without a word about a configuration
COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "report": lambda folder: ["report", "--posterior", str(folder), "--data", str(folder / "d")],
    "prune": lambda folder: ["prune", "--posterior", str(folder), "--fraction", "0.5"],
    "prune and save": lambda folder: [
        "prune", "--posterior", str(folder), "--fraction", "0.5", "--out", str(folder / "new")
    ],
    "status": lambda folder: ["status", "--storage", str(folder), "--diagnose"],
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to look at, from inside of it: modules there could be found."""
    folder = tmp_path / "theirs" / "posterior"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("their_module", None)
    return folder


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("where", ["beside", "above"])
@pytest.mark.parametrize("kind", ["saved", "launched"])
def test_a_configuration_that_lies_there_is_not_used(
    kind: str, where: str, attack: Any, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = place / "canary"
    launched(place) if kind == "launched" else strategy().posterior().save(place)
    file = (place if where == "beside" else place.parent) / "config.yaml"
    file.write_text(attack(place, canary))
    for name, words in COMMANDS.items():
        if name == "status" and kind == "saved":
            continue
        assert main(words(place)) == 1
        assert f"pass --config {file} if you trust it" in capsys.readouterr().err, name
    if kind == "saved":
        said = failing(lambda: report_posteriors([place], loader()))
        assert f"pass --config {file} if you trust it" in said
        compare(place, OwnNet)  # the strategy's own network fits
        said = failing(lambda: compare(place, lambda: nn.Linear(1, 1)))
        assert "is of another network" in said
    assert not canary.exists()
    assert "their_module" not in sys.modules
    assert not (place / "new").exists()


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_users_own_configuration_is_the_one_that_counts(
    attack: Any, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    canary, mine = place / "canary", tmp_path / "mine.yaml"
    posterior = strategy().posterior()
    posterior.save(place)
    for folder in (place, place.parent):
        (folder / "config.yaml").write_text(attack(place, canary))
    mine.write_text(configuration(described("tests.commands.test_nothing_runs.OtherNet")))
    seen: list[nn.Module] = []

    monkeypatch.setattr(OtherNet, "train", lambda self, *mode: (seen.append(self), self)[1])
    given = ["--config", str(mine)]
    for words in (
        ["report", "--posterior", str(place), "--data", str(mine), *given],
        ["prune", "--posterior", str(place), "--fraction", "0.5", "--out", "small", *given],
        ["test", "--posterior", str(place), *given],
        ["predict", "--posterior", str(place), *given],
    ):
        seen.clear()
        assert main(words) == 0, capsys.readouterr().err
        assert seen, words  # a posterior was made of the user's network
    assert (place / "small" / "config.yaml").read_text() == mine.read_text()
    assert not canary.exists()


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_no_configuration_calls_what_the_user_has_not_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even the user's own, which may be a copy of somebody's."""
    canary, file = place / "canary", place / "config.yaml"
    strategy().posterior().save(place)
    for attack in (shell_attack, function_attack):
        file.write_text(attack(place, canary))
        for words in (
            ["report", "--posterior", ".", "--data", str(file)],
            ["prune", "--posterior", ".", "--fraction", "0.5"],
            ["test", "--posterior", "."],
            ["fit"],
        ):
            assert main([*words, "--config", str(file)]) == 1, words
            assert "matches no trainable parameter" in capsys.readouterr().err, words
        recipe, *_ = read_recipe(["--config", str(file)])
        with pytest.raises(ValueError, match="matches no trainable parameter"):
            recipe.build_strategy([0], 0)
    assert not canary.exists()
    assert "their_module" not in sys.modules


def test_functions_of_a_module_that_the_user_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "my_choice.py").write_text("def first(net):\n    return ['0.weight']\n")
    own = described("tests.commands.test_nothing_runs.OwnNet")
    (tmp_path / "c.yaml").write_text(configuration(own, "my_choice.first"))
    words = ["fit", "--config", "c.yaml", "--posterior", "out", "--trainer.max_epochs", "1",
             "--trainer.enable_checkpointing", "false"]  # fmt: skip
    assert main(words) == 1
    assert "pass --import MODULE on the command line" in capsys.readouterr().err
    assert main([*words, "--import", "my_choice"]) == 0, capsys.readouterr().err
    assert main(["--import=my_choice", "prune", "--posterior", "out", "--fraction", "0.5",
                 "--config", "c.yaml"]) == 0  # fmt: skip
    assert main([*words, "--import", "no_such_module"]) == 1
    assert "--import no_such_module: the module cannot be imported" in capsys.readouterr().err


def test_a_network_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a configuration that the user names, and each command as from a shell of its own."""
    monkeypatch.chdir(tmp_path)
    elsewhere = [entry for entry in sys.path if entry]
    (tmp_path / "net_of_here.py").write_text(
        "from tests.commands.test_nothing_runs import OwnNet\nclass Net(OwnNet):\n    pass\n"
    )
    (tmp_path / "c.yaml").write_text(configuration(described("net_of_here.Net")))
    strategy().posterior().save("p")
    for words in (
        ["report", "--posterior", "p", "--data", "c.yaml", "--config", "c.yaml"],
        ["prune", "--posterior", "p", "--fraction", "0.5", "--config", "c.yaml"],
        ["test", "--posterior", "p", "--config", "c.yaml"],
    ):
        monkeypatch.setattr(sys, "path", [*elsewhere])
        sys.modules.pop("net_of_here", None)
        assert main(words) == 0, capsys.readouterr().err
    monkeypatch.setattr(sys, "path", [*elsewhere])
    assert main(["prune", "--posterior", "p", "--fraction", "0.5"]) == 1
    assert sys.path == elsewhere


def test_names_are_looked_up_in_what_is_allowed_only() -> None:
    names = ("os.system", "subprocess.call", "lightning_bnn.selection.re.compile", "sys", "", ".",
             "lightning_bnn.selection.importlib", "lightning_bnn.selection.choose",
             "a..b")  # fmt: skip
    assert [named_function(name) for name in (*names, None, 3, ["os.system"])] == [None] * 12
    allow_functions("tests.commands.test_nothing_runs")
    assert named_function("tests.commands.test_nothing_runs.strategy") is not None
    assert named_function("tests.commands.test_nothing_runs.sys.exit") is None
    with pytest.raises(ConfigurationError, match="--import MODULE"):
        select(nn.Linear(1, 1), "os.system")
