"""SG-MCMC samplers as ordinary optimizers, one file each, and their schedules."""

from lightning_bnn.samplers.baoa import BAOA
from lightning_bnn.samplers.base import MomentumSampler, Sampler
from lightning_bnn.samplers.hmc import HMC
from lightning_bnn.samplers.psgld import PSGLD
from lightning_bnn.samplers.schedules import Cyclical, Polynomial
from lightning_bnn.samplers.sghmc import SGHMC
from lightning_bnn.samplers.sgld import SGLD
from lightning_bnn.samplers.sgnht import SGNHT

__all__ = [
    "BAOA",
    "HMC",
    "PSGLD",
    "SGHMC",
    "SGLD",
    "SGNHT",
    "Cyclical",
    "MomentumSampler",
    "Polynomial",
    "Sampler",
]
