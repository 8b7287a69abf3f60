"""Other libraries in :mod:`benchmarks.defaults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_bnn.predictive import Predictive

__all__ = ["PEERS", "Peer"]


class Peer(NamedTuple):
    """A method of another library."""

    distribution: str
    import_name: str
    fit: Callable[[Any], Callable[[Tensor], Predictive]]
    tasks: tuple[str, ...] = ("classification", "regression")


PEERS: dict[str, Peer] = {}
