"""Posteriors: what predicts; over weights: draws, Gaussians, mixtures; dropout; averages."""

from lightning_bnn.posteriors.average import AveragePosterior
from lightning_bnn.posteriors.base import Evidence, Posterior
from lightning_bnn.posteriors.draws import DrawsPosterior
from lightning_bnn.posteriors.dropout import DropoutPosterior, mc_dropout
from lightning_bnn.posteriors.gaussian import GaussianPosterior
from lightning_bnn.posteriors.laplace import LaplacePosterior
from lightning_bnn.posteriors.linear import LinearPosterior
from lightning_bnn.posteriors.low_rank import LowRankPosterior
from lightning_bnn.posteriors.matrix_normal import MatrixNormalPosterior
from lightning_bnn.posteriors.mixture import MixturePosterior
from lightning_bnn.posteriors.moments import Moments
from lightning_bnn.posteriors.prior import PosteriorPrior
from lightning_bnn.posteriors.rank_one import RankOnePosterior
from lightning_bnn.posteriors.scales import prior_scales
from lightning_bnn.posteriors.weights import WeightPosterior
from lightning_bnn.storage.stream import DrawStream

__all__ = [
    "AveragePosterior",
    "DrawStream",
    "DrawsPosterior",
    "DropoutPosterior",
    "Evidence",
    "GaussianPosterior",
    "LaplacePosterior",
    "LinearPosterior",
    "LowRankPosterior",
    "MatrixNormalPosterior",
    "MixturePosterior",
    "Moments",
    "Posterior",
    "PosteriorPrior",
    "RankOnePosterior",
    "WeightPosterior",
    "mc_dropout",
    "prior_scales",
]
