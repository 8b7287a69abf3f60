"""SG-MCMC on two processes (gloo); each rank writes what it saw. Run by test_ddp_sgmcmc.py."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_bnn import SGMCMC
from lightning_bnn.callbacks import ChainMonitor, SampleCollector
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal
from lightning_bnn.samplers import BAOA, HMC, PSGLD, SGHMC, SGLD, SGNHT
from tests.nets import make_data
from tests.trainers import quiet_trainer

DDP = {"strategy": "ddp", "devices": 2}
FITS: dict[str, dict[str, Any]] = {
    "SGLD": {"sampler": partial(SGLD, lr=0.01)},
    "PSGLD": {"sampler": partial(PSGLD, lr=1e-4)},
    "SGHMC": {"sampler": partial(SGHMC, lr=0.003)},
    "SGNHT": {"sampler": partial(SGNHT, lr=0.003)},
    "BAOA": {"sampler": partial(BAOA, lr=0.003)},
    "HMC": {"sampler": partial(HMC, lr=0.003, leapfrog_steps=2, adapt_steps=10), "bn": False},
    "warmed": {"sampler": partial(SGHMC, lr=0.003), "warm_up": 10, "bayesian": "3.*"},
}


def make_bnn(bn: bool = True, **options: Any) -> SGMCMC:
    norm = nn.BatchNorm1d(8) if bn else nn.Identity()
    net = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, 3))
    return SGMCMC(net, Categorical(), Normal(0.0, 1.0), chains=2, mode="stacked", **options)


def main(directory: Path) -> None:
    data = make_data("mlp", "classification")
    found: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for name, options in FITS.items():
        bnn = make_bnn(**options)  # no common seed: the ranks must be brought together
        trainer = quiet_trainer(max_steps=50, max_epochs=-1, **DDP)
        size = 24 if name == "HMC" else 4
        trainer.fit(bnn, DataLoader(data, batch_size=size, shuffle=True))
        weights[name] = dict(bnn.state_dict())
        for index, stream in enumerate(bnn.sampler.streams):
            weights[name][f"stream{index}"] = stream.state_dict()["lanes"]
        found[f"{name}_steps"] = trainer.global_step
        found[f"{name}_num_data"] = bnn.sampler.num_data
    rank = trainer.global_rank

    # resume with a collector: only rank 0 writes, both read, the draws are the same
    for path in (None, directory / "step=7.ckpt"):
        torch.manual_seed(3 if path is None else 4)
        bnn = make_bnn(**FITS["SGHMC"])
        draws = SampleCollector(burn_in=2, every=3, dirpath=directory / "draws")
        monitor = ChainMonitor(every_n_steps=1)
        saver = ModelCheckpoint(directory, "{step}", every_n_train_steps=7, save_top_k=-1)
        trainer = quiet_trainer(
            max_steps=20,
            max_epochs=-1,
            callbacks=[saver, draws, monitor],
            enable_checkpointing=True,
            **DDP,
        )
        trainer.fit(bnn, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=path)
        posterior = bnn.posterior()
        weights["fresh" if path is None else "resumed"] = posterior.sample(len(posterior))
    torch.save(weights, directory / f"weights{rank}.pt")
    (directory / f"found{rank}.json").write_text(json.dumps(found))
