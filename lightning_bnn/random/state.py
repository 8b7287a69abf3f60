"""The state of the global random generators of torch, NumPy and Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["isolated_random_state", "random_state", "restore_random_state"]


def random_state() -> dict[str, Any]:
    """The state of the global generators of torch, NumPy and Python, as plain values."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    _, keys, position, has_gauss, cached = numpy
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [torch.from_numpy(keys.astype(np.int64)), int(position), has_gauss, cached],
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the global generators to a state that :func:`random_state` gave.

    Example:
        >>> state = random_state()
        >>> first = torch.rand(2)
        >>> restore_random_state(state)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    torch.set_rng_state(state["torch"].cpu())
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(  # noqa: NPY002
        ("MT19937", keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached)
    )
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    cuda = state.get("cuda", [])
    if torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([device_state.cpu() for device_state in cuda])


@contextmanager
def isolated_random_state(seed: int | None = None) -> Iterator[None]:
    """Leave the global generators as they were; inside, start them from ``seed``."""
    state = random_state()
    try:
        if seed is not None:
            # torch.manual_seed keeps a note of each call for devices that are not in use yet
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_available():
                torch.cuda.manual_seed_all(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            random.seed(seed)
        yield
    finally:
        restore_random_state(state)
