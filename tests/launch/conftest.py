"""One Ray for all tests of a process, without its dashboard and with a small object store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@pytest.fixture(scope="session")
def local_ray() -> Iterator[Any]:
    """Ray on this machine with two CPUs."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (the extra 'ray')")
    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
        )
    yield ray
    ray.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: of two processes none then works on it alone at the end."""
    items.sort(key=lambda item: "test_simulated_cluster" not in item.nodeid)
