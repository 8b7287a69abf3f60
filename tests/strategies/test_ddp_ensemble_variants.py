"""Variants of ensembles on two processes on one machine (gloo): one launch, many questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_bnn.ensembles.bootstrap import bootstrap_means, bootstrap_weights
from tests.nets import make_data
from tests.strategies.ddp_ensemble_variants_script import EPOCHS, FITS

EXAMPLES = 48


@pytest.fixture(scope="module")
def ranks(ddp_results: Path) -> list[dict[str, Any]]:
    """What each rank wrote."""
    directory = ddp_results / "ddp_ensemble_variants_script"
    return [torch.load(directory / f"found{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("name", FITS)
def test_ranks_hold_the_same(ranks: Any, name: str) -> None:
    first, second = (rank[name] for rank in ranks)
    for key, tensor in first["draws"].items():
        assert torch.equal(tensor, second["draws"][key]), key
    for key in ("seeds", "offsets", "extent"):
        assert torch.equal(first[key], second[key]), key


@pytest.mark.parametrize("name", ["shared", "own", "sampler"])
def test_weights_of_an_example_are_the_same_on_every_rank_and_in_every_epoch(
    ranks: Any, name: str
) -> None:
    seeds = ranks[0][name]["seeds"]
    whole = bootstrap_weights(seeds, torch.arange(EXAMPLES), bootstrap_means(seeds, EXAMPLES))
    times = torch.zeros(3, EXAMPLES)
    for rank in ranks:
        for indices, shares in zip(rank[name]["indices"], rank[name]["shares"], strict=True):
            own = indices.expand(3, indices.shape[-1])
            assert torch.equal(shares, whole.gather(1, own).float())
            times.scatter_add_(1, own, torch.ones(own.shape))
    # each example once an epoch
    assert torch.equal(times, torch.full((3, EXAMPLES), float(EPOCHS)))


def test_members_have_orders_of_their_own_on_each_rank(ranks: Any) -> None:
    for name in ("own", "sampler"):
        for rank in ranks:
            first = rank[name]["indices"][0]
            assert not torch.equal(first[0], first[1])


def test_range_of_the_inputs_is_that_of_all_ranks(ranks: Any) -> None:
    inputs = make_data("mlp", "regression").tensors[0]
    extent = inputs.amax(0) - inputs.amin(0)
    assert torch.equal(ranks[0]["shared"]["extent"], extent)
    assert torch.equal(ranks[1]["own"]["extent"], extent.expand(3, 4))


def test_resume_is_bit_equal(ranks: Any) -> None:
    for rank in ranks:
        for key, tensor in rank["fresh"].items():
            assert torch.equal(tensor, rank["resumed"][key]), key
