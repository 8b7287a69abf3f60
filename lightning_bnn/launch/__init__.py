"""Many members or chains on a cluster of Ray, and one posterior read from storage."""

from lightning_bnn.launch.backend import Attempt, Backend, Outcome
from lightning_bnn.launch.member import attempt_outcome
from lightning_bnn.launch.run import LaunchedRun, launch
from lightning_bnn.launch.stored import MemberResult, StoredRun, load_posterior, load_run
from lightning_bnn.launch.units import unit_seed

__all__ = [
    "Attempt",
    "Backend",
    "LaunchedRun",
    "MemberResult",
    "Outcome",
    "StoredRun",
    "attempt_outcome",
    "launch",
    "load_posterior",
    "load_run",
    "unit_seed",
]
