"""The curvature of the log likelihood in a network's weights, by structure; its evidence."""

from lightning_bnn.curvature.approximation import (
    Approximation,
    Structure,
    approximate,
    check_structure,
    collect,
    without_curvature,
)
from lightning_bnn.curvature.base import Covariance, Processes
from lightning_bnn.curvature.evidence import Scales
from lightning_bnn.curvature.linear import LinearisedNetwork

__all__ = [
    "Approximation",
    "Covariance",
    "LinearisedNetwork",
    "Processes",
    "Scales",
    "Structure",
    "approximate",
    "check_structure",
    "collect",
    "without_curvature",
]
