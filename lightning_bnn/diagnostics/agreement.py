r"""Whether chains agree, and how long they remember, from a short record of what they predict.

For the record x of K chains, each cut into halves of n values, with the mean W of the 2K variances
and the variance B/n of the 2K means (Gelman et al., 2013, *Bayesian Data Analysis*),

.. math:: \hat R = \sqrt{\frac{n-1}{n} + \frac{B}{n W}},

and the integrated autocorrelation time is :math:`\tau = 1 + 2\sum_t \rho_t`, with the
autocorrelations pooled over chains and summed while those of pairs of lags are positive (Geyer,
1992). One of :math:`\tau` successive values is worth one independent draw. Both are for decisions
while sampling; :mod:`lightning_bnn.diagnostics.statistics` has rank-normalised ones for judgement.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["autocorrelation_time", "split_rhat"]


def split_rhat(record: Tensor) -> Tensor:
    """Split R-hat of each quantity; 1 where nothing moves and all chains are the same.

    Args:
        record: The values, (chains, records, quantities).

    Example:
        >>> record = torch.randn(4, 1000, 2, generator=torch.Generator().manual_seed(0))
        >>> split_rhat(record + torch.tensor([[[0.0, 0.0]]] * 3 + [[[0.0, 9.0]]]))
        tensor([1.0000, 4.2120])
    """
    size = record.shape[1] // 2
    halves = torch.cat([record[:, :size], record[:, -size:]])
    within = halves.var(1).mean(0)
    between = halves.mean(1).var(0)
    ratio = torch.where(between > 0, between / within, 0.0)
    return ((size - 1) / size + ratio).sqrt().clamp(min=1.0)


def autocorrelation_time(record: Tensor) -> Tensor:
    """The integrated autocorrelation time of each quantity, in records; at least 1.

    Args:
        record: The values, (chains, records, quantities), at least four records.

    Example:
        >>> noise = torch.randn(4, 1000, 1, generator=torch.Generator().manual_seed(0))
        >>> autocorrelation_time(noise).item() < 1.5, autocorrelation_time(noise.cumsum(1)) > 100
        (True, tensor([True]))
    """
    count = record.shape[1]
    centred = record - record.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * count, dim=1)
    products = torch.fft.irfft(spectrum.abs().square(), n=2 * count, dim=1)[:, :count].mean(0)
    correlations = torch.where(products[:1] > 0, products / products[:1], 0.0)
    pairs = correlations[: count // 2 * 2].unflatten(0, (-1, 2)).sum(1)
    positive = (pairs > 0).cumprod(0)
    return (2 * (pairs * positive).sum(0) - 1).clamp(min=1.0)
