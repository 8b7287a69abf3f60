"""Ray as a backend: what is asked of nodes before a member runs there, and what can be sent."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_bnn.errors import ConfigurationError, LaunchError
from lightning_bnn.launch import Attempt, launch, ray_backend
from lightning_bnn.launch.member import Place
from lightning_bnn.launch.ray_backend import RayBackend
from lightning_bnn.launch.recipe import Factories
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.lightning import PACKAGE
from tests.launch.programs import make_data, make_ensemble
from tests.native.compiler import needs_compiler

start = partial(launch, allow_open_cluster=True, seed=0, trainer={"max_epochs": 1})
UNIT = Unit((0,))


@pytest.mark.usefixtures("local_ray")
def test_a_node_with_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {**ray_backend._versions(), "torch": "1.0"}
    monkeypatch.setattr(ray_backend, "_versions", lambda: versions)
    with pytest.raises(LaunchError, match=r"The node .* has torch .*, and the driver has 1\.0"):
        start(make_ensemble, make_data, 1, storage=tmp_path)
    assert RunRecords(tmp_path).granted(UNIT) == 0


@needs_compiler
@pytest.mark.slow  # Ray starts a process for other settings
@pytest.mark.usefixtures("local_ray")
def test_a_node_without_the_compiled_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed would give other members there."""
    versions = ray_backend._versions()
    monkeypatch.setenv("LIGHTNING_BNN_COMPILE", "0")  # and so have the workers
    monkeypatch.setattr(ray_backend, "_versions", lambda: versions)
    match = r"noise from another source, PyTorch, and the driver has compiled .*BNN_COMPILE=0"
    with pytest.raises(LaunchError, match=match):
        start(make_ensemble, make_data, 1, storage=tmp_path)
    assert RunRecords(tmp_path).granted(UNIT) == 0


def test_noise_from_another_source_is_another_version() -> None:
    driver = {**ray_backend._versions(), "noise": "compiled (of another source)"}
    assert "launch with LIGHTNING_BNN_COMPILE=0" in str(ray_backend._other_version(driver))
    assert ray_backend._other_version(ray_backend._versions()) is None


@pytest.mark.usefixtures("local_ray")
def test_workers_import_the_lightning_of_the_driver(tmp_path: Path) -> None:
    def make_data_where_it_is_set() -> Any:
        assert os.environ["LIGHTNING_BNN_LIGHTNING"] == PACKAGE
        return make_data()

    run = start(make_ensemble, make_data_where_it_is_set, 1, storage=tmp_path)
    assert [result.status for result in run.wait()] == ["done"]


@pytest.mark.usefixtures("local_ray")
def test_a_module_that_no_worker_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_here.py").write_text("def make_data():\n    return []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    try:
        with pytest.raises(
            LaunchError, match=r"cannot make a member .*No module named 'only_here'.*working-dir"
        ):
            start(make_ensemble, only_here.make_data, 1, storage=tmp_path / "run")
    finally:
        del sys.modules["only_here"]


@pytest.mark.usefixtures("local_ray")
def test_a_worker_with_other_versions_asks_for_another_node(tmp_path: Path) -> None:
    """Of a node that joined after all nodes were asked."""
    versions = {**ray_backend._versions(), "torch": "1.0"}
    recipe = Factories(make_ensemble, make_data, {})
    attempt, place = Attempt(str(tmp_path), UNIT, 1), Place({"node": "late"})
    outcome = ray_backend._outcome_here(recipe, attempt, versions, place)
    assert (outcome.result, outcome.final, outcome.node) == (None, False, "late")
    assert "the driver has 1.0" in str(outcome.error)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_sent_is_named(local_ray: Any) -> None:
    lock = threading.Lock()

    def closes_over_it(members: list[int], seed: int) -> Any:
        with lock:
            return make_ensemble(members, seed)

    backend = RayBackend(allow_open_cluster=True)
    recipe = Factories(closes_over_it, make_data, {})
    with pytest.raises(ConfigurationError, match=r"make_bnn cannot be sent .*pickle.*lock"):
        backend.open(recipe)
    options = {"callbacks": [], "profiler": lock}
    with pytest.raises(ConfigurationError, match=r"trainer cannot be sent .*pickle.*lock"):
        backend.open(Factories(make_ensemble, make_data, options))


@pytest.mark.parametrize(
    ("text", "grows"),
    [
        (None, False),
        ("provider: {type: local, head_ip: 192.0.2.1}", False),
        ("provider: {type: aws}", True),
    ],
)
def test_which_clusters_can_grow(
    text: str | None, grows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_USAGE_STATS_KUBERAY_IN_USE", raising=False)
    if text is not None:
        (tmp_path / "ray_bootstrap_config.yaml").write_text(text)
    assert ray_backend._can_grow() is grows
    monkeypatch.setenv("RAY_USAGE_STATS_KUBERAY_IN_USE", "1")
    assert ray_backend._can_grow()


@pytest.mark.usefixtures("local_ray")
def test_an_open_cluster_is_found_by_asking_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the client's environment says is no fact about the cluster."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    recipe = Factories(make_ensemble, make_data, {})
    with pytest.raises(LaunchError, match=r"no token authentication \(.* answers calls without"):
        RayBackend().open(recipe)
    RayBackend(allow_open_cluster=True).open(recipe)


STARTS_ONE = """
import os
from lightning_bnn.launch.ray_backend import RayBackend
from lightning_bnn.launch.recipe import Factories

backend = RayBackend()
backend.open(Factories(dict, dict, {}))
print(oct(os.stat(os.path.expanduser("~/.ray/auth_token")).st_mode & 0o777))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", [None, "token"])
def test_one_that_is_started_here_asks_for_a_token_that_nobody_else_can_read(
    mode: str | None, tmp_path: Path
) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**kept, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {} if mode is None else {"RAY_AUTH_MODE": mode}
    command = [sys.executable, "-c", STARTS_ONE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["0o600"], done.stderr


def test_a_token_that_others_can_read_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not ray_backend._close_token()  # there is none
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("0" * 64)
    token.chmod(0o644)
    assert ray_backend._close_token()
    assert token.stat().st_mode & 0o777 == 0o600
    assert not ray_backend._close_token()
