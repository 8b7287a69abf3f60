"""Bayesian neural networks as an ordinary PyTorch Lightning job."""

from lightning_bnn.diagnostics import diagnose, to_arviz
from lightning_bnn.optimizers import IVON
from lightning_bnn.posteriors import (
    DrawsPosterior,
    GaussianPosterior,
    LaplacePosterior,
    LinearPosterior,
    LowRankPosterior,
    MixturePosterior,
    Moments,
    Posterior,
    WeightPosterior,
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
from lightning_bnn.strategies import (
    IVONBNN,
    SGMCMC,
    BayesianLinear,
    DeepEnsemble,
    LaplaceBNN,
    PolynomialRegression,
    Strategy,
    VariationalBNN,
)
from lightning_bnn.strategies.laplace import laplace
from lightning_bnn.target import Target

__all__ = [
    "IVON",
    "IVONBNN",
    "SGMCMC",
    "BayesianLinear",
    "DeepEnsemble",
    "DrawsPosterior",
    "GaussianPosterior",
    "LaplaceBNN",
    "LaplacePosterior",
    "LinearPosterior",
    "LowRankPosterior",
    "MixturePosterior",
    "Moments",
    "PolynomialRegression",
    "Posterior",
    "Predictive",
    "StackedModule",
    "Strategy",
    "Target",
    "VariationalBNN",
    "WeightPosterior",
    "compact",
    "diagnose",
    "laplace",
    "masked",
    "mean_network",
    "prune",
    "prune_curve",
    "signal_to_noise",
    "sparsity",
    "support",
    "to_arviz",
]
