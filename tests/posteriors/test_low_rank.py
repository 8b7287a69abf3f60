"""The low-rank Gaussian: its covariance, one vector for all tensors, chunks, saving, refusals."""

import math

import pytest
import torch
from torch import nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.posteriors import LowRankPosterior
from tests.posteriors.common import generator, network


def parts(net, rank=5):
    mean = {name: torch.randn_like(p).detach() for name, p in net.named_parameters()}
    variance = {name: torch.rand_like(tensor) + 0.1 for name, tensor in mean.items()}
    deviations = {name: torch.randn(rank, *tensor.shape) for name, tensor in mean.items()}
    return mean, variance, deviations


def flat(tensors, lead):
    return torch.cat([tensor.reshape(*lead, -1) for tensor in tensors.values()], -1).double()


@pytest.mark.parametrize(("rank", "scale"), [(5, 0.3), (0, 2.0)])
def test_the_covariance_is_half_diagonal_and_half_low_rank(rank, scale):
    """All 34 · 35 / 2 covariances and 34 means of 20,000 draws, within 5 standard errors.

    An estimated covariance of Gaussians has the variance (C_ii C_jj + C_ij²) / n. A false alarm is
    one in 1,300 for the two cases (629 numbers each at 6e-7), and the seed is fixed.
    """
    net, count = network(), 20_000
    mean, variance, deviations = parts(net, rank)
    posterior = LowRankPosterior(
        net, Gaussian(0.3), mean, variance, deviations if rank else None, scale=scale
    )
    draws = flat(posterior.sample(count, generator()), (count,))
    exact = torch.diag(flat(posterior.variance, ()))
    if rank:
        columns = flat(posterior.deviations, (rank,))
        exact = exact / 2 + columns.T @ columns / (rank - 1) / 2
    exact = scale * exact
    diagonal = exact.diagonal()
    error = (torch.cov(draws.T) - exact) / ((diagonal.outer(diagonal) + exact**2) / count).sqrt()
    assert error.abs().max() < 5
    mean_error = (draws.mean(0) - flat(posterior.mean, ())) / (diagonal / count).sqrt()
    assert mean_error.abs().max() < 5


def test_one_vector_moves_all_tensors():
    """Without the diagonal part draws lie in the span of the deviations, all tensors together."""
    net = network()
    mean, variance, deviations = parts(net, 3)
    nothing = {name: 0 * tensor for name, tensor in variance.items()}
    posterior = LowRankPosterior(net, Gaussian(0.3), mean, nothing, deviations)
    moved = flat(posterior.sample(6, generator()), (6,)) - flat(posterior.mean, ())
    columns = flat(deviations, (3,))
    solution = torch.linalg.lstsq(columns.T, moved.T).solution
    torch.testing.assert_close(columns.T @ solution, moved.T, atol=1e-5, rtol=0)
    # the multipliers are those that every tensor has by itself
    one = columns[:, :3]
    alone = torch.linalg.lstsq(one.T, moved[:, :3].T).solution
    torch.testing.assert_close(alone, solution, atol=1e-4, rtol=1e-3)


def test_draws_need_no_more_memory_than_themselves():
    """The largest tensor that is made while drawing is the draws' own, whatever the rank."""
    net = nn.Linear(1000, 1, bias=False)
    deviations = {"weight": torch.randn(50, 1, 1000)}
    one = {"weight": torch.ones(1, 1000)}
    posterior = LowRankPosterior(net, Gaussian(0.3), one, one, deviations)
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            # views share memory that was counted when it was made
            if isinstance(result, torch.Tensor) and result._base is None:
                sizes.append(result.untyped_storage().nbytes() // 4)
            return result

    with Watch():
        next(posterior.draws(8, generator()))
    # the deviations themselves (50,000 numbers) were there before
    assert max(size for size in sizes if size != 50 * 1000) == 8 * 1000


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda m, v, d: (m, v | {"0.bias": -torch.ones(4)}, d), {}, "negative or NaN"),
        (lambda m, v, d: (m, v | {"0.bias": torch.ones(4) * torch.nan}, d), {}, "negative or NaN"),
        (lambda m, v, d: (m, v, {"0.bias": d["0.bias"]}), {}, r"got 5 of \['0.bias'\]"),
        (
            lambda m, v, d: (m, v, d | {"0.bias": torch.zeros(5, 3)}),
            {},
            r"deviations has '0.bias' in the shape \[3\]; the network has it in \[4\]",
        ),
        (lambda m, v, d: (m, v, {k: t[:1] for k, t in d.items()}), {}, "at least 2 .* got 1 of"),
        (lambda m, v, d: (m, v, d), {"scale": 0.0}, "scale= is a number greater than 0; got 0.0"),
        (lambda m, v, d: (m, v, d), {"scale": math.inf}, "scale= is a number .* got inf"),
    ],
)
def test_what_does_not_fit(change, options, message):
    net = network()
    with pytest.raises(ConfigurationError, match=message):
        LowRankPosterior(net, Gaussian(0.3), *change(*parts(net)), **options)
