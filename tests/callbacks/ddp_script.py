"""Callbacks on two processes (gloo): draws, SWAG and reports; each rank writes what it saw."""

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
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from lightning_bnn import SGMCMC, VariationalBNN
from lightning_bnn.callbacks import CalibrationReport, SampleCollector, SWAGMoments
from lightning_bnn.errors import ConfigurationError, LightningBNNError
from lightning_bnn.likelihoods import Categorical
from lightning_bnn.samplers import SGLD
from tests.callbacks.fits import save
from tests.nets import loader, make_data
from tests.trainers import quiet_trainer

torch.set_num_threads(1)
warnings.simplefilter("ignore")
TWO: dict[str, Any] = {"strategy": "ddp", "devices": 2}

# -------------------------------------------------------------------- draws


def digest(tensors: list[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().numpy().tobytes())
    return whole.hexdigest()


def collect(directory: Path) -> dict[str, Any]:
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
        trainer = quiet_trainer(max_epochs=4, callbacks=callbacks, **TWO)
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
    return seen


# -------------------------------------------------------------------- reports


class Sixes(BatchSampler):
    """A batch sampler of the user's own, which Lightning makes anew around a distributed one."""


class Shared(IterableDataset):
    """Data that share themselves among two processes."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        data = rows(41, 1)
        return (data[index] for index in range(self.rank, 41, 2))


def rows(count: int, seed: int, shift: float = 0.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator) + shift
    return TensorDataset(inputs, torch.randint(0, 3, (count,), generator=generator))


def batches(count: int, seed: int, **options: Any) -> DataLoader:
    return DataLoader(rows(count, seed), batch_size=6, **options)


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def make_bnn() -> VariationalBNN:
    return VariationalBNN(network(), Categorical(), predict_draws=4)


def make_callback(directory: Path, **options: Any) -> CalibrationReport:
    # odd numbers of examples and of batches: the processes do not get as many
    ood = {"far": DataLoader(rows(23, 7, shift=2.0), batch_size=5, shuffle=True)}
    return CalibrationReport(
        directory, ood=ood, compare={"plain": network()}, pruning=(0, 0.25, 0.5), **options
    )


def report(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    bnn = make_bnn()
    callback = make_callback(directory / "reports", every_n_epochs=2)
    options = {**TWO, "precision": "64-true"}
    trainer = quiet_trainer(max_epochs=3, callbacks=[callback], **options)
    trainer.fit(bnn, batches(30, 0), batches(41, 1))
    rank = trainer.global_rank
    found["fitted"] = {name: float(value) for name, value in trainer.logged_metrics.items()}
    (found["test"],) = trainer.test(bnn, batches(37, 2), verbose=False)

    own = DataLoader(rows(37, 2), batch_sampler=Sixes(SequentialSampler(range(37)), 6, False))
    for name, data in (
        ("batch_sampler", own),
        ("shuffled", batches(37, 2, sampler=DistributedSampler(rows(37, 2), 2, rank, seed=4))),
    ):
        callback = CalibrationReport(directory / name)
        trainer = quiet_trainer(callbacks=[callback], **options)
        trainer.test(bnn, data, verbose=False)
        found[f"{name}_reports"] = len(callback.reports)

    try:
        # an error on the process that writes reaches the others, which would wait for ever
        callback = CalibrationReport(directory / "failing", risk=0.1)
        callback.risk = 7.0
        quiet_trainer(callbacks=[callback], **options).test(bnn, batches(37, 2), verbose=False)
    except LightningBNNError as error:
        found["failure"] = str(error)
    (directory / "file").touch()
    try:
        callback = CalibrationReport(directory / "file")
        quiet_trainer(callbacks=[callback], **options).test(bnn, batches(37, 2), verbose=False)
    except LightningBNNError as error:
        found["folder"] = str(error)

    # shared by the data themselves: a process must not leave out batches that are its own
    callback = CalibrationReport(directory / "shared")
    trainer = quiet_trainer(
        max_epochs=3, check_val_every_n_epoch=2, callbacks=[callback], **options
    )
    trainer.fit(make_bnn(), batches(30, 0), DataLoader(Shared(rank), batch_size=6))
    if rank == 0:
        torch.save(bnn.family.state_dict(), directory / "family.pt")
    return {**found, "rank": rank}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    seen = {"draws": collect(folder), "reports": report(folder)}
    (folder / f"found{seen['reports']['rank']}.json").write_text(json.dumps(seen))
