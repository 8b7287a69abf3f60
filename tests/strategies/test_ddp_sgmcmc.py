"""SG-MCMC on two processes on one machine (gloo): one launch, many questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import read_ranks
from tests.strategies.ddp_sgmcmc_script import FITS


@pytest.fixture(scope="module")
def ranks(ddp_results: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return read_ranks(ddp_results / "ddp_sgmcmc_script")


@pytest.mark.parametrize("name", FITS)
def test_ranks_hold_identical_weights_after_50_steps(ranks: Any, name: str) -> None:
    first, second = (weights[name] for weights, _ in ranks)
    assert first.keys() == second.keys()
    for key in first:
        if "buffer" not in key:  # DDP hands rank 0's statistics out at the next forward pass
            assert torch.equal(first[key], second[key]), key
    assert all(found[f"{name}_steps"] == 50 for _, found in ranks)
    assert all(found[f"{name}_num_data"] == 48 for _, found in ranks)


def test_both_ranks_read_the_same_draws_and_a_resume_gives_them_again(ranks: Any) -> None:
    (first, _), (second, _) = ranks
    assert len(first["fresh"]["0.weight"]) == 2 * 6
    for name, tensor in first["fresh"].items():
        assert torch.equal(tensor, second["fresh"][name])
        assert torch.equal(tensor, first["resumed"][name])
        assert torch.equal(tensor, second["resumed"][name])
