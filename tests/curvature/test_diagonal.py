"""The diagonal that is made layer by layer, against the dense Gauss-Newton matrix, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_bnn import laplace
from lightning_bnn.curvature import collect, diagonal
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal
from tests.curvature.test_outputs import INPUTS, NETWORKS, make

TARGETS = torch.arange(7) % 3


@pytest.mark.parametrize("numbers", [2**25, 1])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_the_diagonal_of_the_dense_matrix(
    name: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one place and at several, whatever is held at a time, to rounding."""
    net: nn.Module = make(name)
    monkeypatch.setattr(diagonal, "_NUMBERS", numbers)
    data = [(INPUTS[:3], TARGETS[:3]), (INPUTS[3:], TARGETS[3:])]
    found = laplace(net, data, Categorical(), Normal(), "diagonal").covariance.variance()
    weights = {key: p.detach() for key, p in net.named_parameters()}
    total = torch.zeros_like(found)
    for x in INPUTS.split(1):

        def run(weights: dict[str, torch.Tensor], x: torch.Tensor = x) -> torch.Tensor:
            return torch.func.functional_call(net, weights, (x,))[0]

        jacobian = torch.func.jacrev(run)(weights)
        rows = torch.cat([each.flatten(1) for each in jacobian.values()], 1)
        p = run(weights).softmax(0).detach()
        total += ((p.diag() - p.outer(p)) @ rows).mul(rows).sum(0).detach()
    torch.testing.assert_close(found, 1 / (total + 1), rtol=1e-9, atol=1e-12)
    curvature, _ = collect(net, weights, {}, Categorical(), "full", data)
    torch.testing.assert_close(curvature.diagonal(), total, rtol=1e-9, atol=1e-12)
