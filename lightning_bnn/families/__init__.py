"""Variational families: distributions over the weights that VariationalBNN fits."""

from lightning_bnn.families.base import Family
from lightning_bnn.families.mean_field import MeanField
from lightning_bnn.families.variational_dropout import VariationalDropout

__all__ = ["Family", "MeanField", "VariationalDropout"]
