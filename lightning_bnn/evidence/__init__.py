"""Evidence of models, by sampling too, and averages over models by it."""

from lightning_bnn.evidence.averaging import (
    average,
    log_scores,
    model_probabilities,
    stacking_weights,
)
from lightning_bnn.evidence.sampling import annealed_importance, thermodynamic_integration
from lightning_bnn.posteriors import Evidence

__all__ = [
    "Evidence",
    "annealed_importance",
    "average",
    "log_scores",
    "model_probabilities",
    "stacking_weights",
    "thermodynamic_integration",
]
