"""Predictions with honest uncertainty: mixtures over draws of the posterior.

Every likelihood has its own kind of predictive; :meth:`Likelihood.predictive` makes it from the
stacked outputs of a network, so that nobody has to choose.
"""

from lightning_bnn.predictive.base import ClassPredictive, OrderedPredictive, Predictive
from lightning_bnn.predictive.bernoulli import BernoulliPredictive
from lightning_bnn.predictive.categorical import CategoricalPredictive
from lightning_bnn.predictive.gaussian import GaussianPredictive
from lightning_bnn.predictive.poisson import PoissonPredictive

__all__ = [
    "BernoulliPredictive",
    "CategoricalPredictive",
    "ClassPredictive",
    "GaussianPredictive",
    "OrderedPredictive",
    "PoissonPredictive",
    "Predictive",
]
