"""The curvature of two processes (gloo) is the one that a single process takes of all data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import BayesianLinear, laplace
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal
from tests.nets import make_data, mlp
from tests.processes import read_ranks
from tests.strategies.ddp_laplace_script import FITS
from tests.trainers import quiet_trainer


@pytest.fixture(scope="module")
def ranks(ddp_results: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return read_ranks(ddp_results / "ddp_laplace_script")


@pytest.mark.parametrize("name", FITS)
def test_the_curvature_is_that_of_all_data(ranks: Any, name: str) -> None:
    (first, found), (second, other) = ((weights[name], found[name]) for weights, found in ranks)
    assert found == other
    assert found["num_data"] == 48
    for key in first:
        assert torch.equal(first[key], second[key]), key
    net = mlp(3)
    sizes = [p.numel() for p in net.parameters()]
    with torch.no_grad():
        for p, value in zip(net.parameters(), first["bank.weights"][0].split(sizes), strict=True):
            p.copy_(value.view(p.shape))
    data = make_data("mlp", "classification")
    alone = laplace(net, DataLoader(data, batch_size=48), Categorical(), Normal(0.0, 1.0), name)
    assert found["evidence"] == pytest.approx(alone.log_evidence, rel=1e-5)
    variance = type(alone.covariance)(
        alone.covariance.layout,
        {k: first[f"covariance.{k}"] for k in alone.covariance.tensors},
    ).variance()
    torch.testing.assert_close(variance, alone.covariance.variance(), rtol=1e-4, atol=1e-7)


def test_linear_regression_sees_each_of_an_odd_number_of_examples_once(ranks: Any) -> None:
    inputs, targets = (tensor[:47] for tensor in make_data("mlp", "regression").tensors)
    alone = BayesianLinear(nn.Linear(4, 2))
    quiet_trainer(max_epochs=1).fit(alone, DataLoader(TensorDataset(inputs, targets), 47))
    for _, found in ranks:
        assert found["linear"]["evidence"] == pytest.approx(alone.log_evidence(), abs=1e-6)


def test_the_scale_is_that_of_all_validation_data(ranks: Any) -> None:
    """Each process has half of them; one that has all finds a scale with the same NLL, to 1e-4."""
    (first, found), (second, other) = ranks
    assert found["validation"] == other["validation"]
    for key, tensor in first["validation"].items():
        assert torch.equal(tensor, second["validation"][key]), key
    [precision] = set(found["validation"]["precisions"].values())
    net = mlp(3)
    sizes = [p.numel() for p in net.parameters()]
    with torch.no_grad():
        mode = first["validation"]["bank.weights"][0].split(sizes)
        for p, value in zip(net.parameters(), mode, strict=True):
            p.copy_(value.view(p.shape))
    loader = DataLoader(make_data("mlp", "classification"), batch_size=48)
    nll = []
    for prior, scales in ((Normal(0.0, 1.0), "validation"), (Normal(0, precision**-0.5), "given")):
        validation = loader if scales == "validation" else None
        posterior = laplace(net, loader, Categorical(), prior, "low rank", scales=scales,
                            validation=validation)  # fmt: skip
        ((inputs, targets),) = loader
        nll.append(-float(posterior.predict(inputs).log_prob(targets).mean()))
    assert nll[0] == pytest.approx(nll[1], abs=1e-4)
