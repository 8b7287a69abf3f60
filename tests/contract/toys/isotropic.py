"""A family with one standard deviation for all weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_bnn.families import Family
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import GaussianPosterior
from lightning_bnn.priors import BoundPrior


class Isotropic(Family):
    """N(μ, s² I) over all Bayesian weights."""

    def setup(self, flat: Tensor, initial_scale: float) -> None:
        self.mean = nn.Parameter(flat.clone())
        self.log_sd = nn.Parameter(flat.new_tensor(math.log(initial_scale)))

    def rsample(self, noise: Tensor) -> Tensor:
        return self.mean + self.log_sd.exp() * noise

    def kl(self, draw: Tensor, prior: BoundPrior) -> Tensor:
        sd = self.log_sd.exp().expand_as(self.mean)
        entropy = sd.numel() * (self.log_sd + 0.5 * math.log(2 * math.pi * math.e))
        return prior.expected_energy(self.mean, sd, draw) - entropy

    def posterior(
        self, net: nn.Module, likelihood: Likelihood, fixed: Mapping[str, Tensor]
    ) -> GaussianPosterior:
        mean = self.mean.detach()
        sd = torch.full_like(mean, self.log_sd.detach().exp().item())
        views = self.layout.views
        return GaussianPosterior(net, likelihood, views(mean), views(sd), fixed)


CONTRACT = "family", Isotropic
