"""Draws and SWAG on two processes (gloo); each rank writes what it saw. Run by the tests."""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn import SGMCMC
from lightning_bnn.callbacks import SampleCollector, SWAGMoments
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.samplers import SGLD
from tests.callbacks.fits import save
from tests.nets import loader, make_data
from tests.trainers import quiet_trainer

torch.set_num_threads(1)
warnings.simplefilter("ignore")


def digest(tensors: list[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()


def main(directory: Path) -> None:
    data, seen = make_data("mlp", "classification"), {}
    for run, ckpt in (("whole", None), ("refused", None), ("resumed", directory / "run.ckpt")):
        swag = SWAGMoments(start=0.5, every_n_steps=3)
        collectors = [
            SampleCollector(every=2),
            SampleCollector(every=2, refresh_batch_norm=3),
            SampleCollector(every=2, refresh_batch_norm=3, dirpath=directory / "draws"),
        ]
        saver = [save(directory / "run.ckpt", 15)] if run == "whole" else []
        net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        bnn = SGMCMC(net, Categorical(), sampler=partial(SGLD, lr=0.01), chains=2, mode="loop")
        callbacks: list[Any] = [*saver, swag, *collectors]  # six steps an epoch
        trainer = quiet_trainer(max_epochs=4, strategy="ddp", devices=2, callbacks=callbacks)
        try:
            torch.manual_seed(4)
            trainer.fit(bnn, loader(data, shuffle=True, batch_size=4), ckpt_path=ckpt)
        except ConfigurationError as error:
            seen[run] = str(error)
            continue
        moments, posteriors = swag.moments, [collector.posterior() for collector in collectors]
        seen[run] = {
            "steps": [collector.steps for collector in collectors],
            "draws": [digest(list(p.sample(len(p)).values())) for p in posteriors],
            "writes": [collector._stream is not None for collector in collectors],
            "snapshots": swag.snapshots,
            "moments": digest([moments.mean, moments.squares, *moments.deviations]),
            "swag": digest(list(swag.posterior(draws=2).sample(4).values())),
        }
    (directory / f"seen{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
