"""A stream of standard normal numbers that owns its state.

On a CPU, float32 numbers come from a compiled generator where there is a C compiler
(:mod:`lightning_bnn.native.library`), all others from a ``torch.Generator``. Both are seeded by
one seed and saved together.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.native import library
from lightning_bnn.random.hashing import split_mix
from lightning_bnn.random.seeds import member_seed, random_seed, seeded_generator

__all__ = ["NoiseGenerator", "NormalStream"]


def lane_words(seed: int) -> Tensor:
    """The state of the compiled generator for a seed: 64 words of SplitMix64, never all zero.

    Example:
        >>> lane_words(0).shape, lane_words(0).dtype
        (torch.Size([64]), torch.int32)
    """
    # the lower and the upper half of each output
    return split_mix(seed, library.WORDS // 2).view(torch.int32)


class NormalStream:
    """Standard normal numbers from a seed, with a state that can be saved.

    Args:
        seed: The seed; by default one is taken from PyTorch's global generator, so that
            ``seed_everything`` decides it.

    Example:
        >>> stream = NormalStream(seed=1)
        >>> state = stream.state_dict()
        >>> first = stream.fill_(torch.empty(3))
        >>> stream.load_state_dict(state)
        >>> torch.equal(first, stream.fill_(torch.empty(3)))
        True
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = random_seed() if seed is None else seed
        self._restart("cpu")

    def _restart(self, kind: str | torch.device) -> None:
        self._generator = seeded_generator(self.seed, kind)
        self.seed = int(self.seed)
        self._lanes = lane_words(self.seed)
        self._integers = 0
        # Decided by the first use and kept: a stream does not change its kind midway.
        self._compiled: bool | None = None

    def fill_(self, tensor: Tensor) -> Tensor:
        """Fill ``tensor`` with standard normal numbers, in place."""
        if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
            native = self._library()
            if native is not None:
                whole = tensor
                if not tensor.is_contiguous():
                    whole = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                native.fill_normal(whole, self._lanes)
                return tensor if whole is tensor else tensor.copy_(whole)
        return tensor.normal_(generator=self._on(tensor.device))

    def integer(self) -> int:
        """One large integer, to seed noise that each rank or example has for itself."""
        if self._generator.device.type != "cpu":  # reading a number of it would make it wait
            self._integers += 1
            return member_seed(self.seed, self._integers, "integer")
        value = torch.empty((), dtype=torch.int64, device="cpu")
        return int(value.random_(generator=self._generator).numpy())

    def key(self) -> tuple[int, int] | None:
        """Two large integers, from which a compiled function makes noise by itself.

        None where nothing is compiled; then :meth:`fill_` serves.
        """
        if self._library() is None:
            return None
        numbers = torch.empty(2, dtype=torch.int64, device="cpu")
        first, second = numbers.random_(generator=self._on(numbers.device)).tolist()
        return first, second

    def _library(self) -> library.Library | None:
        if self._compiled is None:
            self._compiled = library.load() is not None
        if not self._compiled:
            return None
        native = library.load()
        if native is None:
            if os.environ.get("LIGHTNING_BNN_COMPILE") != "0":
                raise ConfigurationError(
                    "This stream of noise was begun by the compiled generator, which cannot be "
                    "built on this machine, so the run would not resume bit for bit. Install a C "
                    "compiler, or set LIGHTNING_BNN_COMPILE=0 to continue with other noise."
                )
            warnings.warn(
                "The noise continues from PyTorch's generator, because LIGHTNING_BNN_COMPILE=0: "
                "the run is as good, but not the one that would have been without the restart.",
                stacklevel=3,
            )
            self._compiled = False
        return native

    def _on(self, device: torch.device) -> torch.Generator:
        # The state of one kind of device means nothing to another, so a move starts a new
        # stream of the same seed. It happens at most once, before the first step.
        if self._generator.device.type != device.type:
            self._generator = torch.Generator(device).manual_seed(self.seed)
        return self._generator

    def state_dict(self) -> dict[str, Any]:
        """The seed, both generators' states, and the kind of device.

        It settles the kind of generator, so that all who load it use the same one.
        """
        if self._compiled is None:
            self._compiled = library.load() is not None
        return {
            "seed": self.seed,
            "device": self._generator.device.type,
            "state": self._generator.get_state(),
            "lanes": self._lanes.clone(),
            "integers": self._integers,
            "compiled": self._compiled,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the saved stream."""
        self.seed = int(state["seed"])
        kind = str(state["device"])
        if kind != "cpu" and not _available(kind):
            # A checkpoint from an accelerator opened without one: predictions need no noise,
            # and training cannot be bit-equal on another device anyway.
            self._restart("cpu")
            return
        self._generator = torch.Generator(kind)
        self._generator.set_state(torch.as_tensor(state["state"]).cpu())
        self._lanes = torch.as_tensor(state["lanes"]).cpu().clone()
        self._compiled = state["compiled"]
        self._integers = state.get("integers", 0)  # version 0.1 has none

    def __getstate__(self) -> dict[str, Any]:
        # Tensors go to a spawned process in shared memory: copies would move each other's lanes
        # on, and the state of a torch.Generator is gone when the process looks for it.
        state = self._generator.get_state().numpy().tobytes()
        generator = (self._generator.device.type, state)
        return {**vars(self), "_generator": generator, "_lanes": self._lanes.tolist()}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        kind, state = fields["_generator"]
        generator = torch.Generator(kind)
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        lanes = torch.tensor(fields["_lanes"], dtype=torch.int32, device="cpu")
        vars(self).update({**fields, "_generator": generator, "_lanes": lanes})


def _available(kind: str) -> bool:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == kind


class NoiseGenerator(nn.Module):
    """A :class:`NormalStream` as a module, whose state is in the ``state_dict``.

    The noise of a strategy must not depend on what else draws random numbers (shuffling, dropout,
    a validation loop), must be the same on every DDP rank, and must resume exactly.

    Args:
        seed: The seed; by default ``seed_everything`` decides it.

    Example:
        >>> noise = NoiseGenerator(seed=1)
        >>> state = noise.state_dict()
        >>> first = noise.stream.fill_(torch.empty(3))
        >>> noise.load_state_dict(state)
        <All keys matched successfully>
        >>> torch.equal(first, noise.stream.fill_(torch.empty(3)))
        True
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.stream = NormalStream(seed)

    def get_extra_state(self) -> dict[str, Any]:
        """The state of the stream."""
        return self.stream.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Resume the saved stream."""
        self.stream.load_state_dict(state)
