"""Deep ensembles on two processes on one machine (gloo): one launch, many questions."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.utils.data import DataLoader

from tests.nets import make_data
from tests.processes import read_ranks
from tests.strategies.ddp_ensemble_script import FITS, STEPS, make
from tests.trainers import quiet_trainer


@pytest.fixture(scope="module")
def ranks(ddp_results: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return read_ranks(ddp_results / "ddp_ensemble_script")


@pytest.mark.parametrize("name", FITS)
def test_ranks_hold_identical_weights_after_20_steps(ranks: Any, name: str) -> None:
    (first, found), (second, other) = ((weights[name], found[name]) for weights, found in ranks)
    assert first.keys() == second.keys()
    for key in first:
        if "bank.buffer" not in key:  # DDP hands rank 0's statistics out at the next pass
            torch.testing.assert_close(first[key], second[key], rtol=0, atol=0, equal_nan=True)
    assert found == other
    assert (found["steps"], found["num_data"]) == (STEPS, 48)


def test_a_member_that_is_not_finite_on_one_rank_is_dropped_on_all(ranks: Any) -> None:
    for weights, found in ranks:
        assert found["dropped"]["alive"] == [True, False, True]
        assert weights["dropped"]["bank.weights"].isfinite().all()  # it was never stepped on a NaN
        assert found["plain"]["alive"] == [True] * 3


def test_two_ranks_step_as_one_process(ranks: Any) -> None:
    alone = make(bn=False, seed=1, optimizer=partial(SGD, lr=0.1))
    data = make_data("mlp", "classification")
    quiet_trainer(max_steps=3, max_epochs=-1).fit(alone, DataLoader(data, batch_size=48))
    for weights, _ in ranks:
        found = weights["halves"]["bank.weights"]
        torch.testing.assert_close(found, alone.weights.detach(), rtol=1e-4, atol=1e-6)


def test_snapshots_are_the_same_on_both_ranks_and_after_a_resume(ranks: Any) -> None:
    (first, _), (second, _) = ranks
    assert len(first["fresh"]["0.weight"]) == 2 * 3
    for name, tensor in first["fresh"].items():
        assert torch.equal(tensor, second["fresh"][name]), name
        assert torch.equal(tensor, first["resumed"][name]), name
        assert torch.equal(tensor, second["resumed"][name]), name
