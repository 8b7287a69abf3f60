"""Weights of a network as slices of one flat vector, and their gradient gathered back by hand.

Sampler and optimizer then work on one tensor whatever the number of layers. The gradient is
written into memory that is kept from step to step, because memory of the size of a network
costs more to get than to fill, and the prior's part is added in the same place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_bnn.priors import BoundPrior
from lightning_bnn.selection import FlatLayout

__all__ = ["KeptMemory", "split_weights"]


class KeptMemory:
    """Memory for gradients, kept and given out again when nobody looks at it any more.

    While gradients are accumulated, or kept by somebody, other memory serves.
    """

    def __init__(self) -> None:
        self._rooms: list[tuple[Tensor, ...]] = []

    def room(self, like: Tensor, count: int = 1) -> tuple[Tensor, ...]:
        """``count`` tensors of the kind of ``like``, with any values."""
        for room in self._rooms:
            if all(_is_free(tensor) and _alike(tensor, like) for tensor in room):
                return room
        self._rooms = [*self._rooms[-1:], tuple(torch.empty_like(like) for _ in range(count))]
        return self._rooms[-1]


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _is_free(tensor: Tensor) -> bool:
    """Whether no other tensor lies in the memory of this one.

    PyTorch counts the holders of a storage: here the tensor and the storage object itself.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(tensor.untyped_storage()._cdata) <= 2


def split_weights(
    flat: Tensor, layout: FlatLayout, prior: BoundPrior, memory: KeptMemory
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights by name, and −log p(w); leading axes of ``flat`` stay in front of both.

    Both are differentiable once in ``flat``.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn.priors import Normal
        >>> net = nn.Linear(2, 1)
        >>> own = dict(net.named_parameters())
        >>> flat = torch.zeros(4, 3, requires_grad=True)                # four chains
        >>> weights, energy = split_weights(
        ...     flat, FlatLayout(own), BoundPrior(Normal(), net, own), KeptMemory())
        >>> weights["weight"].shape, energy.shape
        (torch.Size([4, 1, 2]), torch.Size([4]))
    """
    *slices, energy = _Split.apply(flat, layout, prior, memory)
    return dict(zip(layout.names, slices, strict=True)), energy


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, layout: FlatLayout, prior: BoundPrior, memory: KeptMemory
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(flat)
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.prior, ctx.memory = layout, prior, memory
        return *layout.views(flat.detach()).values(), prior.energy(flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *by_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        (flat,) = ctx.saved_tensors
        *by_slices, by_energy = by_outputs
        (gradient,) = ctx.memory.room(flat)
        for part, by_slice in zip(ctx.layout.views(gradient).values(), by_slices, strict=True):
            part.zero_() if by_slice is None else part.copy_(by_slice)
        if by_energy is not None:
            ctx.prior.add_energy_gradient(gradient, by_energy, flat)
        # A new tensor on the kept memory: autograd takes it over instead of copying it.
        return gradient.detach(), None, None, None
