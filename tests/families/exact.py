"""The best member of a Gaussian family on linear regression, found without any noise.

The energy of a linear model is quadratic and a draw is linear in its noise, so the average over the
2n points ±√n eᵢ, whose mean is 0 and whose covariance is I, *is* the expectation. The loss of a
strategy that draws them in turn is the exact negative ELBO over N, and has a minimum to find to
many digits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import VariationalBNN
from lightning_bnn.families import Family
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import LowRankPosterior
from lightning_bnn.priors import Normal
from tests.truth.linear_regression import LinearRegression


class SigmaPoints:
    """Stands in for a stream of normal numbers."""

    def __init__(self) -> None:
        self.count = 0

    def fill_(self, tensor: Tensor) -> Tensor:
        place, sign = divmod(self.count % (2 * len(tensor)), 2)
        self.count += 1
        tensor.zero_()[place] = (1 - 2 * sign) * len(tensor) ** 0.5
        return tensor


def exact(
    problem: LinearRegression, family: Family, net: nn.Module | None = None, prior: Any = None
) -> Any:
    """A strategy whose loss is the exact bound."""
    bnn = VariationalBNN(
        problem.net() if net is None else net,
        Gaussian(problem.noise_sd),
        Normal(0.0, problem.prior_sd) if prior is None else prior,
        num_data=len(problem.inputs),
        family=family,
        initial_scale=0.1,
    )
    bnn.train_draws = 2 * bnn.family.noise_size
    bnn.noise.stream = SigmaPoints()  # type: ignore[assignment]
    return bnn


def best_elbo(bnn: Any, batch: tuple[Tensor, Tensor], steps: int = 400) -> float:
    """The ELBO in nats where L-BFGS cannot raise it any more."""
    parameters = [parameter for parameter in bnn.parameters() if parameter.requires_grad]
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in parameters:  # away from where a slope is zero by symmetry
            parameter.add_(0.1 * torch.randn_like(parameter))
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=steps, tolerance_grad=1e-9, tolerance_change=0,
        history_size=50, line_search_fn="strong_wolfe",
    )  # fmt: skip

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = bnn.loss(batch)
        loss.backward()
        return loss

    optimizer.step(closure)
    return -bnn.loss(batch).item() * len(batch[0])


def covariance(posterior: LowRankPosterior) -> Tensor:
    """The covariance of all weights, from what the posterior is made of."""
    flat = torch.cat([value.flatten() for value in posterior.variance.values()])
    columns = torch.cat([value.flatten(1) for value in posterior.deviations.values()], 1)
    return (torch.diag(flat) + columns.T @ columns / (len(columns) - 1)) / 2
