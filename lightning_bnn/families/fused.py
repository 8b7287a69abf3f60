r"""The usual mean-field draw in two compiled passes: float32 on a CPU, σ = exp ρ, Gaussian priors.

Written as single operations, a draw and its gradients move the flat vectors through memory some
25 times, which costs more than their arithmetic. Here one pass reads μ and ρ, makes the noise in
registers and writes only :math:`w = \mu + \sigma\varepsilon`, and one pass reads
:math:`g = \partial L/\partial w` where autograd left it, μ, ρ and w, and writes both gradients

.. math::
    \partial L/\partial\mu = g + \frac\lambda{s^2}(\mu - m), \qquad
    \partial L/\partial\rho = g\,(w - \mu) + \frac\lambda{s^2}\sigma^2 - \lambda

for a prior :math:`N(m, s^2)` and a KL of weight λ. σε is taken as w − μ, the step that the
network saw. The noise is made from a key of the stream (``NormalStream.key``), so it is the same
whatever the number of threads, and a draw can be made again.

Pruned weights are parked at m and s (:mod:`lightning_bnn.families.mean_field`), so that they
add nothing to the KL; w and both gradients are set to zero there afterwards.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_bnn.families.pruned import zero_pruned_
from lightning_bnn.families.workspace import Workspace
from lightning_bnn.native.library import Library, Slices, load
from lightning_bnn.priors import BoundPrior, Normal
from lightning_bnn.selection import FlatLayout

__all__ = ["can_fuse", "fused_draw"]


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
        type(one) is Normal and not isinstance(loc, Tensor)
        for _, _, one, loc, _ in prior.segments()
    )


def fused_draw(
    mean: Tensor,
    rho: Tensor,
    space: Workspace,
    prior: BoundPrior,
    layout: FlatLayout,
    bits: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The slices of a draw in a workspace that has a key, and KL(q‖p) in nats.

    All are differentiable once in ``mean`` and ``rho``, where :func:`can_fuse` says so. Where
    ``bits`` are 0 the draw is 0 and the gradients are; ``mean`` and ``rho`` are the prior's there.

    Example:
        >>> from torch import nn
        >>> net = nn.Linear(2, 1)
        >>> own = dict(net.named_parameters())
        >>> mean, rho = torch.zeros(3), torch.zeros(3)
        >>> space = Workspace(mean)
        >>> space.key = (1, 2)
        >>> if load() is not None:
        ...     weight, bias, kl = fused_draw(
        ...         mean, rho, space, BoundPrior(Normal(), net, own), FlatLayout(own))
        ...     assert weight.shape == (1, 2) and kl == 0
    """
    outputs: tuple[Tensor, ...] = _FusedDraw.apply(mean, rho, space, prior, layout, bits)
    return outputs


class _FusedDraw(torch.autograd.Function):
    """(μ, ρ) → (w by slices, KL), with the gradients of the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any,
        mean: Tensor,
        rho: Tensor,
        space: Workspace,
        prior: BoundPrior,
        layout: FlatLayout,
        bits: Tensor | None,
    ) -> tuple[Tensor, ...]:
        assert space.key is not None
        segments = tuple((stop, loc, scale) for _, stop, _, loc, scale in prior.segments())
        slices, constant = _tabulate(tuple(layout.sizes), segments)
        kl = _library().draw(space.weights, mean, rho, slices, space.key) + constant
        zero_pruned_(bits, space.weights)
        ctx.save_for_backward(mean, rho)
        ctx.set_materialize_grads(False)
        ctx.space, ctx.layout, ctx.slices, ctx.bits = space, layout, slices, bits
        ctx.state = space.state()
        return *space.slices(layout), mean.new_tensor(kl)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        mean, rho = ctx.saved_tensors
        space: Workspace = ctx.space
        space.check(ctx.state)
        *by_slices, by_kl = by_outputs
        space.warn_of_unused(ctx.layout.names, by_slices)
        weight = 0.0 if by_kl is None else by_kl.item()
        by_mean, by_rho = space.memory.room(mean, count=2)
        plain = [None if g is None else _in_plain_memory(g) for g in by_slices]
        _library().gradients(by_mean, by_rho, plain, weight, mean, rho, space.weights, ctx.slices)
        zero_pruned_(ctx.bits, by_mean, by_rho)
        # New tensors on the kept memory: autograd takes them over instead of copying them.
        return by_mean.detach(), by_rho.detach(), None, None, None, None


def _library() -> Library:
    library = load()
    assert library is not None  # or the stream had given no key
    return library


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
    constant = sum(n * (math.log(s) - 0.5) for n, s in zip(sizes, scales, strict=True))
    return Slices(sizes, locs, scales), constant


def _in_plain_memory(gradient: Tensor) -> Tensor:
    """The gradient itself where its numbers lie in order in memory, else a copy."""
    plain = (
        gradient.layout == torch.strided
        and gradient.is_contiguous()
        and not gradient.is_neg()
        and not gradient._is_zerotensor()
    )
    if plain:
        return gradient
    return torch.empty(gradient.shape, dtype=gradient.dtype, device="cpu").copy_(gradient)
