"""Variants of ensembles on two processes (gloo); run by test_ddp_ensemble_variants.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, SubsetRandomSampler

from lightning_bnn import DeepEnsemble
from lightning_bnn.bank import View
from lightning_bnn.ensembles import MemberBatch
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.priors import Normal
from tests.nets import make_data
from tests.trainers import quiet_trainer

DDP = {"strategy": "ddp", "devices": 2}
EPOCHS = 2
FITS: dict[str, dict[str, Any]] = {
    "shared": {"bootstrap": True, "randomise": "targets and anchors", "adversarial": 0.05},
    "own": {"bootstrap": True, "independent_batches": True, "adversarial": 0.05},
    "sampler": {"bootstrap": True, "independent_batches": True},
    "prior_function": {"prior_function": 2.0, "randomise": "anchors"},
}


class Watched(DeepEnsemble):
    """Keeps what it was trained with."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def view(self, rows: slice, batch: MemberBatch) -> View:
        view = super().view(rows, batch)
        if view.counts is not None and batch.indices is not None:
            self.seen.append((batch.indices, view.counts))
        return view


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def make(name: str) -> Watched:
    # no seed, and none common to the ranks: they must be brought together
    return Watched(
        build, Gaussian(0.5), Normal(), members=3, mode="stacked",
        optimizer=partial(SGD, lr=0.02), **FITS[name],
    )  # fmt: skip


def loader(name: str) -> DataLoader:
    data = make_data("mlp", "regression")
    if name == "sampler":
        return DataLoader(data, batch_size=5, sampler=SubsetRandomSampler(range(len(data))))
    return DataLoader(data, batch_size=5, shuffle=True)


def main(directory: Path) -> None:
    found: dict[str, Any] = {}
    for name in FITS:
        ensemble = make(name)
        trainer = quiet_trainer(max_epochs=EPOCHS, **DDP)
        trainer.fit(ensemble, loader(name))
        found[name] = {
            "draws": {n: t.clone() for n, t in ensemble.current_draws().items()},
            "seeds": ensemble._seeds(),
            "indices": [indices for indices, _ in ensemble.seen],
            "shares": [shares for _, shares in ensemble.seen],
            "offsets": ensemble._offsets() if ensemble.randomise else torch.zeros(()),
            "extent": ensemble.input_range.extent if ensemble.input_range else torch.zeros(()),
        }
    rank = trainer.global_rank
    for kind, path in (("fresh", None), ("resumed", directory / "step=7.ckpt")):
        torch.manual_seed(10 * rank + (path is None))
        saver = ModelCheckpoint(directory, "{step}", every_n_train_steps=7, save_top_k=-1)
        options = {"callbacks": [saver], "enable_checkpointing": True, **DDP}
        ensemble = make("own")
        quiet_trainer(max_epochs=EPOCHS, **options).fit(ensemble, loader("own"), ckpt_path=path)
        found[kind] = dict(ensemble.current_draws())
    torch.save(found, directory / f"found{rank}.pt")
