"""Which numbers of a flat vector remain after pruning, kept in the ``state_dict``.

The mask is a buffer that is there only once something was pruned, so that a module without pruning
costs nothing and reads and writes the checkpoints that it always did. Loading makes the module
follow the checkpoint: with its mask, or without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.selection import FlatLayout

__all__ = ["Kept", "KeptTensors", "zero_pruned_"]


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def zero_pruned_(bits: Tensor | None, *flats: Tensor) -> None:
    """Set vectors to exactly +0 wherever something was pruned, in place; also -0 and NaN.

    Args:
        bits: What :meth:`Kept.bits` gives for their dtype.
        flats: The vectors.

    Example:
        >>> weights = torch.tensor([-1.0, float("nan")])
        >>> zero_pruned_(torch.tensor([-1, 0], dtype=torch.int32), weights)
        >>> weights
        tensor([-1.,  0.])
    """
    if bits is not None:
        for flat in flats:
            flat.view(bits.dtype).bitwise_and_(bits)  # several times faster than masked_fill_


class Kept(nn.Module):
    """A module with a flat boolean buffer ``keep``, or None while nothing is pruned.

    Its ``layout`` says which stretch of the buffer belongs to which tensor.

    Example:
        >>> module = KeptTensors({"a": torch.zeros(2), "b": torch.zeros(1)})
        >>> module.keep, list(module.state_dict())
        (None, [])
        >>> module.restrict(torch.tensor([True, False, True]))
        >>> module.masks()
        {'a': tensor([ True, False])}
        >>> module.masked(torch.ones(3))
        tensor([1., 0., 1.])
    """

    keep: Tensor | None
    layout: FlatLayout

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keep", None)
        self._bits: tuple[Tensor, Tensor] | None = None  # of which mask, and they themselves

    def bits(self, like: Tensor) -> Tensor | None:
        """The mask as whole numbers of the width of ``like``: all bits set where a weight stays."""
        if self.keep is None:
            return None
        word = _WORDS[like.element_size()]
        if self._bits is None or self._bits[0] is not self.keep or self._bits[1].dtype != word:
            self._bits = self.keep, self.keep.to(word).neg_()
        return self._bits[1]

    def restrict(self, keep: Tensor) -> None:
        """Keep only what ``keep`` keeps, of what was kept before."""
        self.keep = keep.clone() if self.keep is None else self.keep & keep

    def masked(self, flat: Tensor) -> Tensor:
        """A flat vector with exact zeros where pruned, differentiable; itself if nothing is."""
        return flat if self.keep is None else flat.masked_fill(~self.keep, 0)

    def masks(self) -> dict[str, Tensor]:
        """By name, what remains of each tensor that lost something."""
        if self.keep is None:
            return {}
        views = self.layout.views(self.keep)
        return {name: keep for name, keep in views.items() if not keep.all()}

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any
    ) -> None:
        """Take the mask of a checkpoint, or drop the own one where the checkpoint has none."""
        saved = state_dict.get(f"{prefix}keep")
        if saved is not None:
            # of the own length: PyTorch compares the shapes of what it then loads
            like = next(self.parameters(), saved)
            self.keep = torch.ones(self.layout.size, dtype=torch.bool, device=like.device)
        elif any(key.startswith(prefix) for key in state_dict):  # else it speaks of other modules
            self.keep = None
        super()._load_from_state_dict(state_dict, prefix, *arguments, **options)


class KeptTensors(Kept):
    """What remains of named tensors that lie elsewhere: point estimates and buffers.

    Args:
        tensors: They, in order.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.layout = FlatLayout(tensors)

    def zeroed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of the tensors that lost something, with exact zeros there, differentiable.

        Example:
            >>> module = KeptTensors({"a": torch.ones(2), "b": torch.ones(1)})
            >>> module.restrict(torch.tensor([True, False, True]))
            >>> module.zeroed({"a": torch.ones(2), "b": torch.ones(1)})
            {'a': tensor([1., 0.])}
        """
        return {
            name: tensors[name].masked_fill(~keep.to(tensors[name].device), 0)
            for name, keep in self.masks().items()
            if name in tensors
        }
