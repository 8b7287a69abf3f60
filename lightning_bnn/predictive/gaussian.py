r"""The predictive of a regression: a mixture of Gaussians.

Each draw says :math:`N(\mu_s, \sigma_s^2)`. By the law of total variance

.. math:: \mathrm{Var}[y] = \underbrace{\tfrac1S \sum_s \sigma_s^2}_{\text{aleatoric}}
          + \underbrace{\mathrm{Var}_s[\mu_s]}_{\text{epistemic}}.

Quantiles and intervals are those of the mixture itself, which may have several modes, and not of
the Gaussian with its mean and variance (:mod:`lightning_bnn.predictive.gaussian_mixture`).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from lightning_bnn.predictive.base import (
    OrderedPredictive,
    at_least_float32,
    mixture_log_prob,
    reshape_targets,
    sum_event,
)
from lightning_bnn.predictive.gaussian_mixture import (
    gaussian_entropy,
    gaussian_log_density,
    mixture_cdf,
    mixture_crps,
    mixture_entropy,
    mixture_quantile,
)

__all__ = ["GaussianPredictive"]


class GaussianPredictive(OrderedPredictive):
    """A mixture of Gaussians for each output.

    Args:
        means: Means of the components, of shape ``(S, B)`` or ``(S, B, D)``.
        scales: Their standard deviations, of the same shape or one that broadcasts to it.
        outputs: The network's outputs, where they are not simply the means.

    Example:
        >>> import torch
        >>> from lightning_bnn.predictive import GaussianPredictive
        >>> means = torch.tensor([[[0.0]], [[10.0]]])  # two draws, one example, one output
        >>> predictive = GaussianPredictive(means, torch.tensor(1.0))
        >>> predictive.mean, predictive.aleatoric, predictive.epistemic
        (tensor([[5.]]), tensor([[1.]]), tensor([[25.]]))
        >>> lower, upper = predictive.interval(0.9)
        >>> round(lower.item(), 2), round(upper.item(), 2)
        (-1.28, 11.28)
    """

    def __init__(self, means: Tensor, scales: Tensor, outputs: Tensor | None = None) -> None:
        super().__init__(means if outputs is None else outputs)
        self.means = at_least_float32(means)
        self.scales = scales.to(self.means.dtype).expand_as(self.means)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {"means": self.means, "scales": self.scales, "outputs": self.outputs}
        if self.outputs is self.means:
            del tensors["outputs"]  # made again by the constructor, and not stored twice
        return tensors

    @property
    def component_means(self) -> Tensor:
        """The means of the draws."""
        return self.means

    @cached_property
    def mean(self) -> Tensor:
        """Mean of the mixture, in the shape of a draw's means."""
        return self.means.mean(0)

    @cached_property
    def variance(self) -> Tensor:
        """Variance of the mixture: aleatoric + epistemic."""
        return self.aleatoric + self.epistemic

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean over the draws of the noise variance."""
        return self.scales.square().mean(0)

    @cached_property
    def epistemic(self) -> Tensor:
        """Variance of the means over the draws (divided by S, as a mixture has it)."""
        return self.means.var(0, correction=0)

    @cached_property
    @torch.no_grad()
    def entropy(self) -> Tensor:
        """Differential entropy of each output in nats, to 1e-8 (no gradient flows through it).

        It is the integral over the mixture, not of a Gaussian of the same variance. Time grows
        with the square of the number of draws.
        """
        return mixture_entropy(self.means, self.scales)

    @cached_property
    def mutual_information(self) -> Tensor:
        """Entropy of the mixture minus the components' mean entropy, for each output; >= 0."""
        return (self.entropy - gaussian_entropy(self.scales).mean(0)).clamp(min=0)

    def _targets(self, targets: Tensor) -> Tensor:
        return reshape_targets(targets, self.means.shape[1:]).to(self.means.dtype)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Log density of the targets, jointly over the outputs of an example; ``(B,)``."""
        density = gaussian_log_density(self._targets(targets), self.means, self.scales)
        return mixture_log_prob(sum_event(density, 2))

    def cdf(self, targets: Tensor) -> Tensor:
        """Probability of a value at or below the target, for each output."""
        return mixture_cdf(self._targets(targets), self.means, self.scales)

    @torch.no_grad()
    def quantile(self, q: float) -> Tensor:
        """Quantile of the mixture, for each output, to rounding error."""
        self._check_probability(q, "q")
        return mixture_quantile(q, self.means, self.scales)

    def covers(self, targets: Tensor, level: float = 0.9) -> Tensor:
        """Whether each target lies in the central interval, read off the distribution function."""
        lower, upper = self._tails(level)
        probability = self.cdf(targets)
        return (probability >= lower) & (probability <= upper)

    def crps(self, targets: Tensor) -> Tensor:
        """Continuous ranked probability score for each output, in closed form; 0 is best."""
        return mixture_crps(self._targets(targets), self.means, self.scales)
