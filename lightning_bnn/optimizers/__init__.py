"""Optimizers of a variational distribution."""

from lightning_bnn.optimizers.ivon import IVON
from lightning_bnn.optimizers.natural import NaturalGradient

__all__ = ["IVON", "NaturalGradient"]
