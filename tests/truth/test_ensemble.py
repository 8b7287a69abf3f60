"""Randomised MAP through ``Trainer.fit`` on linear regression: members are draws of the posterior.

4,000 members of Bayesian linear regression (d = 5, all of 8 examples in each step, so few that the
prior counts) are trained to the minimum. With anchors and targets perturbed their covariance Σ is
A⁻¹: every eigenvalue of A^{1/2} Σ A^{1/2} must lie within 0.89 and 1.11, and the mean within 4.5
standard errors. Of 200,000 simulated sets of 4,000 exact draws (Wishart's distribution, with edges
at (1 ± √(5/4000))² = 0.93 and 1.07) 163 had an eigenvalue outside of these bounds: over other seeds
a false alarm has a probability of 0.08 %, for the mean 0.003 %. The seeds here are fixed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightning_bnn import DeepEnsemble
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import Normal
from lightning_bnn.strategies import ensemble as variants
from tests.trainers import quiet_trainer
from tests.truth.linear_regression import LinearRegression, full_batches

MEMBERS, STEPS = 4000, 60
PROBLEM = LinearRegression.make(examples=8)


def heavy_ball() -> Any:
    """Gradient descent with the step and momentum that suit the curvature of the mean energy."""
    low, *_, high = np.sqrt(np.linalg.eigvalsh(PROBLEM.precision) / len(PROBLEM.inputs))
    return partial(SGD, lr=4 / (high + low) ** 2, momentum=((high - low) / (high + low)) ** 2)


def members_of(randomise: Any) -> np.ndarray:
    """The weights of all members after a fit, (M, d)."""
    net = PROBLEM.net()
    ensemble = DeepEnsemble(
        net, Gaussian(PROBLEM.noise_sd), Normal(0.0, PROBLEM.prior_sd), members=MEMBERS,
        start=[net] * MEMBERS, optimizer=heavy_ball(), randomise=randomise,
        mode="stacked", seed=11,
    )  # fmt: skip
    trainer = quiet_trainer(max_steps=STEPS, max_epochs=-1)
    trainer.fit(ensemble, full_batches(PROBLEM.inputs, PROBLEM.targets, epoch=STEPS))
    weights: Tensor = ensemble.current_draws()["weight"]
    return weights[:, 0].numpy()


def check(members: np.ndarray, covariance: np.ndarray) -> None:
    """Mean and covariance of the members are the posterior mean and the one given."""
    root = np.linalg.inv(np.linalg.cholesky(covariance))
    ratios = np.linalg.eigvalsh(root @ np.cov(members.T) @ root.T)
    assert ratios.min() > 0.89, ratios
    assert ratios.max() < 1.11, ratios
    errors = root @ (members.mean(0) - PROBLEM.mean) * np.sqrt(len(members))
    assert np.abs(errors).max() < 4.5, errors


POSTERIOR = np.linalg.inv(PROBLEM.precision)
ANCHORS_ALONE = POSTERIOR @ POSTERIOR / PROBLEM.prior_sd**2


def test_targets_and_anchors_give_draws_of_the_posterior() -> None:
    members = members_of("targets and anchors")
    check(members, POSTERIOR)
    with pytest.raises(AssertionError):
        check(members, ANCHORS_ALONE)


def test_anchors_alone_have_too_little_spread() -> None:
    members = members_of("anchors")
    check(members, ANCHORS_ALONE)
    with pytest.raises(AssertionError):
        check(members, POSTERIOR)
    assert np.all(members.std(0) < 0.9 * np.sqrt(np.diag(POSTERIOR)))


def test_without_either_members_agree() -> None:
    members = members_of(None)
    assert np.abs(members - PROBLEM.mean).max() < 1e-4


def too_much_noise(scale: Any, targets: Tensor, seeds: Tensor, indices: Tensor) -> Tensor:
    plain = targets.expand(len(seeds), *targets.shape)
    noisy = NOISY_TARGETS(scale, targets, seeds, indices)
    return plain + (noisy - plain) * 2**0.5


def other_noise_each_step(scale: Any, targets: Tensor, seeds: Tensor, indices: Tensor) -> Any:
    return NOISY_TARGETS(scale, targets, torch.randint(2**62, seeds.shape), indices)


def without_noise(scale: Any, targets: Tensor, seeds: Tensor, indices: Tensor) -> Tensor:
    return targets.expand(len(seeds), *targets.shape)


def noise_of_one_member(scale: Any, targets: Tensor, seeds: Tensor, indices: Tensor) -> Any:
    return NOISY_TARGETS(scale, targets, seeds[:1].expand_as(seeds), indices)


def without_anchors(prior: Any, seeds: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like)


NOISY_TARGETS = variants.noisy_targets


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("noisy_targets", too_much_noise),
        ("noisy_targets", other_noise_each_step),
        ("noisy_targets", without_noise),
        ("noisy_targets", noise_of_one_member),
        ("draw_offsets", without_anchors),
    ],
)
def test_seeded_bugs_are_caught(name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, name, bug)
    with pytest.raises(AssertionError):
        check(members_of("targets and anchors"), POSTERIOR)
