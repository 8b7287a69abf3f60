"""Variational families: distributions over the weights that VariationalBNN fits."""

from lightning_bnn.families.base import Family
from lightning_bnn.families.full_rank import FullRank
from lightning_bnn.families.kronecker import Kronecker
from lightning_bnn.families.low_rank import LowRank
from lightning_bnn.families.mean_field import MeanField
from lightning_bnn.families.rank_one import RankOne
from lightning_bnn.families.variational_dropout import VariationalDropout

__all__ = [
    "Family",
    "FullRank",
    "Kronecker",
    "LowRank",
    "MeanField",
    "RankOne",
    "VariationalDropout",
]
