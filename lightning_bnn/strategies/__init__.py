"""Strategies: Lightning modules that approximate a posterior."""

from lightning_bnn.strategies.base import Strategy
from lightning_bnn.strategies.dropout import MCDropoutBNN
from lightning_bnn.strategies.ensemble import DeepEnsemble
from lightning_bnn.strategies.sgmcmc import SGMCMC
from lightning_bnn.strategies.variational import VariationalBNN

__all__ = ["SGMCMC", "DeepEnsemble", "MCDropoutBNN", "Strategy", "VariationalBNN"]
