"""The leading eigenpairs of the curvature, against the whole matrix, in float64.

Nothing here is left to chance; the tolerance is 1e-8 where nothing else is said.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn import LaplacePosterior, laplace
from lightning_bnn.curvature.base import Processes
from lightning_bnn.curvature.full import Full
from lightning_bnn.curvature.linear import LinearisedNetwork
from lightning_bnn.curvature.low_rank import LowRank
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal

EXACT: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-10}
PRIOR = {"*.bias": Normal(0.0, 3.0), "*": Normal(0.5, 0.7)}


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


def loader(examples: int = 30) -> DataLoader[Any]:
    x = torch.randn(examples, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=4)


def covariance_of(posterior: LaplacePosterior) -> Tensor:
    half = posterior.covariance.project(torch.eye(31).double())
    return half @ half.T


def collect(curvature: Any, net: nn.Module, batches: Any) -> Any:
    linear = LinearisedNetwork(net, dict(net.named_parameters()), {})
    for x, y in batches:
        curvature.add(linear, x, Categorical().hessian_columns(linear.outputs(x), y))
    return curvature


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize(("examples", "rank"), [(30, None), (30, 31), (5, 15), (5, 10)])
@pytest.mark.parametrize("scales", ["given", "one", "per tensor"])
def test_it_is_the_whole_matrix_where_its_rank_suffices(
    examples: int, rank: int | None, scales: Any
) -> None:
    """Three classes have curvatures of rank 2, so 5 examples one of rank 10. What scales= finds is
    exact to the tolerance of its search."""
    found = laplace(make_net(), loader(examples), Categorical(), PRIOR, "low rank", scales=scales,
                    rank=rank)  # fmt: skip
    full = laplace(make_net(), loader(examples), Categorical(), PRIOR, "full", scales=scales)
    close = {"rtol": 1e-5, "atol": 1e-7} if scales != "given" else EXACT
    torch.testing.assert_close(covariance_of(found), covariance_of(full), **close)
    variance = found.covariance.variance()
    torch.testing.assert_close(variance, full.covariance.variance(), **close)
    assert found.log_evidence == pytest.approx(full.log_evidence, abs=1e-8)


@pytest.mark.filterwarnings("ignore:The . leading eigenpairs")
@pytest.mark.parametrize("rank", [1, 4, 8])
def test_what_is_left_out_and_woodbury_with_the_rest(rank: int) -> None:
    """H − FᵀF has no negative eigenvalue, F nearly the leading ones; the rest is dense algebra.

    How much of the R leading eigenvalues F has is no closed form: at least 85 % of their sum.
    """
    net = make_net()
    low = collect(LowRank(net, weights_of(net), rank), net, loader())
    full = collect(Full(net, weights_of(net)), net, loader())
    factor = low.factor()
    assert factor.shape == (rank, 31)
    torch.testing.assert_close(low.diagonal(), full.diagonal(), **EXACT)
    left = torch.linalg.eigvalsh(full.matrix - factor.T @ factor)
    assert left.min() > -1e-10
    leading = torch.linalg.eigvalsh(full.matrix)[-rank:].sum()
    assert 0.85 < factor.square().sum() / leading < 1 + 1e-12
    posterior = laplace(net, loader(), Categorical(), PRIOR, "low rank", rank=rank)
    precision = torch.cat(
        [torch.full((p.numel(),), 1 / 9 if "bias" in n else 1 / 0.49, dtype=torch.float64)
         for n, p in net.named_parameters()]
    )  # fmt: skip
    truth = factor.T @ factor + precision.diag()
    torch.testing.assert_close(covariance_of(posterior), torch.linalg.inv(truth), **EXACT)
    volume = torch.linalg.slogdet(truth)[1] - precision.log().sum()
    assert low.log_determinant([1 / 0.49, 1 / 9] * 2) == pytest.approx(float(volume), abs=1e-8)


def test_processes_stack_their_factors() -> None:
    """Two that have each half of the data, by what each gives the other, in turn."""
    net, batches = make_net(), list(loader())
    halves = [collect(LowRank(net, weights_of(net), 31), net, batches[i::2]) for i in range(2)]
    given = [(torch.zeros_like(half.factor()), half.factor().clone()) for half in halves]
    for index, half in enumerate(halves):
        answers = iter([*(part[1] for part in given), halves[1 - index].diagonal().clone()])

        def add_up(tensor: Tensor, answers: Any = answers) -> Tensor:
            other = next(answers)
            return other if other.dim() == 2 else tensor + other

        diagonal = sum(each.diagonal().clone() for each in halves)
        copied = LowRank(net, weights_of(net), 31)
        vars(copied).update({k: v.clone() if isinstance(v, Tensor) else v
                             for k, v in vars(half).items()})  # fmt: skip
        copied.add_up(Processes(2, index, add_up))
        truth = collect(Full(net, weights_of(net)), net, batches).matrix
        torch.testing.assert_close(copied.factor().T @ copied.factor(), truth, **EXACT)
        torch.testing.assert_close(copied.diagonal(), diagonal)


def test_a_rank_that_holds_little_is_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"1 leading eigenpairs hold 35% of the trace.*rank="):
        laplace(make_net(), loader(), Categorical(), structure="low rank", rank=1)
