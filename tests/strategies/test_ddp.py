"""Two processes on one machine (gloo): one launch, many questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_bnn import BayesianLinear, VariationalBNN
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.priors import Normal
from tests.nets import loader, make_data
from tests.processes import read_ranks
from tests.trainers import quiet_trainer

FAMILIES = ["low_rank", "kronecker", "rank_one"]
FITS = ["weight", "flipout", "local", "draws", "accumulated", "ivon", *FAMILIES, "last_layer"]


@pytest.fixture(scope="module")
def ranks(ddp_results: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return read_ranks(ddp_results / "ddp_script")


@pytest.mark.parametrize("name", FITS)
def test_ranks_hold_identical_parameters(ranks: Any, name: str) -> None:
    """Also the running statistics' rank-0 values and the noise generators."""
    first, second = (weights[name] for weights, _ in ranks)
    for key in first:
        if "running" not in key:  # DDP hands rank 0's statistics out at the next forward pass
            assert torch.equal(first[key], second[key]), key
    assert all(found[f"{name}_steps"] == 20 for _, found in ranks)


def test_n_counts_all_ranks_data(ranks: Any) -> None:
    assert {found[f"{name}_num_data"] for _, found in ranks for name in FITS} == {48}
    assert all(found["subset_num_data"] == 20 for _, found in ranks)


def test_a_ranks_share_as_num_data_is_refused(ranks: Any) -> None:
    for _, found in ranks:
        assert "num_data=24 is the share of one of 2 ranks" in found["share"]
        assert "Pass num_data=48" in found["share"]


def test_metrics_count_every_example_once(ranks: Any) -> None:
    (weights, found), (_, other) = ranks
    assert found["test"] == other["test"]
    net = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3)
    )
    bnn = VariationalBNN(net, Categorical(), Normal(0.0, 1.0), predict_draws=4, bayesian="4.*")
    bnn.load_state_dict(
        {k: v for k, v in weights["tested"].items() if k != "generator"}, strict=False
    )
    data = make_data("mlp", "classification")
    (alone,) = quiet_trainer().test(bnn, loader(data), verbose=False)
    for name, value in alone.items():
        assert found["test"][name] == pytest.approx(value, abs=1e-5), name


def test_resume_is_bit_equal_on_every_rank(ranks: Any) -> None:
    assert all(found["resumed_equal"] for _, found in ranks)


def test_sums_over_ranks_are_those_of_all_data(ranks: Any) -> None:
    rows = make_data("mlp", "regression")
    alone = BayesianLinear(nn.Linear(4, rows.tensors[1].shape[1]), Gaussian(0.5), Normal())
    quiet_trainer(max_epochs=1).fit(alone, DataLoader(rows, batch_size=48))
    for weights, found in ranks:
        assert found["log_evidence"] == pytest.approx(alone.log_evidence(), rel=1e-6)
        for name in ("net.weight", "net.bias"):
            torch.testing.assert_close(weights["linear"][name], alone.state_dict()[name])


def test_the_bound_of_the_evidence_is_of_all_data(ranks: Any) -> None:
    (_, first), (_, second) = ranks
    assert first["bound"] == second["bound"]
    assert first["bound"][:2] == pytest.approx(first["bound_alone"][:2], rel=1e-5)
    assert first["bound"][2] == "ELBO"
