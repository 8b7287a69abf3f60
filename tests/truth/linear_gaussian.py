"""Samplers on a Gaussian posterior: one step is an affine map, and its stationary law is known.

With a gradient linear in the weights a step of a sampler is x ← F x + b + R ξ, where x holds the
weights and, after them, the velocities. The stationary covariance solves Σ = F Σ Fᵀ + R Rᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import BoundPrior, Normal
from lightning_bnn.random import member_seed
from lightning_bnn.samplers import Sampler
from lightning_bnn.target import Target
from tests.truth.linear_regression import LinearRegression

Make = Callable[..., Sampler]
Prepare = Callable[[Any], None]

CHAINS, COPIES = 256, 512


@dataclass
class AffineMap:
    """x ← F x + b + R ξ."""

    transition: np.ndarray
    offset: np.ndarray
    noise: np.ndarray

    @property
    def radius(self) -> float:
        """The spectral radius of F: below 1 for a stable step."""
        return float(np.abs(np.linalg.eigvals(self.transition)).max())

    def stationary_covariance(self) -> np.ndarray:
        """Of the whole state; the Lyapunov equation as one linear system."""
        assert self.radius < 1
        size = len(self.transition)
        system = np.eye(size**2) - np.kron(self.transition, self.transition)
        return np.linalg.solve(system, (self.noise @ self.noise.T).ravel()).reshape(size, size)

    def steps_to_forget(self, share: float = 0.01) -> int:
        """Steps after which that share of a start is left."""
        return math.ceil(math.log(share) / math.log(self.radius))


def nothing(sampler: Sampler) -> None:
    """Prepare nothing."""


def mean_energy(problem: LinearRegression, weight: Tensor) -> Tensor:
    """The mean energy of the regression, from the package's own target."""
    prior = BoundPrior(Normal(0.0, problem.prior_sd), problem.net(), {"weight": weight.detach()})
    target = Target(Gaussian(problem.noise_sd), prior.double(), num_data=len(problem.inputs))
    return target.mean_energy(weight, problem.inputs @ weight[:, None], problem.targets)


def probe(make: Make, problem: LinearRegression, prepare: Prepare = nothing) -> AffineMap:
    """The affine map of one step in float64, found by setting states and injecting noise.

    ``prepare`` sets what else a sampler holds (a metric, a thermostat), before each step.
    """
    size = problem.inputs.shape[1]
    weight = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    sampler = make([weight])
    injected = torch.zeros(size, dtype=torch.float64)
    sampler.noise = lambda group, weights, key="noise": [injected]
    one = _step(sampler, problem, weight, np.zeros(2 * size), prepare)
    momenta = "velocity" in sampler.state[weight]
    count = 2 * size if momenta else size

    def run(state: np.ndarray, noise: np.ndarray) -> np.ndarray:
        injected.copy_(torch.tensor(noise))
        return _step(sampler, problem, weight, state, prepare)[:count]

    zero, none = np.zeros(count), np.zeros(size)
    start = run(zero, none)
    assert np.array_equal(one[:count], start)  # nothing is left of an earlier step
    transition = np.stack([run(row, none) - start for row in np.eye(count)], axis=1)
    noise = np.stack([run(zero, row) - start for row in np.eye(size)], axis=1)
    return AffineMap(transition, start, noise)


def _step(
    sampler: Sampler,
    problem: LinearRegression,
    weight: Tensor,
    state: np.ndarray,
    prepare: Prepare,
) -> np.ndarray:
    size = len(weight)
    with torch.no_grad():
        weight.copy_(torch.tensor(state[:size]))
    if "velocity" in sampler.state[weight]:
        sampler.state[weight]["velocity"].copy_(torch.tensor(state[size:]))
    prepare(sampler)
    sampler.zero_grad()
    mean_energy(problem, weight).backward()
    sampler.step()
    velocity = sampler.state[weight].get("velocity", torch.zeros(size))
    return np.concatenate([weight.detach().numpy(), velocity.numpy()])


def sample(
    make: Make,
    problem: LinearRegression,
    steps: int,
    prepare: Prepare = nothing,
    copies: int = COPIES,
    snapshots: int = 1,
    thin: int = 1,
    gradient_noise: float = 0.0,
    root: int = 1,
) -> np.ndarray:
    """Weights of 256 stacked chains after ``steps`` steps of the full batch, (draws, d).

    Each chain holds ``copies`` copies of the problem side by side, which do not touch each other.
    They start together, one sd beside the posterior's mean, so that all spread is the sampler's.
    More ``snapshots`` are taken every ``thin`` steps. ``gradient_noise`` is the sd of noise added
    to each gradient, ``root`` the seed that the chains' seeds come from.
    """
    mean = torch.tensor(problem.mean, dtype=torch.float32)[:, None]
    curvature = torch.tensor(problem.precision / len(problem.inputs), dtype=torch.float32)
    sd = torch.tensor(np.diag(np.linalg.inv(problem.precision)) ** 0.5)[:, None].float()
    weights = (mean + sd).expand(CHAINS, -1, copies).clone().requires_grad_()
    weights.grad = torch.empty_like(weights)
    sampler = make([weights], seed=[member_seed(root, chain) for chain in range(CHAINS)])
    prepare(sampler)
    generator = torch.Generator().manual_seed(root + 1)
    kept = []
    for step in range(1, steps + thin * (snapshots - 1) + 1):
        torch.matmul(curvature, weights.detach() - mean, out=weights.grad)
        if gradient_noise:
            noise = torch.randn(weights.shape, generator=generator)
            weights.grad.add_(noise, alpha=gradient_noise)
        sampler.step()
        if step >= steps and (step - steps) % thin == 0:
            kept.append(weights.detach().transpose(1, 2).reshape(-1, len(mean)).double())
    return torch.cat(kept).numpy()


def check_covariance(draws: np.ndarray, covariance: np.ndarray, tolerance: float) -> None:
    """Every eigenvalue of the whitened covariance lies within 1 ± tolerance."""
    factor = np.linalg.cholesky(covariance)
    white = np.linalg.solve(factor, (draws - draws.mean(0)).T)
    eigenvalues = np.linalg.eigvalsh(white @ white.T / len(draws))
    assert eigenvalues[0] > 1 - tolerance, eigenvalues
    assert eigenvalues[-1] < 1 + tolerance, eigenvalues


def check_mean(draws: np.ndarray, problem: LinearRegression, tolerance: float) -> None:
    """Every mean lies within that many posterior sd of the truth."""
    sd = np.diag(np.linalg.inv(problem.precision)) ** 0.5
    deviation = np.abs(draws.mean(0) - problem.mean) / sd
    assert deviation.max() < tolerance, deviation
