r"""The Monte Carlo standard error of the negative log likelihood of a mixture.

A posterior with infinitely many weights predicts with S draws of them, and the NLL of the mixture
is then a random number. Let :math:`p_{is}` be the density of example i under draw s and
:math:`\bar p_i` its mean over draws. By the delta method the error of
:math:`-\frac1n\sum_i\log\bar p_i` is, to first order, that of the mean of the S numbers

.. math::
    g_s = \frac1n\sum_i\frac{p_{is}}{\bar p_i}, \qquad
    \mathrm{mcse} = \sqrt{\frac{\sum_s (g_s - 1)^2}{S\,(S-1)}},

because the examples share each draw. It says how far the NLL would move with other draws, not
with other examples. Two things are not in it. The NLL of few draws is too large, by about
:math:`\frac1{2S}` times the mean relative variance of :math:`p_{is}` over draws: more draws make
it better on average. And draws of a Markov chain that are correlated tell less than as many
independent ones: their error is :math:`\sqrt{S / \mathrm{ESS}}` times this, with the effective
sample size that :class:`~lightning_bnn.callbacks.ChainMonitor` shows. Draws of unequal weights
:math:`v_s` count as :math:`S v_s (g_s - 1)`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_bnn.errors import DataError
from lightning_bnn.mixtures import Predictive, along_draws, mixture_log_prob

__all__ = ["MonteCarloStandardError"]


class MonteCarloStandardError(Metric):
    """The standard error of :class:`NegativeLogLikelihood` that comes from the number of draws.

    Every batch must be predicted with the same draws, in one order, as ``Posterior.predict`` does
    with one seed. Of a single draw it is NaN.

    Example:
        >>> import torch
        >>> from lightning_bnn.metrics import MonteCarloStandardError
        >>> from lightning_bnn.predictive import GaussianPredictive
        >>> metric = MonteCarloStandardError()
        >>> means = torch.randn(1000, 1, generator=torch.Generator().manual_seed(0))
        >>> metric.update(GaussianPredictive(means, torch.ones(())), torch.zeros(1))
        >>> metric.compute()  # p = N(0; m, 1) with m of N(0, 1): about 0.0124
        tensor(0.0127)
    """

    is_differentiable: bool | None = False
    higher_is_better: bool | None = False
    full_state_update: bool | None = False

    excess: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Σ_i (p_is / p̄_i - 1) of each draw; (1,) fits any number of draws
        self.add_state("excess", torch.zeros(1), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    @property
    def draws(self) -> int:
        """S, as far as it was seen."""
        return len(self.excess)

    def update(self, predictive: Predictive, targets: Tensor) -> None:
        """Add a batch.

        Args:
            predictive: The predictive of the batch.
            targets: Its targets, in the shape that the data loader gives them.

        Raises:
            DataError: The batch has another number of draws than those before.
        """
        if self.draws not in (1, predictive.draws):
            raise DataError(
                f"The Monte Carlo error needs the same draws in every batch; this one has "
                f"{predictive.draws}, those before it had {self.draws}."
            )
        each, labelled = predictive.component_log_prob(targets), predictive.labelled(targets)
        excess = (each - mixture_log_prob(each, predictive.weights)).exp() - 1
        if predictive.weights is not None:
            excess = excess * along_draws(len(excess) * predictive.weights, excess)
        self.excess = self.excess + (excess if labelled is None else excess[:, labelled]).sum(1)
        self.count += len(predictive) if labelled is None else labelled.sum()

    def compute(self) -> Tensor:
        """The standard error, in nats."""
        mean = self.excess / self.count
        return (mean.square().sum() / (len(mean) * (len(mean) - 1))).sqrt()
