"""Gaussian noise from a generator of its own, kept in the state dict.

The noise of a strategy must not depend on what else draws random numbers (shuffling, dropout,
a validation loop), must be the same on every DDP rank, and must go on where it was after a
restart. So it comes from an explicit ``torch.Generator`` whose state is part of
``state_dict()`` and with it of every checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["NoiseGenerator"]


class NoiseGenerator(nn.Module):
    """A ``torch.Generator`` that follows its module to a device and into checkpoints.

    Args:
        seed: The seed; by default one is taken from PyTorch's global generator, so that
            ``seed_everything`` decides it.

    Example:
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
        if seed is None:
            seed = int(torch.randint(2**62, ()).item())
        self.seed = int(seed)
        self._generator = torch.Generator().manual_seed(self.seed)

    def fill_normal_(self, tensor: Tensor) -> Tensor:
        """Fill ``tensor`` with standard normal numbers, in place."""
        return tensor.normal_(generator=self._on(tensor.device))

    def integer(self) -> int:
        """One large integer, to seed noise that each rank or example has for itself."""
        generator = self._generator
        value = torch.empty((), dtype=torch.int64, device=generator.device)
        return int(value.random_(generator=generator).item())

    def _on(self, device: torch.device) -> torch.Generator:
        # The state of one kind of device means nothing to another, so a move starts a new
        # stream of the same seed. It happens at most once, before the first step.
        if self._generator.device.type != device.type:
            self._generator = torch.Generator(device).manual_seed(self.seed)
        return self._generator

    def get_extra_state(self) -> dict[str, object]:
        """The seed, the state and the kind of device that it belongs to."""
        return {
            "seed": self.seed,
            "device": self._generator.device.type,
            "state": self._generator.get_state(),
        }

    def set_extra_state(self, state: dict[str, object]) -> None:
        """Go on where the saved generator was."""
        self.seed = int(state["seed"])  # type: ignore[call-overload]
        kind = str(state["device"])
        if kind != "cpu" and not _available(kind):
            # A checkpoint from an accelerator opened without one: predictions need no noise,
            # and training cannot be bit-equal on another device anyway.
            self._generator = torch.Generator().manual_seed(self.seed)
            return
        self._generator = torch.Generator(kind)
        self._generator.set_state(torch.as_tensor(state["state"]).cpu())


def _available(kind: str) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == kind
