"""Two processes (gloo) have the same draws and moments, one writes, and both resume exactly."""

from __future__ import annotations

import json
from pathlib import Path

from tests.processes import run_script


def test_two_ranks_have_the_same_draws_and_moments_and_one_writes(tmp_path: Path) -> None:
    run_script("tests.callbacks.ddp_draws", tmp_path)
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
