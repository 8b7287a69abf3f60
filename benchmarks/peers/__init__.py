"""The contenders of the benchmark: one adaptor a library."""

from __future__ import annotations

from benchmarks.peers import (
    bayesian_torch,
    blitz,
    ivon,
    lightning_uq_box,
    our_ivon,
    ours,
    posteriors,
    pyro,
    torch_uncertainty,
    torchbnn,
)
from benchmarks.peers.plain import FUSED

__all__ = ["CONTENDERS"]

CONTENDERS = (
    ours.CONTENDER,
    ours.UNFUSED,
    our_ivon.CONTENDER,
    our_ivon.PLAIN_LOOP,
    FUSED,
    bayesian_torch.CONTENDER,
    torchbnn.CONTENDER,
    blitz.CONTENDER,
    lightning_uq_box.CONTENDER,
    torch_uncertainty.CONTENDER,
    posteriors.CONTENDER,
    pyro.CONTENDER,
    ivon.CONTENDER,
)
