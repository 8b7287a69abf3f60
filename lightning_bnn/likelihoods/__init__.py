"""What the network's outputs mean: the likelihoods p(y | outputs).

A likelihood scores targets, turns stacked outputs into a predictive, checks the data, and names
the metrics that suit it. Choosing one chooses the task; no strategy is made per task. Each file
holds a likelihood and the predictive that it makes.
"""

from lightning_bnn.likelihoods.base import Likelihood
from lightning_bnn.likelihoods.bernoulli import Bernoulli
from lightning_bnn.likelihoods.categorical import Categorical
from lightning_bnn.likelihoods.gaussian import Gaussian
from lightning_bnn.likelihoods.heteroscedastic import HeteroscedasticGaussian
from lightning_bnn.likelihoods.poisson import Poisson

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
]
