"""Dropout on two processes of one machine (gloo)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import read_ranks
from tests.strategies.ddp_dropout_script import KINDS


@pytest.fixture(scope="module")
def ranks(ddp_results: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return read_ranks(ddp_results / "ddp_dropout_script")


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_hold_identical_parameters_but_see_other_masks(ranks: Any, kind: str) -> None:
    (first, found), (second, other) = ranks
    for key in first[kind]:  # and the streams of noise
        assert torch.equal(first[kind][key], second[kind][key]), key
    assert found[f"{kind}_next"] != other[f"{kind}_next"]
    assert found[f"{kind}_num_data"] == other[f"{kind}_num_data"] == 48


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_bit_equal_on_every_rank(ranks: Any, kind: str) -> None:
    for _, found in ranks:
        assert found[f"{kind}_resumed"]
        assert found[f"{kind}_next"][0] == found[f"{kind}_next"][1]
