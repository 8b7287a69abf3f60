"""Many members or chains on a cluster of Ray, and one posterior read from storage."""

from lightning_bnn.launch.results import MemberResult
from lightning_bnn.launch.run import LaunchedRun, launch
from lightning_bnn.launch.stored import StoredRun
from lightning_bnn.launch.units import unit_seed

__all__ = ["LaunchedRun", "MemberResult", "StoredRun", "launch", "unit_seed"]
