"""From ``ray job submit`` to a posterior: a real head with a token, our wheel shipped to it."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_bnn.launch import StoredRun
from lightning_bnn.nets import MLP
from tests.launch.faults import wait_for
from tests.launch.s3_server import BUCKET, free_port, s3_server
from tests.wheels import ROOT, build_wheel

pytest.importorskip("ray", reason="Ray is not installed (the extra 'ray')")
pytestmark = pytest.mark.slow


@dataclass
class Head:
    """A running head.

    Attributes:
        address: Of its dashboard, which takes jobs.
        environment: In which clients reach it.
        token: What nobody may find anywhere.
    """

    address: str
    environment: dict[str, str]
    token: str


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture(scope="module")
def head(s3: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    token = secrets.token_hex(32)
    place = tmp_path_factory.mktemp("token") / "token"
    place.write_text(token)
    place.chmod(0o600)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {
        **kept,
        **s3,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(place),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PIP_NO_DEPS": "1",  # of the shipped wheel: they are there
    }
    dashboard = free_port()
    words = ["start", "--head", "--block", "--num-cpus=2", f"--port={free_port()}"]
    words += ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
    words += [f"--dashboard-port={dashboard}", f"--object-store-memory={80 * 2**20}"]
    # that of another Ray on this machine would take the place of the agent that starts jobs
    words += [f"--dashboard-agent-listen-port={free_port()}"]
    process = subprocess.Popen(
        [_ray(), *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{dashboard}"
    try:
        _wait_for(f"{address}/api/version", token, process)
        _wait_for_agent(address, environment)
        yield Head(address, environment, token)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def _ray() -> str:
    return str(Path(sys.executable).parent / "ray")


def _wait_for(address: str, token: str, process: subprocess.Popen[bytes]) -> None:
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"})
    for _ in range(600):
        assert process.poll() is None, "the head has ended"
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError("the head does not answer")


def _wait_for_agent(address: str, environment: dict[str, str]) -> None:
    """Wait for the process of the head that starts jobs: it comes later than what takes them."""
    command = [_ray(), "job", "submit", "--no-wait", "--address", address, "--", "true"]

    def takes_jobs() -> bool:
        return subprocess.run(command, env=environment, capture_output=True).returncode == 0

    wait_for(takes_jobs, "the agent of the head")


def _submit(
    head: Head, wheel: Path, folder: Path, storage: str
) -> subprocess.CompletedProcess[str]:
    (folder / "config.yaml").write_text((ROOT / "configs" / "digits_ensemble.yaml").read_text())
    program = (
        "import lightning_bnn, sys; from lightning_bnn.cli import main; "
        "print('package in', lightning_bnn.__file__); sys.exit(main(sys.argv[1:]))"
    )
    options = ["--config", "config.yaml", "--members", "3", "--stack", "2", "--storage", storage]
    options += ["--trainer.max_epochs", "2", "--trainer.callbacks", "null"]
    command = [_ray(), "job", "submit", "--address", head.address, "--working-dir", str(folder)]
    command += ["--runtime-env-json", json.dumps({"py_modules": [str(wheel)]})]
    command += ["--", sys.executable, "-c", program, "launch", *options]
    return subprocess.run(
        command, env=head.environment, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.parametrize("remote", [False, True], ids=["directory", "s3"])
def test_from_submit_to_posterior(
    head: Head, wheel: Path, s3: dict[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, remote: bool,
) -> None:  # fmt: skip
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    storage = f"s3://{BUCKET}/{tmp_path.name}" if remote else str(tmp_path / "storage")
    folder = tmp_path / "work"
    folder.mkdir()
    done = _submit(head, wheel, folder, storage)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "The posterior of 3 members is in" in said
    (package,) = re.findall(r"^package in (.*)$", said, re.MULTILINE)
    assert "py_modules_files" in package  # the one shipped
    assert head.token not in said
    posterior = StoredRun(storage).posterior(MLP(64, [100], 10))
    assert len(posterior.components) == 3
    if not remote:
        files = [path for path in Path(storage).rglob("*") if path.is_file()]
        assert files
        assert not any(head.token.encode() in path.read_bytes() for path in files)


def test_without_the_token_nothing_is_taken(head: Head, wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(secrets.token_hex(32))
    stranger = {**head.environment, "RAY_AUTH_TOKEN_PATH": str(other)}
    done = _submit(Head(head.address, stranger, head.token), wheel, tmp_path, str(tmp_path / "run"))
    assert done.returncode != 0
    assert not (tmp_path / "run").exists()
