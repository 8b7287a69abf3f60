"""Kill a sampling run with SIGKILL again and again; each time it goes on from its checkpoint.

``python -m tests.strategies.kill_script DIRECTORY KILLS SEED`` first lets one run end undisturbed,
then starts others, kills each at random moments and lets it resume, until ``KILLS`` kills were
made. It prints a JSON object with the sha256 of every draw of every run. The runs are forks of
this process, which holds all imports, so that a start costs little.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_bnn import SGMCMC, Posterior
from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.priors import Normal
from lightning_bnn.samplers import SGHMC, Cyclical
from lightning_bnn.storage.stream import DrawStream
from tests.nets import make_data
from tests.trainers import quiet_trainer

STEPS, EVERY, CHECKPOINT = 60, 2, 7


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3)
    )


def newest_checkpoint(directory: Path) -> Path | None:
    """The last checkpoint: a kill never cuts one short."""
    found = sorted(directory.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
    return found[-1] if found else None


def run(directory: Path) -> None:
    """One run, from its newest checkpoint if it has one, to its end."""
    checkpoint = newest_checkpoint(directory)
    if checkpoint is None:
        for path in sorted((directory / "draws").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    bnn = SGMCMC(
        make_net(), Categorical(), Normal(0.0, 1.0), partial(SGHMC, lr=0.003), chains=2,
        warm_up=5, scheduler=partial(Cyclical, cycle_length=30, exploration=0.2),
        mode="stacked", seed=11,
    )  # fmt: skip
    collector = SampleCollector(burn_in=10, every=EVERY, dirpath=directory / "draws")
    saver = ModelCheckpoint(directory, "{step}", every_n_train_steps=CHECKPOINT, save_top_k=-1)
    trainer = quiet_trainer(
        max_steps=STEPS, max_epochs=-1, callbacks=[collector, saver], enable_checkpointing=True
    )
    torch.manual_seed(os.getpid() if checkpoint else 2)
    data = make_data("mlp", "classification")
    trainer.fit(bnn, DataLoader(data, batch_size=8, shuffle=True), ckpt_path=checkpoint)


def attempt(directory: Path, seconds: float | None = None) -> bool:
    """Run in a fork and kill it after so many seconds; whether it had ended before."""
    child = os.fork()
    if not child:
        code = 1
        try:
            run(directory)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    moment = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status != 0:
                raise SystemExit(f"a run failed: {status}")
            return True
        if time.monotonic() >= moment:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        time.sleep(0.0005)


def hashes(directory: Path) -> list[str]:
    """The sha256 of every draw, weights and buffers, in order."""
    posterior = Posterior.load(directory / "draws", make_net())
    found = []
    for draw in posterior.draws(len(posterior), chunk=1):
        digest = hashlib.sha256()
        for name, tensor in draw.items():
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        found.append(digest.hexdigest())
    return found


def main(directory: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    begin = time.monotonic()
    (directory / "reference").mkdir()
    attempt(directory / "reference")
    duration = time.monotonic() - begin
    draws = {"reference": hashes(directory / "reference")}
    made = from_checkpoint = after_checkpoint = 0
    while made < kills:
        place = directory / f"run{len(draws)}"
        place.mkdir()
        while not attempt(place, chance.uniform(0, 0.7 * duration) if made < kills else None):
            made += 1
            checkpoint = newest_checkpoint(place)
            from_checkpoint += checkpoint is not None
            # draws that the resumed run must drop and take again
            step = int(checkpoint.stem.split("=")[1]) if checkpoint else 0
            after_checkpoint += any(taken > step for taken in stored_steps(place))
        draws[place.name] = hashes(place)
    counts = {"from_checkpoint": from_checkpoint, "after_checkpoint": after_checkpoint}
    print(json.dumps({"kills": made, **counts, "draws": draws}))


def stored_steps(place: Path) -> list[int]:
    try:
        return list(DrawStream.open(place / "draws").steps())
    except Exception:
        return []


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
