r"""Real numbers whose noise depends on the input: the network gives mean and scale.

.. math:: y_d \sim N(m_d, \sigma_d^2), \quad \sigma_d = \sigma_{\min} + \log(1 + e^{r_d})

where the last axis of the outputs holds the D means m and then the D raw scales r. See Nix and
Weigend (1994), "Estimating the mean and variance of the target probability distribution".

A network that is large for its data can fit single targets exactly and call their noise almost
nothing. ``noise_prior`` :math:`=\nu` keeps it from that. It adds to the log prior

.. math:: \nu\,\frac1N\sum_i \tfrac12\big(\log\lambda_i - \lambda_i\sigma_0^2\big), \quad
          \lambda_i = 1/\sigma_i^2,

as much as :math:`\nu` more residuals of the size :math:`\sigma_0` (``noise_scale``), spread over
the inputs of the data. Where the noise is the same everywhere it is the prior of
``Gaussian(learn=True)``. Its weight does not grow with N, so that it does not bias what many data
say, and a row that is fitted exactly has :math:`\sigma_i \ge \sigma_0\sqrt{\nu/(N+\nu)}` at the
optimum.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_bnn.checks import check_number
from lightning_bnn.errors import DataError
from lightning_bnn.likelihoods.base import Likelihood, mixed_outputs, single_columns
from lightning_bnn.likelihoods.gaussian import (
    GaussianPredictive,
    noise_log_prior,
    separate_errors,
)
from lightning_bnn.mixtures import at_least_float32, reshape_targets

__all__ = ["HeteroscedasticGaussian"]

FIX = (
    "The network gives two numbers per target, a mean and a raw scale: its last layer needs "
    "2 x D outputs for targets of shape (B, D)."
)


class HeteroscedasticGaussian(Likelihood):
    """Regression where the network also says how noisy each target is.

    Outputs are ``(B, 2 D)``: D means, then D raw scales. Targets are ``(B, D)``, or ``(B,)`` when
    D is 1. Metrics: rmse, nll, crps, coverage.

    Args:
        minimum_scale: The smallest standard deviation, in the unit of the targets. It keeps the
            density bounded where the network fits a target exactly.
        noise_prior: How many residuals of the size ``noise_scale`` the prior of the noise counts
            as, in all; 0 for none.
        noise_scale: σ₀, the size of noise that the prior expects, in the unit of the targets.

    Example:
        >>> import torch
        >>> from lightning_bnn.likelihoods import HeteroscedasticGaussian
        >>> likelihood = HeteroscedasticGaussian()
        >>> outputs = torch.tensor([[0.0, -2.0], [0.0, 2.0]])  # the same mean, two noise levels
        >>> likelihood.predictive(outputs[None]).aleatoric.sqrt()
        tensor([[0.1270],
                [2.1270]])
    """

    predictive_type = GaussianPredictive

    def __init__(
        self, minimum_scale: float = 1e-4, noise_prior: float = 0.0, noise_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.noise_prior = check_number("noise_prior", noise_prior, positive=False)
        self.noise_scale = check_number("noise_scale", noise_scale)
        self.minimum_scale = check_number("minimum_scale", minimum_scale)

    def predictive(self, outputs: Tensor) -> GaussianPredictive:
        """Mixture of Gaussians from outputs ``(S, B, 2 D)``."""
        self._check_even(outputs, 2)
        means, raw = at_least_float32(outputs).chunk(2, -1)
        return GaussianPredictive(means, F.softplus(raw) + self.minimum_scale, outputs)

    def mixture(self, mean: Tensor, root: Tensor, points: Tensor) -> GaussianPredictive:
        """The points are of the raw scales, and of what is correlated with them in the means."""
        is_mean = torch.ones_like(mean[0])
        is_mean.chunk(2, -1)[1].zero_()
        spread, rest = separate_errors(root, is_mean.flatten())
        wide = spread.view(mean.shape).chunk(2, -1)[0]
        return self.predictive(mixed_outputs(mean, rest, points)).widened(wide)

    def hessian_columns(self, outputs: Tensor, targets: Tensor) -> Iterator[Tensor]:
        r"""Of the Fisher information: 1/σ of a mean, √2 · dσ/dr / σ of a raw scale r.

        The Hessian itself has negative eigenvalues where a residual is smaller than the noise.
        """
        raw = at_least_float32(outputs.detach()).chunk(2, -1)[1]
        scale = F.softplus(raw) + self.minimum_scale
        return single_columns(torch.cat([1 / scale, 2**0.5 * raw.sigmoid() / scale], -1))

    def log_prior(self, outputs: Tensor) -> Tensor:
        """Of the noise that the outputs give, up to a constant: 0 at ``noise_scale``."""
        scales = F.softplus(at_least_float32(outputs).chunk(2, -1)[1]) + self.minimum_scale
        return noise_log_prior(scales, self.noise_prior, self.noise_scale).flatten(1).sum(1).mean()

    @property
    def has_prior(self) -> bool:
        """Whether there is a prior of the noise."""
        return self.noise_prior > 0

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check for finite numbers, half as many as the network's outputs."""
        self.check_tensors(outputs, targets)
        self._check_even(outputs, 1)
        reshape_targets(targets, (*outputs.shape[:-1], outputs.shape[-1] // 2), FIX)
        self.check_finite(targets)

    def _check_even(self, outputs: Tensor, batch_axes: int) -> None:
        size = outputs.shape[-1] if outputs.ndim > batch_axes else 1
        if size % 2 or size == 0:
            raise DataError(
                "HeteroscedasticGaussian expected an even number of outputs per example, D means "
                f"and then D raw scales; got {size} (shape {tuple(outputs.shape)}). {FIX}"
            )

    def config(self) -> dict[str, Any]:
        """The smallest scale, and the prior of the noise."""
        # what has no effect is left out: files of earlier versions do not know it
        prior = {"noise_prior": self.noise_prior, "noise_scale": self.noise_scale}
        return {"minimum_scale": self.minimum_scale, **(prior if self.noise_prior else {})}
