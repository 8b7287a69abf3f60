r"""Real numbers with the same noise everywhere: :math:`y_d \sim N(f_d, \sigma_d^2)`.

:math:`\sigma` is fixed, or learned together with the weights as a point estimate through its
logarithm. For noise that depends on the input see
:class:`~lightning_bnn.likelihoods.HeteroscedasticGaussian`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.likelihoods.base import Likelihood, check_outputs, check_real_targets
from lightning_bnn.metrics import regression_metrics
from lightning_bnn.predictive import GaussianPredictive
from lightning_bnn.predictive.base import at_least_float32, reshape_targets, sum_event
from lightning_bnn.predictive.gaussian_mixture import gaussian_log_density

__all__ = ["Gaussian"]


class Gaussian(Likelihood):
    """Regression with Gaussian noise of one scale, or of one scale per output.

    Outputs are the means, ``(B,)`` or ``(B, D)``; targets have the same shape. ``(B, 1)`` and
    ``(B,)`` go together; nothing is ever broadcast. Metrics: rmse, nll, crps, coverage.

    Args:
        scale: Standard deviation of the noise: one number for all outputs, or a list of one for
            each. Where it is learned, the value to start from.
        learn: Whether the logarithm of the scale is a parameter, ``log_scale``, to be trained.

    Example:
        >>> import torch
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> Gaussian(scale=0.5).log_prob(torch.zeros(2, 1), torch.tensor([0.0, 1.0]))
        tensor([-0.2258, -2.2258])
        >>> Gaussian(scale=[0.1, 2.0], learn=True).log_scale.shape
        torch.Size([2])
    """

    log_scale: nn.Parameter | None

    def __init__(self, scale: float | list[float] = 1.0, learn: bool = False) -> None:
        super().__init__()
        values = list(scale) if isinstance(scale, (list, tuple)) else [scale]
        if not values or not all(math.isfinite(value) and value > 0 for value in values):
            raise ConfigurationError(
                f"Gaussian expected a positive standard deviation, or a list of them; got "
                f"scale={scale}. Pass the noise level of the targets, in their unit."
            )
        self.initial_scale: float | list[float] = (
            [float(value) for value in values] if isinstance(scale, (list, tuple)) else float(scale)
        )
        self.learn = learn
        log_scale = torch.tensor(self.initial_scale, dtype=torch.float64).log()
        self.register_parameter(
            "log_scale", nn.Parameter(log_scale.to(torch.get_default_dtype())) if learn else None
        )

    def _scale(self, like: Tensor) -> Tensor:
        if self.log_scale is None:
            # Made anew each time: exact in the dtype of the outputs, and no buffer to keep in step.
            return torch.tensor(self.initial_scale, dtype=like.dtype, device=like.device)
        return self.log_scale.to(like.dtype).exp()

    def _check_scale(self, outputs: Tensor, batch_axes: int) -> None:
        if not isinstance(self.initial_scale, list) or len(self.initial_scale) == 1:
            return
        size = outputs.shape[-1] if outputs.ndim > batch_axes else 1
        if size != len(self.initial_scale):
            raise DataError(
                f"Gaussian has {len(self.initial_scale)} scales, one per output, and the network "
                f"gives {size} outputs per example (shape {tuple(outputs.shape)}). Pass a list of "
                f"{size} scales, or one number for all."
            )

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log density of the targets, summed over the outputs of an example; ``(B,)``."""
        self._check_scale(outputs, 1)
        means = at_least_float32(outputs)
        values = reshape_targets(targets, means.shape).to(means.dtype)
        return sum_event(gaussian_log_density(values, means, self._scale(means)), 1)

    def predictive(self, outputs: Tensor) -> GaussianPredictive:
        """Mixture of Gaussians from ``(S, B)`` or ``(S, B, D)`` means."""
        self._check_scale(outputs, 2)
        return GaussianPredictive(outputs, self._scale(at_least_float32(outputs)))

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check for finite numbers in the shape of the outputs."""
        check_outputs("Gaussian", outputs, targets)
        self._check_scale(outputs, 1)
        reshape_targets(targets, outputs.shape)
        check_real_targets("Gaussian", targets)

    def metrics(self) -> MetricCollection:
        """Root mean squared error, negative log likelihood, CRPS, coverage of 90% intervals."""
        return regression_metrics()

    def config(self) -> dict[str, Any]:
        """The scale to start from, and whether it is learned."""
        return {"scale": self.initial_scale, "learn": self.learn}
