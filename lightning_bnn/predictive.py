"""Predictions with honest uncertainty: mixtures over draws of the posterior.

Every likelihood has its own kind of predictive, in the likelihood's file;
:meth:`Likelihood.predictive` makes it from the stacked outputs of a network, so that nobody has to
choose. What they have in common is in :mod:`lightning_bnn.mixtures`.
"""

from lightning_bnn.likelihoods.bernoulli import BernoulliPredictive
from lightning_bnn.likelihoods.categorical import CategoricalPredictive
from lightning_bnn.likelihoods.gaussian import GaussianPredictive
from lightning_bnn.likelihoods.poisson import PoissonPredictive
from lightning_bnn.mixtures import ClassPredictive, OrderedPredictive, Predictive

__all__ = [
    "BernoulliPredictive",
    "CategoricalPredictive",
    "ClassPredictive",
    "GaussianPredictive",
    "OrderedPredictive",
    "PoissonPredictive",
    "Predictive",
]
