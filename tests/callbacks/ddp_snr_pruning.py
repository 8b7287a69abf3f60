"""SNRPruning on two processes (gloo); each rank writes what it saw. Run by the tests."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback
from torch import Tensor, nn

from lightning_bnn import VariationalBNN
from lightning_bnn.callbacks import SNRPruning
from lightning_bnn.likelihoods import Categorical
from tests.nets import loader, make_data
from tests.trainers import quiet_trainer

torch.set_num_threads(1)
warnings.simplefilter("ignore")

# what differs between two fits, each of which is run and resumed
KINDS: dict[str, dict[str, Any]] = {
    "weight": {"unit": "weight", "estimator": "weight"},
    "channel": {"unit": "channel", "estimator": "local"},
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3))


class Save(Callback):
    """In the third of four epochs, after the first of three prunings."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 15:
            trainer.save_checkpoint(self.path)


def digest(*tensors: Tensor) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().numpy().tobytes())
    return whole.hexdigest()


def run(kind: str, rank: int, path: Path, resume: bool) -> dict[str, Any]:
    torch.manual_seed(4 + rank)  # weights, noise and order are for the processes to agree on
    optimizer = partial(torch.optim.Adam, lr=0.01)
    bnn = VariationalBNN(
        network(), Categorical(), estimator=KINDS[kind]["estimator"], optimizer=optimizer
    )
    pruning = SNRPruning(0.5, start=0.375, end=0.875, every_n_steps=5, unit=KINDS[kind]["unit"])
    callbacks = [pruning] if resume else [pruning, Save(path)]
    trainer = quiet_trainer(max_epochs=4, strategy="ddp", devices=2, callbacks=callbacks)
    data = loader(make_data("mlp", "classification"), shuffle=True, batch_size=4)
    trainer.fit(bnn, data, ckpt_path=path if resume else None)  # six steps an epoch
    assert trainer.world_size == 2
    masks, posterior = pruning.masks, bnn.posterior()
    drawn = posterior.sample(3)
    zeros = [
        int(draw.count_nonzero()) == int(keep.sum()) and not bool(draw[keep == 0].any())
        for name, keep in masks.items()
        if name in drawn
        for draw in drawn[name]
    ]
    return {
        "mean": digest(bnn.family.mean),
        "rho": digest(bnn.family.rho),
        "masks": {name: digest(mask) for name, mask in masks.items()},
        "history": [asdict(one) for one in pruning.history],
        "steps": trainer.global_step,
        "zeros": zeros,
        "sparsity": pruning.sparsity,
        "logged": float(trainer.callback_metrics["sparsity"]),
    }


def main(directory: Path) -> None:
    rank = int(os.environ.get("LOCAL_RANK", 0))
    found: dict[str, Any] = {}
    for kind in KINDS:
        path = directory / f"{kind}.ckpt"
        found[kind] = {
            name: run(kind, rank, path, name == "resumed") for name in ("whole", "resumed")
        }
    (directory / f"found{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
