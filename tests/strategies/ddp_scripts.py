"""All fits of the strategies on two processes (gloo), in one launch: starting it takes longest."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from tests.strategies import (
    ddp_dropout_script,
    ddp_ensemble_script,
    ddp_ensemble_variants_script,
    ddp_laplace_script,
    ddp_script,
    ddp_sgmcmc_script,
)

SCRIPTS = (
    ddp_script,
    ddp_sgmcmc_script,
    ddp_ensemble_script,
    ddp_ensemble_variants_script,
    ddp_dropout_script,
    ddp_laplace_script,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for script in SCRIPTS:
        place = Path(sys.argv[1]) / script.__name__.rpartition(".")[2]
        place.mkdir(exist_ok=True)
        script.main(place)
