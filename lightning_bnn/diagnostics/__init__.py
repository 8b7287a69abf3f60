"""Whether chains have converged: R-hat and ESS through ArviZ, in function space first."""

from lightning_bnn.diagnostics.arviz import rank_figure, to_arviz, trace_figure
from lightning_bnn.diagnostics.diagnosis import Diagnosis, diagnose
from lightning_bnn.diagnostics.statistics import Statistics

__all__ = ["Diagnosis", "Statistics", "diagnose", "rank_figure", "to_arviz", "trace_figure"]
