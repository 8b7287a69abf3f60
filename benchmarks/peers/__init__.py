"""The contenders of the benchmark: one adaptor a library."""

from __future__ import annotations

from benchmarks.peers import (
    bayesian_torch,
    blitz,
    ivon,
    lightning_uq_box,
    ours,
    posteriors,
    pyro,
    torch_uncertainty,
    torchbnn,
)

__all__ = ["CONTENDERS"]

CONTENDERS = tuple(
    adaptor.CONTENDER
    for adaptor in (
        ours,
        bayesian_torch,
        torchbnn,
        blitz,
        lightning_uq_box,
        torch_uncertainty,
        posteriors,
        pyro,
        ivon,
    )
)
