"""What is launched on two devices; run as a script, the same member by DDP of Lightning alone."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.launch import unit_seed
from tests.launch.programs import make_chains, make_data
from tests.trainers import quiet_trainer

EPOCHS = 4  # of two steps each: two ranks share the four batches


def make_trainer(folder: str, trouble: Path | None = None, kill: bool = False) -> dict[str, Any]:
    callbacks: list[pl.Callback] = [SampleCollector(every=2, dirpath="draws"), Witness(folder)]
    if trouble is not None:
        callbacks.append(Trouble(trouble, kill))
    return {"max_epochs": EPOCHS, "callbacks": callbacks}


def make_bad_data() -> DataLoader[Any]:
    """Data with one bad example, which the second rank sees."""
    inputs = torch.ones(64, 2)
    inputs[63] = float("nan")
    return DataLoader(TensorDataset(inputs, torch.ones(64, 1)), 16)


class Witness(pl.Callback):
    """Write down the step that each rank begins with, and the weights that it ends with."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(f"begin-{trainer.global_rank}", str(trainer.global_step))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        digest = hashlib.sha256()
        for draw in pl_module.current_draws().values():  # type: ignore[operator]
            digest.update(draw.cpu().numpy().tobytes())
        self._write(f"end-{trainer.global_rank}", digest.hexdigest())

    def _write(self, name: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)


class Trouble(pl.Callback):
    """The first time that the second rank has taken three steps, let it wait or be killed."""

    def __init__(self, marker: Path, kill: bool) -> None:
        self.marker, self.kill = marker, kill

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank != 1 or trainer.global_step != 3 or self.marker.exists():
            return
        self.marker.touch()
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)


def main(directory: Path, member: int) -> None:
    torch.set_num_threads(1)
    pl.seed_everything(unit_seed(0, [member]), workers=True, verbose=False)
    strategy = make_chains([member], 0)
    collector = SampleCollector(every=2, dirpath=directory)
    trainer = quiet_trainer(max_epochs=EPOCHS, callbacks=[collector], strategy="ddp", devices=2)
    trainer.fit(strategy, make_data())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
