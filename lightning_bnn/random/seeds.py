"""Seeds of members and chains.

A member's seed is a function of one root seed and the member's own number, never of the place,
the order or the attempt in which it runs. So chain 3 of 8 stacked chains, chain 3 run alone and
chain 3 run again after a failure see the same random numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lightning_bnn.checks import is_whole
from lightning_bnn.errors import ConfigurationError

__all__ = ["check_seed", "member_seed", "mix_seeds", "random_seed", "seeded_generator"]


def member_seed(root: int, member: int, purpose: str = "") -> int:
    """The seed of a member, 63 bits; another for each purpose.

    Example:
        >>> member_seed(0, 3) == member_seed(0, 3), member_seed(0, 3) == member_seed(0, 4)
        (True, False)
        >>> member_seed(0, 3, "start") == member_seed(0, 3)
        False
    """
    key = (member, *purpose.encode())
    words = np.random.SeedSequence(root, spawn_key=key).generate_state(2, np.uint32)
    return (int(words[0]) << 32 | int(words[1])) >> 1


def mix_seeds(*numbers: int) -> int:
    """One 32-bit seed from several numbers.

    Example:
        >>> mix_seeds(1, 2) == mix_seeds(1, 2), mix_seeds(1, 2) == mix_seeds(2, 1)
        (True, False)
    """
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def random_seed() -> int:
    """A seed from PyTorch's global generator, so that ``seed_everything`` decides it.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> 0 <= random_seed() < 2**62
        True
    """
    return int(torch.randint(2**62, ()).item())


def check_seed(seed: Any) -> int:
    """The seed, if it is a whole number of at most 64 bits.

    Example:
        >>> check_seed(0.5)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: seed= is a whole number of 64 bits; got 0.5.
    """
    if not is_whole(seed) or not -(2**63) <= seed < 2**64:
        raise ConfigurationError(f"seed= is a whole number of 64 bits; got {seed!r:.80}.")
    return int(seed)


def seeded_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of random numbers that a seed of at most 64 bits decides.

    Example:
        >>> seeded_generator("x")
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: seed= is a whole number of 64 bits; got 'x'.
    """
    return torch.Generator(device).manual_seed(check_seed(seed))
