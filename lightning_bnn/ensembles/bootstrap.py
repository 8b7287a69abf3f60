r"""The Bayesian bootstrap: each member fits the data under random weights of its own.

Member m minimises

.. math::
    -\tfrac1n\sum_i v_{mi}\log p(y_i\mid x_i,w) - \tfrac1N\log p(w),
    \qquad v_m \sim N\cdot\mathrm{Dirichlet}(1,\dots,1),

with weights that stay the same for the whole training (Rubin, 1981, *The Bayesian Bootstrap*; with
a prior, Newton, Polson and Xu, 2021, *Weighted Bayesian Bootstrap for Scalable Posterior
Distributions*). A Dirichlet vector is one of independent Exp(1) numbers divided by their sum, so

.. math:: v_{mi} = e_{mi} \Big/ \tfrac1N\sum_j e_{mj},

with :math:`e_{mi}` a function of the member's seed and the example's index (see
:mod:`lightning_bnn.random.hashing`). Nothing of the size of the data is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bnn.random.hashing import exponentials, stream_seeds

__all__ = ["bootstrap_means", "bootstrap_weights"]

_STREAM = 1


def bootstrap_means(seeds: Tensor, examples: int | Tensor, chunk: int = 2**16) -> Tensor:
    """The mean of each member's Exp(1) numbers over all examples, (M,) float64.

    Args:
        seeds: One seed for each member, (M,) int64.
        examples: The number of examples in the data set, whose indices are 0 to N − 1; or the
            indices, where training keeps to a part of it.
        chunk: At most about how many numbers are held at once.

    Example:
        >>> seeds = torch.tensor([3, 4])
        >>> weights = bootstrap_weights(seeds, torch.arange(7), bootstrap_means(seeds, 7))
        >>> weights.mean(1).round(decimals=9)
        tensor([1., 1.], dtype=torch.float64)
    """
    keys = stream_seeds(seeds, _STREAM)
    total = torch.zeros(len(seeds), dtype=torch.float64, device=seeds.device)
    size = max(1, chunk // len(seeds))
    count = examples if isinstance(examples, int) else len(examples)
    for start in range(0, count, size):
        if isinstance(examples, int):
            indices = torch.arange(start, min(start + size, count), device=seeds.device)
        else:
            indices = examples[start : start + size].to(seeds.device)
        total += exponentials(keys, indices).sum(1)
    return total / count


def bootstrap_weights(seeds: Tensor, indices: Tensor, means: Tensor) -> Tensor:
    """The weight of each example for each member, (M, B) float64, with mean 1 over all examples.

    Args:
        seeds: One seed for each member, (M,) int64.
        indices: The examples' indices in the data set: (B,) for all members, or (M, B).
        means: What :func:`bootstrap_means` gives for the seeds and the whole data set.

    Example:
        >>> seeds = torch.tensor([3, 4])
        >>> means = bootstrap_means(seeds, 100)
        >>> both = bootstrap_weights(seeds, torch.tensor([42, 7]), means)
        >>> alone = bootstrap_weights(seeds[1:], torch.tensor([7]), means[1:])
        >>> torch.equal(both[1:, 1:], alone)
        True
    """
    return exponentials(stream_seeds(seeds, _STREAM), indices) / means[:, None]
