"""Bayesian neural networks as an ordinary PyTorch Lightning job."""

from lightning_bnn.posteriors import (
    DrawsPosterior,
    GaussianPosterior,
    LowRankPosterior,
    MixturePosterior,
    Posterior,
)
from lightning_bnn.predictive import Predictive
from lightning_bnn.pruning import prune_curve, signal_to_noise
from lightning_bnn.stacked import StackedModule
from lightning_bnn.strategies import SGMCMC, DeepEnsemble, Strategy, VariationalBNN
from lightning_bnn.target import Target

__all__ = [
    "SGMCMC",
    "DeepEnsemble",
    "DrawsPosterior",
    "GaussianPosterior",
    "LowRankPosterior",
    "MixturePosterior",
    "Posterior",
    "Predictive",
    "StackedModule",
    "Strategy",
    "Target",
    "VariationalBNN",
    "prune_curve",
    "signal_to_noise",
]
