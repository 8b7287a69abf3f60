"""Deep ensembles on two processes (gloo); each rank writes what it saw. Run by its test."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import SGD, Adafactor
from torch.utils.data import DataLoader

from lightning_bnn import DeepEnsemble
from lightning_bnn.likelihoods import Categorical, Gaussian
from lightning_bnn.priors import Normal
from tests.nets import make_data
from tests.trainers import quiet_trainer

DDP = {"strategy": "ddp", "devices": 2}
STEPS = 20
FITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunk": {"chunk": 2},
    "loop": {"mode": "loop"},
    "accumulated": {"chunk": 2},
    "own optimizers": {"optimizer": [partial(SGD, lr=rate) for rate in (0.1, 0.2, 0.3)]},
    "whole tensors": {"optimizer": partial(Adafactor, lr=0.01)},
    "snapshots": {"snapshots": 3},
    "learned": {"likelihood": Gaussian(0.5, learn=True)},
    "dropped": {},
}


class PoisonOneRank(Callback):
    """Once, the energy of member 1 is not finite on rank 1 alone."""

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 1:
            original = module.target.data_energy

            def poisoned(*arguments: Any) -> Any:
                module.target.data_energy = original
                energies = original(*arguments)
                return energies * torch.tensor([1.0, float("nan"), 1.0])

            module.target.data_energy = poisoned


def make(bn: bool = True, **options: Any) -> DeepEnsemble:
    def build() -> nn.Module:
        norm = nn.BatchNorm1d(8) if bn else nn.Identity()
        return nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Linear(8, outputs))

    likelihood = options.pop("likelihood", None) or Categorical()
    outputs = 2 if isinstance(likelihood, Gaussian) else 3
    defaults: dict[str, Any] = {"members": 3, "mode": "stacked"}
    return DeepEnsemble(build, likelihood, Normal(0.0, 1.0), **{**defaults, **options})


def main(directory: Path) -> None:
    found: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for name, options in FITS.items():
        ensemble = make(**options)  # no common seed: the ranks must be brought together
        task = "regression" if name == "learned" else "classification"
        trainer = quiet_trainer(
            max_steps=STEPS,
            max_epochs=-1,
            accumulate_grad_batches=2 if name == "accumulated" else 1,
            callbacks=[PoisonOneRank()] if name == "dropped" else [],
            **DDP,
        )
        trainer.fit(ensemble, DataLoader(make_data("mlp", task), batch_size=4, shuffle=True))
        weights[name] = dict(ensemble.state_dict())
        found[name] = {
            "steps": trainer.global_step,
            "num_data": ensemble.target.num_data,
            "alive": ensemble.alive.tolist(),
            "seed": ensemble.seed,
        }

    # each rank has half of the examples in a step
    data = make_data("mlp", "classification")
    halves = make(bn=False, seed=1, chunk=2, optimizer=partial(SGD, lr=0.1))
    trainer = quiet_trainer(max_steps=3, max_epochs=-1, **DDP)
    trainer.fit(halves, DataLoader(data, batch_size=24))
    weights["halves"] = {"bank.weights": halves.weights.detach()}

    for path in (None, directory / "step=7.ckpt"):
        torch.manual_seed(3 if path is None else 4)
        ensemble = make(snapshots=2)
        saver = ModelCheckpoint(directory, "{step}", every_n_train_steps=7, save_top_k=-1)
        trainer = quiet_trainer(
            max_steps=STEPS, max_epochs=-1, callbacks=[saver], enable_checkpointing=True, **DDP
        )
        trainer.fit(ensemble, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=path)
        posterior = ensemble.posterior()
        weights["fresh" if path is None else "resumed"] = posterior.sample(len(posterior))
    rank = trainer.global_rank
    torch.save(weights, directory / f"weights{rank}.pt")
    (directory / f"found{rank}.json").write_text(json.dumps(found))
