r"""The usual mean-field draw in two compiled passes: float32 on a CPU, σ = exp ρ, Gaussian priors.

Written as single operations, a draw and its gradients move the flat vectors through memory some
25 times, which costs more than their arithmetic. Here one pass reads μ and ρ, makes the noise in
registers and writes only :math:`w = \mu + \sigma\varepsilon`, and one pass reads
:math:`g = \partial L/\partial w` where autograd left it, μ, ρ and w, and writes both gradients

.. math::
    \partial L/\partial\mu = g + \frac\lambda{s^2}(\mu - m), \qquad
    \partial L/\partial\rho = g\,(w - \mu) + \frac\lambda{s^2}\sigma^2 - \lambda

for a prior :math:`N(m, s^2)` and a KL of weight λ. A learned scale
(:class:`~lightning_bnn.priors.Learned`) follows from sums that the first pass makes, too. σε is
taken as w − μ, the step that the network saw. The noise is made from a key of the stream
(``NormalStream.key``), so it is the same whatever the number of threads, and a draw can be made
again.

Pruned weights are parked at m and s (:mod:`lightning_bnn.families.mean_field`), so that they
add nothing to the KL; the caller sets w and both gradients to zero there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lightning_bnn.families.workspace import Workspace
from lightning_bnn.hyperprior import GroupScales
from lightning_bnn.native.library import Library, Slices, load
from lightning_bnn.priors import BoundPrior, Learned, Normal
from lightning_bnn.selection import FlatLayout

__all__ = ["can_fuse", "fused_draw", "fused_gradients"]

_HALF_LOG_TWO_PI_E = 0.5 * math.log(2 * math.pi * math.e)


def can_fuse(mean: Tensor, rho: Tensor, prior: BoundPrior) -> bool:
    """Whether the compiled passes are for these tensors and this prior.

    Example:
        >>> from torch import nn
        >>> net = nn.Linear(2, 1, bias=False)
        >>> prior = BoundPrior(Normal(), net, {"weight": net.weight})
        >>> [can_fuse(mean, mean, prior) for mean in (torch.zeros(2), torch.zeros(2).double())]
        [True, False]
    """
    return all(
        flat.device.type == "cpu" and flat.dtype == torch.float32 and flat.is_contiguous()
        for flat in (mean, rho)
    ) and all(
        type(density) is Normal and not isinstance(loc, Tensor)
        for _, _, density, loc, _ in prior.segments()
    )


def fused_draw(
    mean: Tensor, rho: Tensor, space: Workspace, prior: BoundPrior, layout: FlatLayout
) -> tuple[Slices, Tensor]:
    """Write the draw for the key of a workspace into it, where :func:`can_fuse` says so.

    Returns:
        What :func:`fused_gradients` needs, and KL(q‖p) in nats.

    Example:
        >>> from torch import nn
        >>> net = nn.Linear(2, 1)
        >>> tensors = dict(net.named_parameters())
        >>> mean, rho = torch.zeros(3), torch.zeros(3)
        >>> space = Workspace(mean)
        >>> space.key = (1, 2)
        >>> prior = BoundPrior(Normal(), net, tensors)
        >>> if load() is not None:
        ...     _, kl = fused_draw(mean, rho, space, prior, FlatLayout(tensors))
        ...     assert kl == 0 and (space.weights != 0).all()
    """
    assert space.key is not None
    segments = tuple(
        (stop, loc, math.inf if isinstance(density.scale, Learned) else scale)
        for _, stop, density, loc, scale in prior.segments()
    )
    slices, constant = _tabulate(tuple(layout.sizes), segments)
    kl, sums = _library().draw(space.weights, mean, rho, slices, space.key)
    if prior.learned is not None:
        squares = [s for s, scale in zip(sums, slices.scales, strict=True) if scale == math.inf]
        slices, energy = _with_learned(slices, prior.learned, squares)
        kl += energy
    return slices, mean.new_tensor(kl + constant)


def fused_gradients(
    by_mean: Tensor,
    by_rho: Tensor,
    by_slices: Sequence[Tensor | None],
    by_kl: Tensor | None,
    mean: Tensor,
    rho: Tensor,
    space: Workspace,
    slices: Slices,
) -> None:
    """Write the gradients of ``mean`` and ``rho`` from those of a draw's slices and of its KL."""
    weight = 0.0 if by_kl is None else by_kl.item()
    # the compiled pass reads dense numbers that lie in order in memory
    plain = [None if g is None else g.to_dense().resolve_neg().contiguous() for g in by_slices]
    _library().gradients(by_mean, by_rho, plain, weight, mean, rho, space.weights, slices)


def _library() -> Library:
    library = load()
    assert library is not None  # or the stream had given no key
    return library


def _with_learned(
    slices: Slices, learned: GroupScales, squares: Sequence[float]
) -> tuple[Slices, float]:
    """The slices with learned scales as they stand, and what these add to the KL."""
    sums = torch.tensor(squares, dtype=torch.float64, device="cpu")
    scales = iter(learned.precisions(sums).rsqrt().tolist())
    current = [next(scales) if scale == math.inf else scale for scale in slices.scales]
    return Slices(slices.sizes, slices.locs, current), learned.energy(sums).item()


@lru_cache(maxsize=16)
def _tabulate(
    sizes: tuple[int, ...], segments: tuple[tuple[int, float, float], ...]
) -> tuple[Slices, float]:
    """The prior of each slice, and the constants of the KL; a segment holds whole slices."""
    remaining = iter(segments)
    stop, loc, scale = next(remaining)
    locs, scales, end = [], [], 0
    for size in sizes:
        end += size
        while end > stop:
            stop, loc, scale = next(remaining)
        locs.append(loc)
        scales.append(scale)
    # what the constants of E[−log p] leave of those of the entropy
    constant = sum(
        n * (-_HALF_LOG_TWO_PI_E if s == math.inf else math.log(s) - 0.5)
        for n, s in zip(sizes, scales, strict=True)
    )
    return Slices(sizes, locs, scales), constant
