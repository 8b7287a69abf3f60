"""Strategies: Lightning modules that approximate a posterior."""

from lightning_bnn.strategies.base import Strategy
from lightning_bnn.strategies.dropout import MCDropoutBNN
from lightning_bnn.strategies.ensemble import DeepEnsemble
from lightning_bnn.strategies.ivon import IVONBNN
from lightning_bnn.strategies.laplace import LaplaceBNN
from lightning_bnn.strategies.linear import BayesianLinear, PolynomialRegression
from lightning_bnn.strategies.sgmcmc import SGMCMC
from lightning_bnn.strategies.variational import VariationalBNN

__all__ = [
    "IVONBNN",
    "SGMCMC",
    "BayesianLinear",
    "DeepEnsemble",
    "LaplaceBNN",
    "MCDropoutBNN",
    "PolynomialRegression",
    "Strategy",
    "VariationalBNN",
]
