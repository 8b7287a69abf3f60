"""Dropout on two processes (gloo); each rank writes what it saw. Run by its test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_bnn import MCDropoutBNN
from lightning_bnn.likelihoods import Categorical
from tests.nets import make_data, mlp
from tests.trainers import quiet_trainer

DDP = {"strategy": "ddp", "devices": 2}
KINDS = ("bernoulli", "concrete")


def fit(directory: Path, kind: Any, ckpt_path: Path | None = None) -> MCDropoutBNN:
    seed_everything(3, verbose=False)
    bnn = MCDropoutBNN(mlp(3), Categorical(), kind=kind, rate=0.3, predict_draws=4)
    saver = ModelCheckpoint(directory, f"{kind}-{{step}}", every_n_train_steps=3, save_top_k=-1)
    trainer = quiet_trainer(
        max_steps=12, max_epochs=-1, callbacks=[saver], enable_checkpointing=True, **DDP
    )
    data = make_data("mlp", "classification")
    trainer.fit(bnn, DataLoader(data, batch_size=6, shuffle=True), ckpt_path=ckpt_path)
    return bnn


def main(directory: Path) -> None:
    weights: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for kind in KINDS:
        bnn = fit(directory, kind)
        rank = bnn.global_rank
        weights[kind] = {k: v for k, v in bnn.state_dict().items() if "extra_state" not in k}
        weights[kind]["generator"] = bnn.noise.get_extra_state()["state"]
        found[f"{kind}_num_data"] = bnn.target.num_data
        resumed = fit(directory, kind, directory / f"{kind}-step=6.ckpt")
        pairs = zip(bnn.parameters(), resumed.parameters(), strict=True)
        found[f"{kind}_resumed"] = all(torch.equal(one, other) for one, other in pairs)
        seeds = []
        for other in (bnn, resumed):  # the noise of the next step, of this rank
            inputs = torch.ones(4, 4)
            torch.manual_seed(0)
            seeds.append(other.loss((inputs, torch.zeros(4, dtype=torch.int64))).item())
        found[f"{kind}_next"] = seeds
    torch.save(weights, directory / f"weights{rank}.pt")
    (directory / f"found{rank}.json").write_text(json.dumps(found))
