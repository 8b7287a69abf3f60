"""Gaussian noise from streams that own their state."""

from lightning_bnn.noise.generator import NoiseGenerator
from lightning_bnn.noise.stream import NormalStream

__all__ = ["NoiseGenerator", "NormalStream"]
