"""Variational families: distributions over the weights that VariationalBNN fits."""

from lightning_bnn.families.base import Family
from lightning_bnn.families.full_rank import FullRank
from lightning_bnn.families.mean_field import MeanField

__all__ = ["Family", "FullRank", "MeanField"]
