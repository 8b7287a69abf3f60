"""The rows of the sampler benchmark: one adaptor a library."""

from __future__ import annotations

from benchmarks.sampler_peers import lightning_uq_box, ours, posteriors, torch_uncertainty

__all__ = ["LIBRARIES"]

LIBRARIES = (
    ours.LIBRARY,
    ours.STRATEGY,
    posteriors.LIBRARY,
    torch_uncertainty.LIBRARY,
    lightning_uq_box.LIBRARY,
)
