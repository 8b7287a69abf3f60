"""The ten programs of ``tests/manners.py`` with either Lightning package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.manners import PROGRAMS
from tests.test_both_lightnings import run


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program(program: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    program(tmp_path)


def test_all_programs_with_the_unified_package(tmp_path: Path) -> None:
    """In one process and one test, for imports take longest."""
    done = run("-m", "tests.manners", "lightning.pytorch", str(tmp_path))
    said = done.stdout + done.stderr
    for program in PROGRAMS:
        assert f"ended well: {program.__name__}\n" in said, said[-3000:]
