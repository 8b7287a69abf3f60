from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock

from tests.processes import run_script


@pytest.fixture(scope="session")
def ddp_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both ranks wrote what they found, a folder for each script; test processes share it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    directory = shared / "strategies_ddp"
    with FileLock(f"{directory}.lock"):
        if not (directory / "done").exists():
            directory.mkdir(exist_ok=True)
            run_script("tests.strategies.ddp_scripts", directory, timeout=600)
            (directory / "done").touch()
    return directory
