"""Ten plain networks trained one after another: what an ensemble costs without any library.

Each takes its steps while its weights stay in the processor's caches, then the next one does. The
step is that of one network; the benchmark adds up the times of ten.
"""

from __future__ import annotations

from functools import partial

from benchmarks.peers.contender import Contender
from benchmarks.peers.plain import make_step

__all__ = ["ONE_BY_ONE", "ONE_BY_ONE_FUSED"]

ONE_BY_ONE = Contender("one by one, Adam", "torch", make_step)
ONE_BY_ONE_FUSED = Contender("one by one, fused Adam", "torch", partial(make_step, fused=True))
