"""A likelihood with heavier tails: Laplace noise of scale 1."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.likelihoods.base import single_columns
from lightning_bnn.mixtures import OrderedPredictive


class LaplacePredictive(OrderedPredictive):
    """A mixture of Laplace distributions about the outputs."""

    @property
    def _components(self) -> torch.distributions.Laplace:
        return torch.distributions.Laplace(self.float_outputs, 1.0, validate_args=False)

    @property
    def component_means(self) -> Tensor:
        return self._components.mean

    @property
    def component_variances(self) -> Tensor:
        return self._components.variance

    def component_log_density(self, values: Tensor) -> Tensor:
        return self._components.log_prob(values)

    def component_cdf(self, values: Tensor) -> Tensor:
        return self._components.cdf(values)


class Laplace(Likelihood):
    """Targets are the outputs plus Laplace noise."""

    predictive_type = LaplacePredictive

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        return single_columns(torch.ones_like(outputs))  # the Fisher information; −log p has a kink


CONTRACT = "likelihood", Laplace
