"""The rows of the ensemble benchmark."""

from __future__ import annotations

from benchmarks.ensemble_peers import ours, torch_uncertainty
from benchmarks.ensemble_peers.plain import ONE_BY_ONE, ONE_BY_ONE_FUSED

__all__ = ["CONTENDERS"]

CONTENDERS = (
    ONE_BY_ONE,
    ONE_BY_ONE_FUSED,
    ours.AUTO,
    ours.STACKED,
    ours.LOOP,
    torch_uncertainty.CONTENDER,
)
