"""Bayesian neural networks as an ordinary PyTorch Lightning job."""

from lightning_bnn.diagnostics import diagnose, to_arviz
from lightning_bnn.evidence import average
from lightning_bnn.optimizers import IVON
from lightning_bnn.posteriors import (
    AveragePosterior,
    DrawsPosterior,
    DropoutPosterior,
    GaussianPosterior,
    LaplacePosterior,
    LinearPosterior,
    LowRankPosterior,
    MixturePosterior,
    Moments,
    Posterior,
    PosteriorPrior,
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
from lightning_bnn.strategies import (
    IVONBNN,
    SGMCMC,
    BayesianLinear,
    DeepEnsemble,
    LaplaceBNN,
    MCDropoutBNN,
    PolynomialRegression,
    Strategy,
    VariationalBNN,
)
from lightning_bnn.strategies.laplace_function import laplace
from lightning_bnn.target import Target

__all__ = [
    "IVON",
    "IVONBNN",
    "SGMCMC",
    "AveragePosterior",
    "BayesianLinear",
    "DeepEnsemble",
    "DrawsPosterior",
    "DropoutPosterior",
    "GaussianPosterior",
    "LaplaceBNN",
    "LaplacePosterior",
    "LinearPosterior",
    "LowRankPosterior",
    "MCDropoutBNN",
    "MixturePosterior",
    "Moments",
    "PolynomialRegression",
    "Posterior",
    "PosteriorPrior",
    "Predictive",
    "StackedModule",
    "Strategy",
    "Target",
    "VariationalBNN",
    "WeightPosterior",
    "average",
    "compact",
    "diagnose",
    "laplace",
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
