"""The script that ``ray submit`` runs, and the commands that the texts beside it name."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest
import yaml

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


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Start the script as ``ray submit`` does, from another folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        cwd=FOLDER,
        env={**environment, "PYTHONPATH": str(FOLDER.parent)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def help_text() -> str:
    done = run("--help")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_is_that_of_launch(help_text: str) -> None:
    assert "lightning-bnn launch" in help_text
    assert "--members" in help_text


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


def test_ray_submit_hands_over_what_follows_the_two_dashes() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts", reason="Ray is not installed")
    words = ["cluster/aws.yaml", "cluster/launch.py", "--", "--config", "a.yaml", "--members", "20"]
    context = scripts.submit.make_context("submit", words)
    assert context.params["script_args"] == ("--config", "a.yaml", "--members", "20")


# ------------------------------------------------------------------------------ texts


def commands_in_readme() -> list[str]:
    """The lines of the shell blocks, continued ones joined."""
    blocks = re.findall(r"```shell\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


def test_the_options_of_the_examples_exist(help_text: str) -> None:
    job = yaml.safe_load((FOLDER / "kuberay-rayjob.yaml").read_text())
    lines = [job["spec"]["entrypoint"], *commands_in_readme(), script_example()]
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
