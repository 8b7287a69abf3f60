"""What one draw of the weights needs, kept from step to step: fresh memory would cost more."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.flat import KeptMemory
from lightning_bnn.selection import FlatLayout

__all__ = ["Workspace"]


class Workspace:
    """The flat weights of one draw, and the noise it is made of: numbers, or a key to them.

    Args:
        like: A tensor of the kind of the flat weights.

    Example:
        >>> space = Workspace(torch.zeros(3))
        >>> space.weights.shape, space.key
        (torch.Size([3]), None)
    """

    def __init__(self, like: Tensor) -> None:
        self.weights = _empty_like(like)
        # What the compiled draw makes its noise from; None where ``noise`` holds the numbers.
        self.key: tuple[int, int] | None = None
        self.filled = False  # whether the noise was drawn yet
        self.memory = KeptMemory()
        self._warned = False
        self._views: list[Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_views": None}  # in a copy, their version counter would be another

    @cached_property
    def noise(self) -> Tensor:
        """ε, for all but the compiled draw."""
        return _empty_like(self.weights)

    @cached_property
    def sd(self) -> Tensor:
        """σ, for all but the compiled draw."""
        return _empty_like(self.weights)

    def slices(self, layout: FlatLayout) -> list[Tensor]:
        """The draw by slices, as outputs for autograd.

        They lie in kept memory and share its version counter: were the workspace used again
        before backward, autograd would not take it for the old draw.
        """
        if self._views is None:  # one layout, that of the family, comes here ever
            self._views = list(layout.views(self.weights).values())
        return [view.detach() for view in self._views]

    def state(self) -> tuple[object, int]:
        """Changes whenever the noise is drawn again or the buffers serve another draw."""
        noise = self.noise._version if self.key is None else self.key
        return noise, self.weights._version

    def check(self, state: tuple[object, int]) -> None:
        """Raise unless the workspace still holds the draw that left this state."""
        if self.state() != state:
            raise RuntimeError(
                "The noise of this draw was written over before backward. Give every draw that "
                "is alive at the same time its own workspace: family.workspace(index)."
            )

    def warn_of_unused(self, names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
        """Say once which weights got no gradient, where others did."""
        unused = [n for n, g in zip(names, gradients, strict=True) if g is None]
        if unused and len(unused) < len(gradients) and not self._warned:
            self._warned = True
            warnings.warn(
                f"The weights {unused[:3]} ({len(unused)} in all) took no part in the loss. Either "
                "the network does not use them, or they lie inside torch.utils.checkpoint, which "
                "computes again with other weights: then turn it off, the gradients are wrong.",
                stacklevel=3,
            )


def _empty_like(like: Tensor) -> Tensor:
    # made inside of inference mode, a buffer could never serve a training step
    with torch.inference_mode(False):
        return torch.empty_like(like)
