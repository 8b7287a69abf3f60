"""Bayesian bootstrap weights: N·Dirichlet(1, …, 1), whoever asks, whenever.

Seeds are fixed; bounds are 4.5 standard errors (about 7 in a million by chance, each).
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_bnn import DeepEnsemble
from lightning_bnn.ensembles.bootstrap import bootstrap_means, bootstrap_weights
from lightning_bnn.ensembles.randomise import noisy_targets
from lightning_bnn.likelihoods import Categorical
from tests.nets import make_data
from tests.trainers import quiet_trainer

MEMBERS, EXAMPLES = 50, 4000
SEEDS = torch.arange(100, 100 + MEMBERS)


@pytest.fixture(scope="module")
def weights() -> torch.Tensor:
    return bootstrap_weights(SEEDS, torch.arange(EXAMPLES), bootstrap_means(SEEDS, EXAMPLES))


def test_mean_is_one_for_each_member(weights: torch.Tensor) -> None:
    assert torch.allclose(weights.mean(1), torch.ones(MEMBERS).double(), rtol=1e-12)


def test_variance_is_one(weights: torch.Tensor) -> None:
    """That of Exp(1) has a standard error of √(8/n): its fourth central moment is 9."""
    error = math.sqrt(8 / weights.numel())
    assert abs(weights.var().item() - 1) < 4.5 * error
    for row in weights:
        assert abs(row.var().item() - 1) < 4.5 * math.sqrt(8 / EXAMPLES)


def test_mean_over_members_is_one_for_each_example(weights: torch.Tensor) -> None:
    """Its standard error is √(1/M); of 4,000 the largest is above 4.5 of them in 5 % of seeds."""
    means = weights.mean(0)
    assert (means - 1).abs().max() < 6 / math.sqrt(MEMBERS)
    spread = means.var().item() * MEMBERS
    assert abs(spread - 1) < 4.5 * math.sqrt((2 + 6 / MEMBERS) / EXAMPLES)


def test_distribution_is_exponential(weights: torch.Tensor) -> None:
    assert stats.kstest(weights.flatten().numpy(), "expon").pvalue > 7e-6


def test_members_and_examples_are_uncorrelated(weights: torch.Tensor) -> None:
    between = torch.corrcoef(weights)
    off = between[~torch.eye(MEMBERS, dtype=torch.bool)]
    assert off.abs().max() < 5.5 / math.sqrt(EXAMPLES)  # the largest of 1,225
    neighbours = torch.corrcoef(torch.stack([weights[:, :-1].flatten(), weights[:, 1:].flatten()]))[
        0, 1
    ]
    assert abs(neighbours) < 4.5 / math.sqrt(weights.numel())


def test_a_few_examples_are_dirichlet() -> None:
    """With N = 3 a weight is 3·Beta(1, 2), far from exponential."""
    seeds = torch.arange(20_000)
    weights = bootstrap_weights(seeds, torch.arange(3), bootstrap_means(seeds, 3))
    assert stats.kstest((weights[:, 1] / 3).numpy(), stats.beta(1, 2).cdf).pvalue > 7e-6
    assert stats.kstest((weights[:, 1] / 3).numpy(), "expon").pvalue < 1e-10


def test_weights_belong_to_member_and_example(weights: torch.Tensor) -> None:
    order = torch.randperm(EXAMPLES)[:64]
    means = bootstrap_means(SEEDS, EXAMPLES)
    assert torch.equal(bootstrap_weights(SEEDS, order, means), weights[:, order])
    alone = SEEDS[7:8]
    found = bootstrap_weights(alone, order, bootstrap_means(alone, EXAMPLES))
    assert torch.allclose(found, weights[7:8, order], rtol=1e-14)


def test_chunks_do_not_matter() -> None:
    whole = bootstrap_means(SEEDS, 1000)
    for chunk in (1, 999, 10**6):
        assert torch.allclose(bootstrap_means(SEEDS, 1000, chunk), whole, rtol=1e-13)


def test_mean_is_one_over_a_part_of_the_data() -> None:
    part = torch.randperm(EXAMPLES)[:700]
    means = bootstrap_means(SEEDS, part, chunk=10_000)
    found = bootstrap_weights(SEEDS, part, means)
    assert torch.allclose(found.mean(1), torch.ones(MEMBERS).double(), rtol=1e-12)


def test_a_fit_with_a_sampler_of_a_part_has_mean_one_over_it() -> None:
    ensemble = DeepEnsemble(
        lambda: nn.Linear(4, 3), Categorical(), members=3, seed=0, bootstrap=True, mode="stacked"
    )
    part = torch.arange(3, 33)
    sampler = SubsetRandomSampler(part.tolist())
    rows = DataLoader(make_data("mlp", "classification"), batch_size=10, sampler=sampler)
    quiet_trainer(max_epochs=2).fit(ensemble, rows)
    assert ensemble.target.num_data == 30
    shares = ensemble._counts(slice(0, 3), part)
    torch.testing.assert_close(shares.mean(1), torch.ones(3))
    other = DataLoader(make_data("mlp", "classification"), batch_size=10)
    quiet_trainer(max_epochs=1).fit(ensemble, other)
    shares = ensemble._counts(slice(0, 3), torch.arange(48))
    torch.testing.assert_close(shares.mean(1), torch.ones(3))


def test_they_are_not_those_of_the_noise_of_targets(weights: torch.Tensor) -> None:
    """One uniform number behind both would give a weight and the size of a noise one order."""
    targets = torch.zeros(EXAMPLES, 1, dtype=torch.float64)
    noise = noisy_targets(1.0, targets, SEEDS, torch.arange(EXAMPLES))
    pair = torch.stack([weights.flatten(), noise.flatten().abs()])
    assert torch.corrcoef(pair)[0, 1].abs() < 4.5 / math.sqrt(weights.numel())
