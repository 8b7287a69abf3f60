"""``kill -9`` at random moments of a sampling run: after resuming, every draw is the same."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.processes import run_script


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kills", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_runs_lose_no_draw_and_change_none(kills: int, tmp_path: Path) -> None:
    printed = run_script("tests.strategies.kill_script", tmp_path, kills, 5, timeout=600)
    found = json.loads(printed.splitlines()[-1])
    assert found["kills"] == kills
    reference = found["draws"].pop("reference")
    assert len(reference) == len(set(reference)) > 30
    for name, draws in found["draws"].items():
        assert draws == reference, name
    # the moments were spread: most after a checkpoint, some after draws that it does not know
    assert found["from_checkpoint"] >= kills // 4
    assert found["after_checkpoint"] >= 1
