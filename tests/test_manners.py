"""The ten programs of ``tests/manners.py`` with either Lightning package."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bnn.likelihoods import Categorical
from tests.manners import PROGRAMS
from tests.test_both_lightnings import run

TWO_PACKAGES = ("pytorch_lightning", "lightning.pytorch")


@pytest.fixture(scope="module")
def unified(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the programs print with ``lightning.pytorch``, in one process: imports take longest."""
    place = tmp_path_factory.mktemp("unified")
    done = run("-m", "tests.manners", "lightning.pytorch", str(place))
    return done.stdout + done.stderr


@pytest.mark.parametrize("package", TWO_PACKAGES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program(
    program: Any, package: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs = "ignored_and_weighted" in program.__name__
    if needs and "ignore_index" not in inspect.signature(Categorical).parameters:
        pytest.skip("Categorical has no ignore_index")
    if package == "pytorch_lightning":
        torch.manual_seed(0)
        program(tmp_path)
    else:
        said = request.getfixturevalue("unified")
        assert f"ended well: {program.__name__}\n" in said, said[-3000:]
