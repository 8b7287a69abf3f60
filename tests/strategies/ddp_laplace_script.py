"""Laplace approximations on two processes (gloo); each rank writes what it saw."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_bnn import BayesianLinear, LaplaceBNN
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal
from tests.nets import make_data, mlp
from tests.trainers import quiet_trainer

FITS = ("diagonal", "kron", "full", "low rank")


def make(structure: str, scales: str = "given") -> LaplaceBNN:
    torch.manual_seed(0)
    return LaplaceBNN(mlp(3), Categorical(), Normal(0.0, 1.0), structure, scales=scales, seed=0)


def main(directory: Path) -> None:
    data = make_data("mlp", "classification")
    weights, found = {}, {}
    for name in FITS:
        bnn = make(name)
        trainer = quiet_trainer(max_epochs=2, strategy="ddp", devices=2)
        trainer.fit(bnn, DataLoader(data, batch_size=6, shuffle=True))
        weights[name] = {**bnn.finished, **bnn.state_dict()}
        found[name] = {"num_data": bnn.target.num_data, "evidence": bnn.log_evidence()}
    bnn = make("low rank", "validation")
    trainer = quiet_trainer(max_epochs=2, strategy="ddp", devices=2)
    trainer.fit(bnn, DataLoader(data, batch_size=6), DataLoader(data, batch_size=6))
    weights["validation"] = {**bnn.finished, **bnn.state_dict()}
    found["validation"] = {"precisions": bnn.prior_precisions()}
    odd = Subset(make_data("mlp", "regression"), range(47))
    linear = BayesianLinear(nn.Linear(4, 2))
    trainer = quiet_trainer(max_epochs=1, strategy="ddp", devices=2)
    trainer.fit(linear, DataLoader(odd, batch_size=6))
    found["linear"] = {"evidence": linear.log_evidence()}
    rank = trainer.global_rank
    torch.save(weights, directory / f"weights{rank}.pt")
    (directory / f"found{rank}.json").write_text(json.dumps(found))
