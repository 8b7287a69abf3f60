"""Bayesian linear regression: the target whose posterior is known in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def full_batches(*tensors: Tensor, epoch: int = 200) -> DataLoader:
    """All examples in each batch, so many batches an epoch: an epoch of one is slow."""
    everything = [list(range(len(tensors[0])))]
    return DataLoader(TensorDataset(*tensors), batch_sampler=everything * epoch)


@dataclass
class LinearRegression:
    """y = X w + noise, w ~ N(0, prior_sd²): everything about its posterior, in float64."""

    inputs: Tensor
    targets: Tensor
    noise_sd: float
    prior_sd: float

    @classmethod
    def make(cls, examples: int = 120, features: int = 5, seed: int = 3) -> LinearRegression:
        random = np.random.default_rng(seed)
        # neighbours correlate by 0.5: enough to tell mean field from the truth
        distance = np.abs(np.subtract.outer(np.arange(features), np.arange(features)))
        root = np.linalg.cholesky(0.5**distance)
        inputs = random.normal(size=(examples, features)) @ root.T
        weights = random.normal(size=features)
        noise_sd, prior_sd = 0.7, 0.9
        targets = inputs @ weights + noise_sd * random.normal(size=examples)
        return cls(torch.tensor(inputs), torch.tensor(targets)[:, None], noise_sd, prior_sd)

    @property
    def precision(self) -> np.ndarray:
        """A, the precision of the posterior."""
        x = self.inputs.numpy()
        return x.T @ x / self.noise_sd**2 + np.eye(x.shape[1]) / self.prior_sd**2

    @property
    def mean(self) -> np.ndarray:
        x, y = self.inputs.numpy(), self.targets.numpy()[:, 0]
        return np.linalg.solve(self.precision, x.T @ y / self.noise_sd**2)

    @property
    def log_evidence(self) -> float:
        """log p(y), from the marginal N(0, σ²I + s²XXᵀ)."""
        x, y = self.inputs.numpy(), self.targets.numpy()[:, 0]
        covariance = self.noise_sd**2 * np.eye(len(y)) + self.prior_sd**2 * x @ x.T
        _, log_determinant = np.linalg.slogdet(2 * np.pi * covariance)
        return float(-0.5 * (log_determinant + y @ np.linalg.solve(covariance, y)))

    def elbo(self, mean: np.ndarray, sd: np.ndarray) -> float:
        """The exact ELBO of a mean-field Gaussian, by NumPy alone."""
        x, y = self.inputs.numpy(), self.targets.numpy()[:, 0]
        residual = ((y - x @ mean) ** 2).sum() + (x**2 @ sd**2).sum()
        count = len(y)
        fit = -0.5 * residual / self.noise_sd**2
        fit -= count * np.log(self.noise_sd) + 0.5 * count * np.log(2 * np.pi)
        ratio = (mean**2 + sd**2) / self.prior_sd**2
        divergence = 0.5 * (ratio - 1 - np.log(sd**2 / self.prior_sd**2)).sum()
        return float(fit - divergence)

    def net(self, copies: int = 1) -> nn.Module:
        """A linear layer without bias, in float64; each output is one copy of the problem."""
        return nn.Linear(self.inputs.shape[1], copies, bias=False, dtype=torch.float64)
