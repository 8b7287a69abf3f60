"""Two processes (gloo) have the same draws and moments, one writes, and both resume exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_ranks_have_the_same_draws_and_moments_and_one_writes(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.callbacks.ddp_draws", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"seen{rank}.json").read_text()) for rank in (0, 1))
    assert first["whole"].pop("writes") == [False, False, True]
    assert second["whole"].pop("writes") == [False, False, False]
    for seen in (first, second):
        assert "Resume with ckpt_path=" in seen["refused"]  # on both: no rank is left waiting
        seen["resumed"].pop("writes")
        assert seen["whole"] == seen["resumed"] == first["whole"]
    assert first["whole"]["steps"] == [list(range(2, 25, 2))] * 3
    assert first["whole"]["snapshots"] == 4
    own, refreshed, streamed = first["whole"]["draws"]
    assert own != refreshed == streamed
