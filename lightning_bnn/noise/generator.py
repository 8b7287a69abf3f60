"""A stream of Gaussian noise as a module, so that it lies in the state dict.

The noise of a strategy must not depend on what else draws random numbers (shuffling, dropout,
a validation loop), must be the same on every DDP rank, and must go on where it was after a
restart. So it comes from a stream of its own whose state is part of ``state_dict()`` and with
it of every checkpoint.
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_bnn.noise.stream import NormalStream

__all__ = ["NoiseGenerator"]


class NoiseGenerator(nn.Module):
    """A :class:`~lightning_bnn.noise.NormalStream` that goes with its module into checkpoints.

    Args:
        seed: The seed; by default one is taken from PyTorch's global generator, so that
            ``seed_everything`` decides it.

    Example:
        >>> import torch
        >>> noise = NoiseGenerator(seed=1)
        >>> state = noise.state_dict()
        >>> first = noise.fill_normal_(torch.empty(3))
        >>> noise.load_state_dict(state)
        <All keys matched successfully>
        >>> torch.equal(first, noise.fill_normal_(torch.empty(3)))
        True
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.stream = NormalStream(seed)

    @property
    def seed(self) -> int:
        """The seed of the stream."""
        return self.stream.seed

    def fill_normal_(self, tensor: Tensor) -> Tensor:
        """Fill ``tensor`` with standard normal numbers, in place."""
        return self.stream.fill_(tensor)

    def integer(self) -> int:
        """One large integer, to seed noise that each rank or example has for itself."""
        return self.stream.integer()

    def key(self) -> tuple[int, int] | None:
        """Two large integers for a compiled function that makes noise, or None without one."""
        return self.stream.key()

    def get_extra_state(self) -> dict[str, object]:
        """The state of the stream."""
        return self.stream.state_dict()

    def set_extra_state(self, state: dict[str, object]) -> None:
        """Go on where the saved stream was."""
        self.stream.load_state_dict(state)
