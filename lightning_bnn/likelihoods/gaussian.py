r"""Real numbers with the same noise everywhere: :math:`y_d \sim N(f_d, \sigma_d^2)`.

:math:`\sigma` is fixed, or learned together with the weights as a point estimate through its
logarithm, under a Gamma prior of the precision :math:`\lambda = 1/\sigma^2`. As a density of
:math:`\log\lambda` it is :math:`\frac\nu2(\log\lambda - \lambda\sigma_0^2)` in logarithms, up to a
constant: as much as :math:`\nu` more residuals of the size :math:`\sigma_0`, the scale to start
from. With the residuals r of N examples the optimum
:math:`\sigma^2 = (\sum r^2 + \nu\sigma_0^2)/(N + \nu)` stays away from 0 where a network fits all
targets. For noise that depends on the input see
:class:`~lightning_bnn.likelihoods.HeteroscedasticGaussian`.

The predictive is a mixture of Gaussians, which may have several modes. Its quantiles, CRPS and
entropy are those of the mixture itself, not of the Gaussian with its mean and variance. With
:math:`\Phi, \varphi` the standard normal distribution function and density:

* CRPS (Grimit et al., 2006): :math:`\frac1S\sum_s A(y - \mu_s, \sigma_s^2)
  - \frac1{2S^2}\sum_{s,t} A(\mu_s - \mu_t, \sigma_s^2 + \sigma_t^2)` with
  :math:`A(m, v) = 2\sqrt v\,\varphi(m/\sqrt v) + m\,(2\Phi(m/\sqrt v) - 1)`;
* entropy :math:`-\int p \log p`: no closed form exists. The line is cut at
  :math:`\mu_s + 2j\sigma_s`, :math:`j = -4..4`, for every component, and an eight-point Gauss
  and Legendre rule integrates each piece, so that a narrow component inside a wide one is seen.
  The error stays below 1e-8 nats (tested against adaptive quadrature); the time is 72 S^2
  densities for each output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_bnn.checks import check_flag, check_number
from lightning_bnn.errors import DataError
from lightning_bnn.likelihoods.base import Likelihood, mixed_outputs, single_columns
from lightning_bnn.mixtures import (
    OrderedPredictive,
    Predictive,
    along_draws,
    at_least_float32,
    full_precision,
    mixture_log_prob,
    reshape_targets,
    sum_event,
)

__all__ = [
    "Gaussian", "GaussianPredictive", "expected_distance", "mixture_entropy", "separate_errors",
]  # fmt: skip

# The most numbers that a temporary tensor may hold: 32 MB in float64.
BUDGET = 2**22
NODES = 8


def gaussian_log_density(values: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Log density of N(mean, scale^2), elementwise."""
    return -0.5 * ((values - mean) / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)


def gaussian_entropy(scales: Tensor) -> Tensor:
    """Differential entropy of N(., scale^2), in nats."""
    return scales.log() + 0.5 * math.log(2 * math.pi * math.e)


def noise_log_prior(scales: Tensor, weight: float, reference: Tensor | float) -> Tensor:
    """Of a noise scale, what ``weight`` residuals of the size ``reference`` say, elementwise.

    Example:
        >>> scales = torch.tensor([0.1, 1.0, 10.0])
        >>> noise_log_prior(scales, 2.0, 1.0)                  # largest at the reference
        tensor([-94.3948,   0.0000,  -3.6152])
    """
    ratio = reference / scales
    return 0.5 * weight * (2 * ratio.log() - ratio.square() + 1)


def expected_distance(mean: Tensor, variance: Tensor) -> Tensor:
    """E|X| for X ~ N(mean, variance)."""
    scale = variance.sqrt()
    z = mean / scale
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return 2 * scale * density + mean * torch.special.erf(z / math.sqrt(2))


def separate_errors(root: Tensor, some: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split Gaussian errors into some that are independent, as large as can be, and the rest.

    Those that are independent have the same share of the variance of each output: the smallest
    eigenvalue of the correlations. It is all where there is one output, or no correlation.

    Args:
        root: A root of the covariance of each example, (B, F, F).
        some: 1 for outputs whose errors may be independent, else 0, (F,); None: all may.

    Returns:
        The variances of the independent errors, (B, F), and a root of the covariance of the rest.

    Example:
        >>> variances, rest = separate_errors(torch.tensor([[[3.0]]]))
        >>> variances, rest
        (tensor([[9.]]), tensor([[[0.]]]))
    """
    covariance = root @ root.mT
    variance = covariance.diagonal(dim1=1, dim2=2)
    sd = variance.sqrt().clamp(min=torch.finfo(root.dtype).tiny)
    correlation = covariance / sd[:, None] / sd[:, :, None]
    correlation.diagonal(dim1=1, dim2=2).fill_(1)
    own = torch.linalg.eigvalsh(correlation)[:, :1].clamp(0, 1) * variance
    own = own if some is None else own * some
    values, vectors = torch.linalg.eigh(covariance - own.diag_embed())
    return own, vectors * values.clamp(min=0).sqrt().unsqueeze(1)


def mixture_crps(
    values: Tensor, means: Tensor, scales: Tensor, weights: Tensor | None = None
) -> Tensor:
    """CRPS of ``values`` of shape E under mixtures over axis 0 of the means and scales.

    ``weights`` are relative ones, (S,), of the mean 1; None: all the same.
    """
    draws = means.shape[0]
    variances = scales.square()
    relative = None if weights is None else along_draws(weights, means)
    distances = expected_distance(values - means, variances)
    to_value = (distances if relative is None else relative * distances).mean(0)
    between = torch.zeros_like(to_value)
    # All S x S pairs, some rows at a time so that memory stays bounded.
    rows = max(1, BUDGET // max(1, means.numel()))
    for start in range(0, draws, rows):
        some = slice(start, start + rows)
        distances = expected_distance(
            means[some, None] - means[None], variances[some, None] + variances[None]
        )
        if relative is not None:
            distances = distances * relative[some, None] * relative
        between += distances.sum((0, 1))
    return to_value - between / (2 * draws**2)


def mixture_entropy(means: Tensor, scales: Tensor, shares: Tensor | None = None) -> Tensor:
    """Differential entropy, in nats, of shape E, of mixtures over axis 0 of means and scales."""
    draws, event = means.shape[0], means.shape[1:]
    if draws == 1:
        return gaussian_entropy(scales[0])
    wide_means = full_precision(means).reshape(draws, -1)
    wide_scales = full_precision(scales).reshape(draws, -1)
    cuts = torch.arange(-8, 9, 2, dtype=wide_means.dtype, device=wide_means.device)
    points, weights = (wide_means.new_tensor(v) for v in np.polynomial.legendre.leggauss(NODES))
    points, weights = (points + 1) / 2, weights / 2
    size = max(1, BUDGET // (draws * draws * len(cuts) * NODES))
    pieces = []
    for mean, scale in zip(wide_means.split(size, 1), wide_scales.split(size, 1), strict=True):
        edges = (mean[:, None] + scale[:, None] * cuts[:, None]).flatten(0, 1).sort(0).values
        widths = edges.diff(dim=0)
        values = edges[:-1, None] + widths[:, None] * points[:, None]
        log_density = mixture_log_prob(
            gaussian_log_density(values, mean[:, None, None], scale[:, None, None]), shares
        )
        area = widths[:, None] * weights[:, None] * torch.special.entr(log_density.exp())
        pieces.append(area.sum((0, 1)))
    return torch.cat(pieces, 0).reshape(event).to(means.dtype)


class GaussianPredictive(OrderedPredictive):
    """A mixture of Gaussians for each output.

    Args:
        means: Means of the components, of shape ``(S, B)`` or ``(S, B, D)``.
        scales: The noise's standard deviations, of the same shape or one that broadcasts to it.
        outputs: The network's outputs, where they are not simply the means.
        spread: Variances of the means in each component, which come from not knowing the weights.

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
        >>> wide = GaussianPredictive(means[:1], torch.tensor(3.0), spread=torch.tensor(16.0))
        >>> wide.variance, wide.aleatoric, wide.epistemic
        (tensor([[25.]]), tensor([[9.]]), tensor([[16.]]))
    """

    def __init__(
        self,
        means: Tensor,
        scales: Tensor,
        outputs: Tensor | None = None,
        spread: Tensor | None = None,
    ) -> None:
        super().__init__(means if outputs is None else outputs)
        self.means = at_least_float32(means)
        self.noise = scales.to(self.means.dtype).expand_as(self.means)
        known = self.means.new_zeros(()) if spread is None else spread.to(self.means.dtype)
        self.spread = known.expand_as(self.means)
        self._is_wide = spread is not None
        self.scales = (self.noise.square() + known).sqrt() if self._is_wide else self.noise

    def tensors(self) -> dict[str, Tensor]:
        """Means, noise, and what else was given."""
        tensors = {"means": self.means, "scales": self.noise}
        if self.outputs is not self.means:  # or else made again by the constructor
            tensors["outputs"] = self.outputs
        return {**tensors, "spread": self.spread} if self._is_wide else tensors

    def widened(self, spread: Tensor) -> GaussianPredictive:
        """The same where the means of components have a variance, ``(B, ...)``, besides."""
        made = GaussianPredictive(**{**self.tensors(), "spread": self.spread + spread})
        made.weights = self.weights
        return made

    @cached_property
    def aleatoric(self) -> Tensor:
        """Mean over the draws of the variance of the noise."""
        return self.average(self.noise.square())

    @cached_property
    def epistemic(self) -> Tensor:
        """Variance of the means over the draws, and in them."""
        return self.variance_over_draws(self.means) + self.average(self.spread)

    @property
    def component_means(self) -> Tensor:
        """Means of the components."""
        return self.means

    @property
    def component_variances(self) -> Tensor:
        """Squared scales of the components."""
        return self.scales.square()

    def component_log_density(self, values: Tensor) -> Tensor:
        """Log density of each value under each component."""
        return gaussian_log_density(values, self.means, self.scales)

    def component_cdf(self, values: Tensor) -> Tensor:
        """Distribution function of each component."""
        return torch.special.ndtr((values - self.means) / self.scales)

    def _bracket(self, q: float) -> tuple[Tensor, Tensor]:
        # The smallest and the largest of the components' own quantiles. With one component, or
        # equal ones, the bracket has no width and both ends are the component's own quantile.
        standard = torch.special.ndtri(torch.tensor(q, dtype=self.means.dtype)).item()
        components = self.means + self.scales * standard
        return components.amin(0), components.amax(0)

    @cached_property
    @torch.no_grad()
    def _entropies(self) -> tuple[Tensor, Tensor]:
        within = self.average(gaussian_entropy(self.noise))
        return mixture_entropy(self.means, self.scales, self.weights), within

    def crps(self, targets: Tensor) -> Tensor:
        """Continuous ranked probability score for each output, in closed form; 0 is best."""
        relative = None if self.weights is None else self.draws * self.weights
        return mixture_crps(self.align(targets), self.means, self.scales, relative)

    def alike(self, predictives: Sequence[Predictive]) -> Sequence[Any]:
        """Without the outputs, where those of networks are of other kinds."""
        given = [one for one in predictives if isinstance(one, GaussianPredictive)]
        same = len({one.outputs.shape[2:] for one in given}) == 1
        if same or len(given) < len(predictives):
            return predictives
        return [one._without_outputs() for one in given]

    def _without_outputs(self) -> GaussianPredictive:
        made = GaussianPredictive(
            self.means, self.noise, spread=self.spread if self._is_wide else None
        )
        made.weights = self.weights
        return made


class Gaussian(Likelihood):
    """Regression with Gaussian noise of one scale, or of one scale per output.

    Outputs are the means, ``(B,)`` or ``(B, D)``; targets have the same shape. ``(B, 1)`` and
    ``(B,)`` go together; nothing is ever broadcast. Metrics: rmse, nll, crps, coverage.

    Args:
        scale: Standard deviation of the noise: one number for all outputs, or a list of one for
            each. Where it is learned, the value to start from.
        learn: Whether the logarithm of the scale is a parameter, ``log_scale``, to be trained.
        noise_prior: How many residuals of the size of ``scale`` the prior of a learned scale counts
            as; 0 for none. It keeps the noise of a network that fits every target from vanishing.

    Example:
        >>> import torch
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> Gaussian(scale=0.5).log_prob(torch.zeros(2, 1), torch.tensor([0.0, 1.0]))
        tensor([-0.2258, -2.2258])
        >>> Gaussian(scale=[0.1, 2.0], learn=True).log_scale.shape
        torch.Size([2])
    """

    predictive_type = GaussianPredictive
    log_scale: nn.Parameter | None

    def __init__(
        self, scale: float | list[float] = 1.0, learn: bool = False, noise_prior: float = 1.0
    ) -> None:
        super().__init__()
        self.noise_prior = check_number("noise_prior", noise_prior, positive=False)
        self.initial_scale: float | list[float] = (
            [check_number("scale", value) for value in scale]
            if isinstance(scale, (list, tuple))
            else check_number("scale", scale)
        )
        self.learn = check_flag("learn", learn)
        log_scale = torch.tensor(self.initial_scale, dtype=torch.float64).log()
        self.register_parameter(
            "log_scale", nn.Parameter(log_scale.to(torch.get_default_dtype())) if learn else None
        )

    def _scale(self, like: Tensor) -> Tensor:
        if self.log_scale is None:
            # Made anew each time: exact in the dtype of the outputs, and no buffer to keep in step.
            return torch.tensor(self.initial_scale, dtype=like.dtype, device=like.device)
        return self.log_scale.to(like.dtype).exp()

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log density of the targets, summed over the outputs of an example; ``(B,)``."""
        # As the predictive has it, without the axis of draws: every training step passes here.
        self._check_scale(outputs.shape[1:])
        means = at_least_float32(outputs)
        values = reshape_targets(targets, means.shape).to(means.dtype)
        return sum_event(gaussian_log_density(values, means, self._scale(means)), 1)

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        """1/σ, one output at a time; the noise is taken as known."""
        means = at_least_float32(outputs.detach())
        return single_columns((1 / self._scale(means).detach()).expand_as(means))

    def standard_residuals(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """Residuals over a scale that is learned."""
        if not self.learn:
            return None
        means = at_least_float32(outputs)
        return (reshape_targets(targets, means.shape).to(means.dtype) - means) / self._scale(means)

    @torch.no_grad()
    def widened(self, factor: float) -> Gaussian:
        """A copy with every learned scale times a number.

        Example:
            >>> round(Gaussian(0.5, learn=True).widened(3.0).log_scale.exp().item(), 3)
            1.5
        """
        copy = deepcopy(self)
        assert copy.log_scale is not None
        copy.log_scale.add_(math.log(factor))
        return copy

    def log_prior(self, outputs: Tensor) -> Tensor:
        """Of the learned scales, up to a constant: 0 at the scale to start from."""
        scale = self._scale(at_least_float32(outputs))
        reference = torch.tensor(self.initial_scale, dtype=scale.dtype, device=scale.device)
        return noise_log_prior(scale, self.noise_prior, reference).sum()

    @property
    def has_prior(self) -> bool:
        """Whether the scale is learned under a prior."""
        return self.learn and self.noise_prior > 0

    def predictive(self, outputs: Tensor) -> GaussianPredictive:
        """Mixture of Gaussians from ``(S, B)`` or ``(S, B, D)`` means."""
        self._check_scale(outputs.shape[2:])
        return GaussianPredictive(outputs, self._scale(at_least_float32(outputs)))

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check for finite numbers in the shape of the outputs."""
        self.check_tensors(outputs, targets)
        self._check_scale(outputs.shape[1:])
        reshape_targets(targets, outputs.shape)
        self.check_finite(targets)

    def mixture(self, mean: Tensor, root: Tensor, points: Tensor) -> GaussianPredictive:
        """In closed form where there is one output, or no correlation between them."""
        spread, rest = separate_errors(root)
        return self.predictive(mixed_outputs(mean, rest, points)).widened(spread.view(mean.shape))

    def _check_scale(self, event: torch.Size) -> None:
        if not isinstance(self.initial_scale, list) or len(self.initial_scale) == 1:
            return
        size = event[-1] if event else 1
        if size != len(self.initial_scale):
            raise DataError(
                f"Gaussian has {len(self.initial_scale)} scales, one per output, and the network "
                f"gives {size} outputs per example. Pass {size} scales, or one for all."
            )

    def config(self) -> dict[str, Any]:
        """The scale to start from, whether it is learned, and under which prior."""
        # the default is left out: files of earlier versions do not know it
        prior = {"noise_prior": self.noise_prior} if self.noise_prior != 1.0 else {}
        return {"scale": self.initial_scale, "learn": self.learn, **prior}
