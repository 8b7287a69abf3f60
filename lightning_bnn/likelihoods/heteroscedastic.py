r"""Real numbers whose noise depends on the input: the network gives mean and scale.

.. math:: y_d \sim N(m_d, \sigma_d^2), \quad \sigma_d = \sigma_{\min} + \log(1 + e^{r_d})

where the last axis of the outputs holds the D means m and then the D raw scales r. See Nix and
Weigend (1994), "Estimating the mean and variance of the target probability distribution".
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MetricCollection

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods.base import Likelihood, check_outputs, check_real_targets
from lightning_bnn.metrics import regression_metrics
from lightning_bnn.predictive import GaussianPredictive
from lightning_bnn.predictive.base import at_least_float32, reshape_targets, sum_event
from lightning_bnn.predictive.gaussian_mixture import gaussian_log_density

__all__ = ["HeteroscedasticGaussian", "split_mean_and_scale"]

FIX = (
    "The network gives two numbers per target, a mean and a raw scale: its last layer needs "
    "2 x D outputs for targets of shape (B, D)."
)


def check_even(outputs: Tensor, batch_axes: int) -> None:
    """Raise a DataError unless the last axis of the outputs has an even size."""
    size = outputs.shape[-1] if outputs.ndim > batch_axes else 1
    if size % 2 or size == 0:
        raise DataError(
            f"HeteroscedasticGaussian expected an even number of outputs per example, D means and "
            f"then D raw scales; got {size} (shape {tuple(outputs.shape)}). {FIX}"
        )


def split_mean_and_scale(
    outputs: Tensor, minimum_scale: float, batch_axes: int
) -> tuple[Tensor, Tensor]:
    """Split the last axis of the outputs into D means and D scales, in float32 at least.

    Raises:
        DataError: The last axis does not have an even size.
    """
    check_even(outputs, batch_axes)
    means, raw = at_least_float32(outputs).chunk(2, -1)
    return means, F.softplus(raw) + minimum_scale


class HeteroscedasticGaussian(Likelihood):
    """Regression where the network also says how noisy each target is.

    Outputs are ``(B, 2 D)``: D means, then D raw scales. Targets are ``(B, D)``, or ``(B,)`` when
    D is 1. Metrics: rmse, nll, crps, coverage.

    Args:
        minimum_scale: The smallest standard deviation, in the unit of the targets. It keeps the
            density bounded where the network fits a target exactly.

    Example:
        >>> import torch
        >>> from lightning_bnn.likelihoods import HeteroscedasticGaussian
        >>> likelihood = HeteroscedasticGaussian()
        >>> outputs = torch.tensor([[0.0, -2.0], [0.0, 2.0]])  # the same mean, two noise levels
        >>> likelihood.predictive(outputs[None]).aleatoric.sqrt()
        tensor([[0.1270],
                [2.1270]])
    """

    def __init__(self, minimum_scale: float = 1e-4) -> None:
        super().__init__()
        if not (math.isfinite(minimum_scale) and minimum_scale > 0):
            raise ConfigurationError(
                f"HeteroscedasticGaussian expected a positive minimum_scale, got {minimum_scale}. "
                "Pass something far below the noise of the targets, such as 1e-4."
            )
        self.minimum_scale = float(minimum_scale)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log density of the targets, summed over the outputs of an example; ``(B,)``."""
        means, scales = split_mean_and_scale(outputs, self.minimum_scale, 1)
        values = reshape_targets(targets, means.shape, FIX).to(means.dtype)
        return sum_event(gaussian_log_density(values, means, scales), 1)

    def predictive(self, outputs: Tensor) -> GaussianPredictive:
        """Mixture of Gaussians from outputs ``(S, B, 2 D)``."""
        means, scales = split_mean_and_scale(outputs, self.minimum_scale, 2)
        return GaussianPredictive(means, scales, outputs)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check for finite numbers, half as many as the network's outputs."""
        check_outputs("HeteroscedasticGaussian", outputs, targets)
        check_even(outputs, 1)
        reshape_targets(targets, (*outputs.shape[:-1], outputs.shape[-1] // 2), FIX)
        check_real_targets("HeteroscedasticGaussian", targets)

    def metrics(self) -> MetricCollection:
        """Root mean squared error, negative log likelihood, CRPS, coverage of 90% intervals."""
        return regression_metrics()

    def config(self) -> dict[str, Any]:
        """The smallest scale."""
        return {"minimum_scale": self.minimum_scale}
