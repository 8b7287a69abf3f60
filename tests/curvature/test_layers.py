"""Gradients layer by layer: what the first axis of a layer is, and weights that are used twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_bnn import laplace
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.priors import Normal


class TimeFirst(nn.Module):
    """Layers see (time, batch, features), as recurrent networks and transformers do by default."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs.transpose(0, 1)).tanh()
        return self.last(hidden).mean(0)


class TimeInBatch(TimeFirst):
    """Layers see all times of all examples as a longer batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.flatten(0, 1)).tanh()
        return self.last(hidden).unflatten(0, inputs.shape[:2]).mean(1)


@pytest.mark.parametrize("structure", ["full", "diagonal", "kron", "low rank"])
@pytest.mark.parametrize("kind", [TimeFirst, TimeInBatch])
@pytest.mark.parametrize("examples", [5, 9], ids=["as many as times", "more"])
def test_layers_may_see_another_first_axis_than_that_of_the_examples(
    kind: type[nn.Module], examples: int, structure: Any
) -> None:
    """Covariances of weights and of outputs are those of dense Jacobians, to rounding."""
    torch.manual_seed(0)
    net, inputs = kind().double().eval(), torch.randn(examples, 5, 3, dtype=torch.float64)
    data = [(inputs, torch.randn(examples, 2, dtype=torch.float64))]
    posterior = laplace(net, data, Gaussian(0.5), Normal(), structure)

    def run(weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(net, weights, (inputs,))

    jacobian = torch.func.jacrev(run)({k: w.detach() for k, w in net.named_parameters()})
    rows = torch.cat([each.flatten(2) for each in jacobian.values()], 2)
    covariance = posterior.covariance_matrix()
    curvature = torch.einsum("bfp,bfq->pq", rows, rows) / 0.5**2
    if structure == "diagonal":
        curvature = curvature.diagonal().diag()
    if structure != "kron":
        expected = torch.linalg.inv(curvature + torch.eye(len(curvature), dtype=torch.float64))
        torch.testing.assert_close(covariance, expected, rtol=1e-8, atol=1e-10)
    root = posterior.output_gaussian(inputs)[1]
    torch.testing.assert_close(root @ root.mT, rows @ covariance @ rows.mT, rtol=1e-6, atol=1e-9)


class TwiceUnderSoftmax(TimeFirst):
    """The first weights are used once more, and the outputs of each example sum to 1."""

    def forward(self, inputs: Tensor) -> Tensor:
        again = nn.functional.linear(inputs, self.first.weight).sum(1, keepdim=True)
        hidden: Tensor = self.first(inputs).tanh()
        return (self.last(hidden) * again).softmax(1)


def test_a_weight_that_is_used_twice_is_seen_though_a_sum_of_outputs_is_constant() -> None:
    torch.manual_seed(0)
    data = [(torch.randn(6, 3), torch.arange(6) % 2)]
    with pytest.raises(ConfigurationError, match="'first' has weights that are used in another"):
        laplace(TwiceUnderSoftmax(), data, Categorical())
