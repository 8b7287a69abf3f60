"""What is asked of nodes before a member runs there, and of those that come later."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_bnn.errors import LaunchError
from lightning_bnn.launch import cluster, launch
from lightning_bnn.launch.driver import Driver, Outcome
from lightning_bnn.launch.member import Attempt
from lightning_bnn.launch.recipe import Factories
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.tasks import attempt_outcome
from lightning_bnn.launch.units import Unit
from tests.launch.programs import make_data, make_ensemble

start = partial(launch, allow_open_cluster=True, seed=0, trainer={"max_epochs": 1})
UNIT = Unit((0,))
RESULT = {"members": {"posterior": {"0": {"place": "here"}}}, "metrics": {}, "attempt": 1}


@pytest.mark.usefixtures("local_ray")
def test_a_node_with_other_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**cluster.own_versions(), "torch": "1.0"}
    monkeypatch.setattr(cluster, "own_versions", lambda: own)
    with pytest.raises(LaunchError, match=r"The node .* has torch .*, and the driver has 1\.0"):
        start(make_ensemble, make_data, 1, storage=tmp_path)
    assert RunRecords(tmp_path).granted(UNIT) == 0


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
def test_a_request_that_no_node_can_meet(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"it needs CPU 1, GPU 1, and the nodes .* have: CPU 2"):
        start(make_ensemble, make_data, 1, storage=tmp_path / "run", resources={"GPU": 1})
    assert not (tmp_path / "run").exists()


def test_a_node_that_came_later_with_other_versions_is_avoided(
    local_ray: Any, tmp_path: Path
) -> None:
    attempt = Attempt(
        Factories(make_ensemble, make_data, {}),
        str(tmp_path),
        UNIT,
        1,
        seed=0,
        versions={**cluster.own_versions(), "torch": "1.0"},
    )
    outcome = attempt_outcome(attempt, {"node": "late"})
    assert (outcome.result, outcome.final, outcome.node) == (None, False, "late")
    assert "the driver has 1.0" in str(outcome.error)
    assert not list(tmp_path.iterdir())

    outcomes, avoided = [outcome, Outcome(RESULT)], []

    def submit(attempt: Attempt, avoid: str | None) -> Any:
        avoided.append(avoid)
        return local_ray.put(outcomes[len(avoided) - 1])

    driver = Driver(
        local_ray, RunRecords(tmp_path), [UNIT], attempt, submit, 1, 60.0, stop_early=True
    )
    driver.run()
    assert avoided == [None, "late"]
    assert driver.results.get().status == "done"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "grows"),
    [
        (None, False),
        ("provider: {type: local, head_ip: 192.0.2.1}", False),
        ("provider: {type: aws}", True),
        ("provider: {type: [", True),
        ("", True),
    ],
)
def test_which_clusters_can_grow(
    text: str | None, grows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_USAGE_STATS_KUBERAY_IN_USE", raising=False)
    if text is not None:
        (tmp_path / "ray_bootstrap_config.yaml").write_text(text)
    assert cluster.can_grow() is grows
    monkeypatch.setenv("RAY_USAGE_STATS_KUBERAY_IN_USE", "1")
    assert cluster.can_grow()
