"""SWAG on two processes (gloo); each rank writes what it saw. Run by the tests."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback
from torch import Tensor, nn

from lightning_bnn import SGMCMC
from lightning_bnn.callbacks import SWAGMoments
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.samplers import SGLD
from tests.nets import loader, make_data
from tests.trainers import quiet_trainer

torch.set_num_threads(1)
warnings.simplefilter("ignore")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Save(Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 15:
            trainer.save_checkpoint(self.path)


def digest(tensors: list[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()


def main(directory: Path) -> None:
    data = make_data("mlp", "classification")
    found: dict[str, Any] = {}
    for run, ckpt in (("whole", None), ("resumed", directory / "run.ckpt")):
        swag = SWAGMoments(start=0.5, every_n_steps=3)
        saver = [Save(directory / "run.ckpt")] if run == "whole" else []
        bnn = SGMCMC(
            network(), Categorical(), sampler=partial(SGLD, lr=0.01), chains=2, mode="loop"
        )
        trainer = quiet_trainer(
            max_epochs=4, strategy="ddp", devices=2, callbacks=[*saver, swag]
        )  # six steps an epoch
        torch.manual_seed(4)
        trainer.fit(bnn, loader(data, shuffle=True, batch_size=4), ckpt_path=ckpt)
        moments = swag.moments
        found[run] = {
            "snapshots": swag.snapshots,
            "moments": digest([moments.mean, moments.squares, *moments.deviations]),
            "draws": digest(list(swag.posterior(draws=2).sample(4).values())),
        }
    (directory / f"found{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
