"""Two processes (gloo) prune the same weights, and go on from a checkpoint as if never stopped."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.callbacks.ddp_snr_pruning import KINDS
from tests.processes import run_script


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes saw."""
    directory = tmp_path_factory.mktemp("ddp")
    run_script("tests.callbacks.ddp_snr_pruning", directory)
    return [json.loads((directory / f"found{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_both_processes_prune_the_same(found: Any, kind: str) -> None:
    first, second = (one[kind]["whole"] for one in found)
    assert first == second  # means, scales and masks to the last bit
    assert first["steps"] == 24
    assert [one["step"] for one in first["history"]] == [14, 19, 21]
    total = 4 * 12 + 12 * 3
    removed = first["history"][-1]["removed"]
    assert removed == (total // 2 if kind == "weight" else 6 * 4)
    assert first["sparsity"] == removed / total == pytest.approx(first["logged"])
    assert len(first["zeros"]) >= 3
    assert all(first["zeros"])


@pytest.mark.parametrize("kind", KINDS)
def test_both_processes_go_on_from_a_checkpoint(found: Any, kind: str) -> None:
    for one in found:
        assert one[kind]["resumed"] == one[kind]["whole"]
