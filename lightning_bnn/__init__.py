"""Bayesian neural networks as an ordinary PyTorch Lightning job."""

from lightning_bnn.diagnostics import diagnose, to_arviz
from lightning_bnn.posteriors import (
    DrawsPosterior,
    DropoutPosterior,
    GaussianPosterior,
    LowRankPosterior,
    MixturePosterior,
    Moments,
    Posterior,
    WeightPosterior,
    mc_dropout,
)
from lightning_bnn.predictive import Predictive
from lightning_bnn.pruning import (
    compact,
    masked,
    mean_network,
    prune,
    prune_curve,
    signal_to_noise,
    sparsity,
    support,
)
from lightning_bnn.stacked import StackedModule
from lightning_bnn.strategies import SGMCMC, DeepEnsemble, MCDropoutBNN, Strategy, VariationalBNN
from lightning_bnn.target import Target

__all__ = [
    "SGMCMC",
    "DeepEnsemble",
    "DrawsPosterior",
    "DropoutPosterior",
    "GaussianPosterior",
    "LowRankPosterior",
    "MCDropoutBNN",
    "MixturePosterior",
    "Moments",
    "Posterior",
    "Predictive",
    "StackedModule",
    "Strategy",
    "Target",
    "VariationalBNN",
    "WeightPosterior",
    "compact",
    "diagnose",
    "masked",
    "mc_dropout",
    "mean_network",
    "prune",
    "prune_curve",
    "signal_to_noise",
    "sparsity",
    "support",
    "to_arviz",
]
