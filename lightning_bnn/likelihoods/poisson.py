r"""Counts: :math:`y_d \sim \mathrm{Poisson}(e^{f_d})`."""

from __future__ import annotations

from torch import Tensor
from torchmetrics import MetricCollection

from lightning_bnn.likelihoods.base import (
    Likelihood,
    check_all,
    check_outputs,
    check_real_targets,
)
from lightning_bnn.metrics import count_metrics
from lightning_bnn.predictive import PoissonPredictive
from lightning_bnn.predictive.base import reshape_targets, sum_event
from lightning_bnn.predictive.poisson import poisson_log_prob

__all__ = ["Poisson"]


class Poisson(Likelihood):
    """Counts, from their log rates.

    Outputs are ``(B,)`` or ``(B, D)``; targets have the same shape and hold whole numbers from 0
    on, in any dtype. ``(B, 1)`` and ``(B,)`` go together. Metrics: rmse, nll, crps, coverage.

    Example:
        >>> import torch
        >>> from lightning_bnn.likelihoods import Poisson
        >>> Poisson().log_prob(torch.tensor([0.0, 2.0]), torch.tensor([0, 7]))
        tensor([-1.0000, -1.9142])
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log probability of the counts, summed over the outputs of an example; ``(B,)``."""
        return sum_event(poisson_log_prob(outputs, reshape_targets(targets, outputs.shape)), 1)

    def predictive(self, outputs: Tensor) -> PoissonPredictive:
        """Mixture of Poisson distributions from ``(S, B)`` or ``(S, B, D)`` log rates."""
        return PoissonPredictive(outputs)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check for whole numbers from 0 on in the shape of the outputs."""
        check_outputs("Poisson", outputs, targets)
        reshape_targets(targets, outputs.shape)
        check_real_targets("Poisson", targets)
        good = targets >= 0
        if targets.is_floating_point():
            good = good & (targets == targets.floor())
        check_all(
            "Poisson",
            good,
            targets,
            "counts, whole numbers from 0 on",
            "Undo any scaling of the targets, or use Gaussian() for real numbers.",
        )

    def metrics(self) -> MetricCollection:
        """Root mean squared error, negative log likelihood, crps, coverage of 90% intervals."""
        return count_metrics()
