"""Fits on two processes (gloo); each rank writes what it saw. Run by test_ddp.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_bnn import IVONBNN, BayesianLinear, VariationalBNN
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.families import Kronecker, LowRank, RankOne
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.priors import Normal
from tests.nets import make_data
from tests.trainers import quiet_trainer


def make_bnn(kind: type[VariationalBNN] = VariationalBNN, **options: Any) -> VariationalBNN:
    net = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3)
    )
    return kind(net, Categorical(), Normal(0.0, 1.0), predict_draws=4, **options)


def main(directory: Path) -> None:
    data = make_data("mlp", "classification")
    found: dict[str, object] = {}
    weights = {}
    ddp = {"strategy": "ddp", "devices": 2}
    for name, options, trainer_options in (
        ("weight", {}, {}),
        ("flipout", {"estimator": "flipout"}, {}),
        ("local", {"estimator": "local"}, {}),
        ("draws", {"draws": 2}, {}),
        ("accumulated", {}, {"accumulate_grad_batches": 2}),
        ("ivon", {"kind": IVONBNN}, {"accumulate_grad_batches": 2}),
        ("low_rank", {"family": LowRank(2)}, {}),
        ("kronecker", {"family": Kronecker()}, {}),
        ("rank_one", {"family": RankOne(2)}, {}),
        ("last_layer", {"bayesian": "4.*"}, {"gradient_clip_val": 0.5}),
    ):
        bnn = make_bnn(**options)  # no common seed: the ranks must be brought together
        trainer = quiet_trainer(max_steps=20, max_epochs=-1, **ddp, **trainer_options)
        trainer.fit(bnn, DataLoader(data, batch_size=4, shuffle=True))
        rank = trainer.global_rank
        weights[name] = {k: v for k, v in bnn.state_dict().items() if "extra_state" not in k}
        weights[name]["generator"] = bnn.noise.get_extra_state()["state"]
        found[f"{name}_steps"] = trainer.global_step
        found[f"{name}_num_data"] = bnn.target.num_data

    (results,) = trainer.test(bnn, DataLoader(data, batch_size=6), verbose=False)
    found["test"] = results
    weights["tested"] = weights["last_layer"]

    rows = make_data("mlp", "regression")
    linear = BayesianLinear(nn.Linear(4, rows.tensors[1].shape[1]), Gaussian(0.5), Normal())
    trainer = quiet_trainer(max_epochs=5, **ddp)
    trainer.fit(linear, DataLoader(rows, batch_size=5))
    found["log_evidence"] = linear.log_evidence()
    weights["linear"] = linear.state_dict()

    net = nn.Linear(4, rows.tensors[1].shape[1])
    bounded = VariationalBNN(net, Gaussian(0.5), Normal(), evidence_draws=8)
    trainer = quiet_trainer(max_epochs=2, **ddp)
    trainer.fit(bounded, DataLoader(rows, batch_size=5))
    found["bound"] = bounded.posterior().evidence
    found["bound_alone"] = bounded.evidence_bound([rows.tensors], draws=8)

    subset = DataLoader(data, batch_size=4, sampler=SubsetRandomSampler(range(20)))
    trainer = quiet_trainer(max_epochs=1, **ddp)
    bnn = make_bnn()
    trainer.fit(bnn, subset)
    found["subset_num_data"] = bnn.target.num_data

    try:
        quiet_trainer(max_epochs=1, **ddp).fit(make_bnn(num_data=24), DataLoader(data))
    except ConfigurationError as error:
        found["share"] = str(error)

    # resume: bit-equal on both ranks, though only one of them writes the checkpoint; also from the
    # one before a damaged one
    ends = []
    for path in (None, directory / "step=7.ckpt", directory / "step=14.ckpt"):
        if path == directory / "step=14.ckpt":
            if rank == 0:
                os.truncate(path, 1000)
            trainer.strategy.barrier()
        # also of the sampler that Lightning puts in
        seed_everything(3 if path is None else 4, verbose=False)
        bnn = make_bnn()
        saver = ModelCheckpoint(directory, "{step}", every_n_train_steps=7, save_top_k=-1)
        trainer = quiet_trainer(
            max_steps=20, max_epochs=-1, callbacks=[saver], enable_checkpointing=True, **ddp
        )
        trainer.fit(bnn, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=path)
        ends.append(bnn.family.mean.detach().clone())
    found["resumed_equal"] = all(torch.equal(end, ends[0]) for end in ends)

    torch.save(weights, directory / f"weights{rank}.pt")
    (directory / f"found{rank}.json").write_text(json.dumps(found))
