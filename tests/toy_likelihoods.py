"""Likelihoods as a user would write them: everything but their components is inherited."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.mixtures import ClassPredictive, OrderedPredictive


class LogisticPredictive(OrderedPredictive):
    """A mixture of logistic distributions of scale 1 about the outputs."""

    @property
    def component_means(self) -> Tensor:
        return self.float_outputs

    @property
    def component_variances(self) -> Tensor:
        return torch.full_like(self.float_outputs, torch.pi**2 / 3)

    def component_log_density(self, values: Tensor) -> Tensor:
        z = values - self.float_outputs
        return torch.nn.functional.logsigmoid(z) + torch.nn.functional.logsigmoid(-z)

    def component_cdf(self, values: Tensor) -> Tensor:
        return torch.sigmoid(values - self.float_outputs)


class Logistic(Likelihood):
    predictive_type = LogisticPredictive


class GeometricPredictive(OrderedPredictive):
    """A mixture over failures before a success of probability p, from the logits of p."""

    discrete = True

    @cached_property
    def p(self) -> Tensor:
        return self.float_outputs.sigmoid()

    @property
    def component_means(self) -> Tensor:
        return (1 - self.p) / self.p

    @property
    def component_variances(self) -> Tensor:
        return (1 - self.p) / self.p.square()

    def component_log_density(self, values: Tensor) -> Tensor:
        return self.p.log() + values * torch.log1p(-self.p)

    def component_cdf(self, values: Tensor) -> Tensor:
        return torch.where(values < 0, 0.0, 1 - (1 - self.p) ** (values.floor() + 1))


class Geometric(Likelihood):
    predictive_type = GeometricPredictive


class OrdinalPredictive(ClassPredictive):
    """Three ordered classes, cut from a logistic distribution about each output at -1 and 1."""

    @cached_property
    def component_log_probabilities(self) -> Tensor:
        below = torch.sigmoid(torch.tensor([-1.0, 1.0]) - self.float_outputs[..., None])
        ends = below.new_zeros(*below.shape[:-1], 1)
        return torch.cat([ends, below, ends + 1], -1).diff(dim=-1).log()


class Ordinal(Likelihood):
    predictive_type = OrdinalPredictive
