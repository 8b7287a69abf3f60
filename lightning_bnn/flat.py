"""Weights of a network as slices of one flat vector, and their gradient gathered back by hand.

Sampler and optimizer then work on one tensor whatever the number of layers. The gradient is
written into memory that is kept from step to step, because memory of the size of a network
costs more to get than to fill, and the prior's part is added in the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_bnn.selection import FlatLayout

__all__ = ["FlatPrior", "KeptMemory", "energies_in_chunks", "split_weights"]


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


class FlatPrior(Protocol):
    """What is asked of a prior of flat weights, such as a BoundPrior."""

    def precisions(self, weights: Tensor) -> list[float | Tensor] | None:
        """1/scale² of each tensor where all have Gaussians around 0, else None."""

    def energy(self, weights: Tensor) -> Tensor:
        """−log p(w), summed over the last axis."""

    def add_energy_gradient(self, gradient: Tensor, weight: Tensor, weights: Tensor) -> None:
        """Add ``weight`` times the gradient of :meth:`energy`, in place."""


def split_weights(
    flat: Tensor, layout: FlatLayout, prior: FlatPrior, memory: KeptMemory
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights by name, and −log p(w); leading axes of ``flat`` stay in front of both.

    Both are differentiable once in ``flat``.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn.priors import BoundPrior, Normal
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


_SMALL = 50_000  # numbers: below it, calls cost more than passes over memory


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, layout: FlatLayout, prior: FlatPrior, memory: KeptMemory
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
        used = [by_slice for by_slice in by_slices if by_slice is not None]
        whole = by_energy is not None and len(used) == len(by_slices)
        precisions = ctx.prior.precisions(flat) if whole else None
        if precisions is not None and len(set(precisions)) == 1 and flat.numel() < _SMALL:
            rows = [by_slice.reshape(*flat.shape[:-1], -1) for by_slice in used]
            torch.cat(rows, dim=-1, out=gradient)
            gradient.addcmul_(flat, (by_energy * precisions[0])[..., None])
            return gradient.detach(), None, None, None
        parts = list(ctx.layout.views(gradient).values())
        if precisions is not None:
            assert by_energy is not None
            # the prior's part in the same pass over the weights
            factors = {precision: by_energy * precision for precision in set(precisions)}
            weights = ctx.layout.views(flat).values()
            for part, by_own, own, precision in zip(parts, used, weights, precisions, strict=True):
                ones = [1] * (own.dim() - by_energy.dim())
                factor = factors[precision].view(*by_energy.shape, *ones)
                torch.addcmul(by_own, own, factor, out=part)
            return gradient.detach(), None, None, None
        for part, by_slice in zip(parts, by_slices, strict=True):
            part.zero_() if by_slice is None else part.copy_(by_slice)
        if by_energy is not None:
            ctx.prior.add_energy_gradient(gradient, by_energy, flat)
        # A new tensor on the kept memory: autograd takes it over instead of copying it.
        return gradient.detach(), None, None, None


def energies_in_chunks(
    run: Callable[..., Tensor],
    chunk: int,
    memory: KeptMemory,
    *stacked: Tensor,
    scale: float = 1.0,
) -> Tensor:
    """The energies of all members, (M,), of which at most ``chunk`` run at a time.

    Each chunk runs forward and backward before the next begins, so that the activations of no
    more than ``chunk`` members are held at once; what stays is the gradient. It can be asked for
    once.

    Args:
        run: Gives the energies (m,) of some members from their ``rows``, a slice, and their rows
            of ``stacked``.
        chunk: The most members that run at a time.
        memory: Memory for the gradient of the first of ``stacked``.
        stacked: Tensors with a leading axis of members.
        scale: The energies are multiplied by it for the gradient, which then is divided by it, so
            that small numbers of half precision do not vanish on the way.

    Example:
        >>> weights = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
        >>> squares = lambda rows, weights: weights.square().sum(1)
        >>> energies = energies_in_chunks(squares, 2, KeptMemory(), weights)
        >>> energies.sum().backward()
        >>> weights.grad.flatten()
        tensor([2., 4., 6.])
    """
    energies: Tensor = _InChunks.apply(run, chunk, memory, scale, *stacked)
    return energies


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., Tensor],
        chunk: int,
        memory: KeptMemory,
        scale: float,
        *stacked: Tensor,
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        first, *others = stacked
        rooms = [memory.room(first)[0], *map(torch.empty_like, others)] if wanted else []
        # new tensors on the kept memory: it counts as taken until the backward pass
        gradients = [room.detach() for room in rooms]
        energies = []
        for start in range(0, len(first), chunk):
            rows = slice(start, min(start + chunk, len(first)))
            own = [tensor.detach()[rows].requires_grad_(wanted) for tensor in stacked]
            with torch.set_grad_enabled(wanted):
                values = run(rows, *own)
                total = values.sum() if scale == 1.0 else values.sum() * scale
            if wanted:
                by_own = torch.autograd.grad(total, own, materialize_grads=True)
                for gradient, part in zip(gradients, by_own, strict=True):
                    gradient[rows] = part if scale == 1.0 else part / scale
            energies.append(values.detach())
        ctx.gradients = gradients
        return torch.cat(energies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_energies: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        # the usual factor is 1: looking saves a pass over all weights (and elsewhere than on a
        # CPU would make the host wait)
        if by_energies.device.type == "cpu" and (by_energies.numpy() == 1).all():
            return None, None, None, None, *gradients
        for gradient in gradients:
            gradient.mul_(by_energies.view(-1, *[1] * (gradient.dim() - 1)))
        return None, None, None, None, *gradients
