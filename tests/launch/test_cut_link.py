"""Two hosts in network namespaces, joined by a link that is cut: the lost member ends elsewhere."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.faults import PATIENCE, ROOT, processes_end, wait_for

pytest.importorskip("ray", reason="Ray is not installed (the extra 'ray')")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.getuid() != 0, reason="network namespaces need root"
    ),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs ip, of iproute2"),
]

NEAR, FAR = "198.51.100.1", "198.51.100.2"
PORT, S3_PORT = 6379, 5000


def documented_settings() -> dict[str, str]:
    """The environment of the start line of a worker in cluster/onprem.yaml."""
    config = yaml.safe_load((ROOT / "cluster" / "onprem.yaml").read_text())
    line = config["worker_start_ray_commands"][-1]
    return dict(re.findall(r"(\w+)=(\S+?);?(?=\s)", line.split("export")[1].split("ray start")[0]))


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, joined by veth; the link has the name of its namespace."""
    mark = secrets.token_hex(3)
    names = (f"near-{mark}", f"far-{mark}")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth",
           "peer", "name", names[1], "netns", names[1])  # fmt: skip
        for name, address in zip(names, (NEAR, FAR), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a process on a host; it ends with the test, and all that it has started."""
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    settings = {**documented_settings(), "RAY_AUTH_TOKEN_PATH": str(token)}
    started: list[subprocess.Popen[bytes]] = []

    def go(host: str, *words: str, **more: str) -> subprocess.Popen[bytes]:
        with open(tmp_path / f"{host}.log", "ab") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", host, *words],
                cwd=ROOT,
                env={**environment, **settings, **more},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(process)
        return process

    with processes_end(RAY_USAGE_STATS_ENABLED="0") as environment:
        yield go
    for process in started:
        process.wait()


def answers(host: str, port: int) -> bool:
    """Whether a port can be reached, on the near host itself."""
    code = f"import socket; socket.create_connection(({NEAR!r}, {port}), 5)"
    command = ["ip", "netns", "exec", host, sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_the_settings_are_those_of_the_files() -> None:
    assert documented_settings()["RAY_health_check_failure_threshold"] == "3"
    assert documented_settings()["RAY_AUTH_MODE"] == "token"


def test_a_member_on_a_lost_host_ends_elsewhere(
    hosts: tuple[str, str], start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    near, far = hosts
    s3 = {
        "AWS_ENDPOINT_URL": f"http://{NEAR}:{S3_PORT}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    start(near, sys.executable, "-m", "moto.server", "-H", NEAR, "-p", str(S3_PORT), **s3)
    ray = str(Path(sys.executable).parent / "ray")
    small = ["--num-cpus=1", f"--object-store-memory={80 * 2**20}", "--block"]
    head = ["--head", f"--node-ip-address={NEAR}", f"--port={PORT}", "--include-dashboard=false"]
    start(near, ray, "start", *head, *small, **s3)
    wait_for(lambda: answers(near, PORT) and answers(near, S3_PORT), "the head and the storage")
    worker = [f"--address={NEAR}:{PORT}", f"--node-ip-address={FAR}"]
    start(far, ray, "start", *worker, *small, **s3)
    module, cut = "tests.launch.cut_link_script", ["ip", "link", "set", near, "down"]
    words = [sys.executable, "-m", module, str(tmp_path), "s3://runs/cut", FAR, *cut]
    driver = start(near, *words, **s3, RAY_ADDRESS=f"{NEAR}:{PORT}")
    assert driver.wait(PATIENCE) == 0, (tmp_path / f"{near}.log").read_text()[-6000:]
    said: dict[str, Any] = json.loads((tmp_path / "said.json").read_text())
    other = 1 - said["lost"]
    assert sorted(said["results"]) == sorted(
        [[said["lost"], "done", 2, NEAR], [other, "done", 1, NEAR]]
    )
    assert said["left"] == said["undisturbed"]
    assert said["seconds"] < 60
