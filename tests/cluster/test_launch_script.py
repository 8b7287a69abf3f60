"""The script that ``ray submit`` runs, and the commands that the texts beside it name."""

from __future__ import annotations

import doctest
import re
import shlex
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_bnn.commands.launch import main as launch
from tests.cluster.test_configurations import FOLDER, KEEP_ALIVE

SCRIPT = FOLDER / "launch.py"


@pytest.fixture
def script() -> Any:
    spec = spec_from_file_location("cluster_launch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def help_text(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        launch(["--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("before", [[], ["--"]])
def test_arguments_arrive_and_errors_come_back(
    script: Any, before: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for name, value in script.SETTINGS.items():
        monkeypatch.setenv(name, value)  # so that they are put back after the test
    words = ["--storage", "s3:/bucket", "--config", "no-such-file.yaml"]
    with pytest.raises(SystemExit) as ended:
        script.main([*before, *words])
    assert ended.value.code == 2
    assert "no-such-file.yaml" in capsys.readouterr().err


def test_the_driver_gets_the_settings_of_the_cluster(script: Any) -> None:
    environment: dict[str, str] = {}
    script.prepare(environment)
    assert environment == {**KEEP_ALIVE, "RAY_ADDRESS": "auto", "RAY_AUTH_MODE": "token"}
    script.prepare(environment := {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": "192.0.2.1:6379"})
    assert environment["RAY_AUTH_MODE"] == "disabled"
    assert environment["RAY_ADDRESS"] == "192.0.2.1:6379"
    assert doctest.testmod(script) == (0, 3)


# ------------------------------------------------------------------------------ texts


TEXTS = (FOLDER / "README.md", FOLDER.parent / "README.md")


def shell_of(path: Path) -> str:
    return "\n".join(re.findall(r"```shell\n(.*?)```", path.read_text(), re.DOTALL))


def commands_of(path: Path) -> list[str]:
    """The lines of the shell blocks, continued ones joined, without what is said of them."""
    lines = shell_of(path).replace("\\\n", " ").splitlines()
    return [re.split(r"  #| > ", line)[0].strip() for line in lines if line.strip()]


@pytest.mark.parametrize("path", TEXTS, ids=["cluster", "readme"])
def test_the_lines_of_the_texts_are_shell(path: Path) -> None:
    done = subprocess.run(["bash", "-n"], input=shell_of(path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def command_of_ray(line: str) -> tuple[Any, list[str]]:
    """What Ray runs for a line, and the words that it gives to it."""
    scripts = pytest.importorskip("ray.scripts.scripts", reason="Ray is not installed")
    command, words = scripts.cli, shlex.split(line)[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    return command, words


def test_ray_has_the_commands_of_the_texts_and_takes_their_options() -> None:
    lines = [line for path in TEXTS for line in commands_of(path) if line.startswith("ray ")]
    contexts = {}
    for line in [*lines, script_example()]:
        command, words = command_of_ray(line)
        contexts[line] = command.make_context(command.name, words)  # as Ray itself reads them
    assert {context.info_name for context in contexts.values()} >= {"up", "submit", "exec", "down"}
    # what follows the two dashes is handed over
    arguments = contexts[script_example()].params["script_args"]
    assert arguments[:2] == ("--config", "configs/mnist_ensemble.yaml")
    files = [*TEXTS, SCRIPT, *FOLDER.glob("*.yaml")]
    named = {name for path in files for name in re.findall(r"`(ray [a-z][^`]*)`", path.read_text())}
    assert {"ray stop", "ray job submit --working-dir . --"} <= named
    for line in named:
        command_of_ray(line)


def test_the_options_of_the_examples_exist(help_text: str) -> None:
    job = yaml.safe_load((FOLDER / "kuberay-rayjob.yaml").read_text())
    lines = [job["spec"]["entrypoint"], *commands_of(FOLDER / "README.md"), script_example()]
    launches = [line.rpartition(" -- ")[2] for line in lines if "launch" in line]
    assert len(launches) >= 4
    known = {*re.findall(r"--[a-z-]+", help_text), "--config"}
    for line in launches:
        used = set(re.findall(r"(?<= )--[a-z-]+", f" {line}"))
        assert used <= known, line


def script_example() -> str:
    text = SCRIPT.read_text().replace("\\\n", " ")
    (line,) = re.findall(r"ray submit cluster/aws.yaml.*", text)
    return str(line)


def test_the_readme_names_every_file_and_every_setting() -> None:
    text = (FOLDER / "README.md").read_text()
    for path in FOLDER.iterdir():
        assert path.name in (*re.findall(r"`([a-z.-]+)`", text), "README.md", "__pycache__")
    for setting, value in KEEP_ALIVE.items():
        assert f"{setting}={value}" in text
