"""Checkpoints on a disk that gets full, and of processes that are killed while they save.

``python -m tests.strategies.checkpoint_script DIRECTORY KILLS`` prints a JSON object. Both happen
in forks of this process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import nn

from lightning_bnn import VariationalBNN
from lightning_bnn.likelihoods import Gaussian
from lightning_bnn.strategies.checkpoints import check_checkpoint
from tests.trainers import quiet_trainer


def save(trainer: Trainer, path: Path, version: int, limit: int | None = None) -> str:
    """Save once, with all weights equal to a version; what went wrong, if anything did."""
    bnn: Any = trainer.lightning_module
    bnn.family.mean.data.fill_(version)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        trainer.save_checkpoint(path)
    except OSError as error:
        return f"{error.strerror}: {Path(error.filename).name}"
    return "saved"


def main(folder: Path, kills: int) -> None:
    path = folder / "last.ckpt"
    bnn = VariationalBNN(nn.Linear(100, 1000), Gaussian(), num_data=9)
    trainer = quiet_trainer()
    trainer.strategy.connect(bnn)
    bnn.trainer = trainer
    bnn.setup("fit")
    save(trainer, path, -1)
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, save(trainer, path, -2, limit=100_000).encode())
        os._exit(0)
    os.wait()
    full = os.read(reading, 1000).decode()
    left = sorted(file.name for file in folder.iterdir())
    check_checkpoint(path)
    versions = [int(torch.load(path, weights_only=True)["state_dict"]["family.mean"][0])]
    for kill in range(kills):
        child = os.fork()
        if not child:
            for version in range(1000 * kill, 1000 * kill + 1000):
                save(trainer, path, version)
            os._exit(1)
        before = path.stat().st_ino
        while path.stat().st_ino == before:  # nothing was saved yet
            time.sleep(0.001)
        time.sleep(0.004 * kill)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        check_checkpoint(path)
        mean = torch.load(path, weights_only=True)["state_dict"]["family.mean"]
        assert (mean == mean[0]).all()
        versions.append(int(mean[0]))
    torn = [file for file in folder.iterdir() if file.name.startswith(".tmp-")]
    for file in torn:
        os.utime(file, (0, 0))
    save(trainer, path, 10**6)
    print(
        json.dumps(
            {
                "full": full,
                "left": left,
                "versions": versions,
                "torn": len(torn),
                "files": sorted(file.name for file in folder.iterdir()),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
