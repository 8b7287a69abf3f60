"""Collect draws on two processes (gloo); each rank writes what it saw. Run by the tests."""

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
from torch import nn

from lightning_bnn import SGMCMC, Posterior
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.errors import ConfigurationError
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
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.path)


def digest(posterior: Posterior) -> str:
    whole = hashlib.sha256()
    for name, tensor in posterior.sample(len(posterior)).items():
        whole.update(name.encode() + tensor.numpy().tobytes())
    return whole.hexdigest()


def main(directory: Path) -> None:
    data = make_data("mlp", "classification")
    found: dict[str, Any] = {}
    for run, ckpt in (("whole", None), ("refused", None), ("resumed", directory / "run.ckpt")):
        collectors = [
            SampleCollector(every=2),
            SampleCollector(every=2, refresh_batch_norm=3),
            SampleCollector(every=2, refresh_batch_norm=3, dirpath=directory / "draws"),
        ]
        saver = [Save(directory / "run.ckpt")] if run == "whole" else []
        bnn = SGMCMC(
            network(), Categorical(), sampler=partial(SGLD, lr=0.01), chains=2, mode="loop"
        )
        trainer = quiet_trainer(
            max_steps=8, max_epochs=-1, strategy="ddp", devices=2, callbacks=[*collectors, *saver]
        )
        try:
            torch.manual_seed(4)
            trainer.fit(bnn, loader(data, shuffle=True, batch_size=4), ckpt_path=ckpt)
        except ConfigurationError as error:
            found[run] = str(error)
            continue
        found[run] = {
            "steps": [collector.steps for collector in collectors],
            "digests": [digest(collector.posterior()) for collector in collectors],
            "writes": [collector._stream is not None for collector in collectors],
        }
    (directory / f"found{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
