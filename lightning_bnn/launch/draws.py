"""Draws that are streamed to the storage: each attempt has its own, and begins with those before.

A collector with a directory writes to ``draws`` in the folder of the attempt, whatever directory it
was given: members must not share one. An attempt that goes on from a checkpoint of an earlier one
takes that one's draws over first, up to the checkpoint.
"""

from __future__ import annotations

import pytorch_lightning as pl

from lightning_bnn.callbacks import SampleCollector
from lightning_bnn.launch.patience import patiently
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.storage.files import open_directory

__all__ = ["adopt_draws"]


def adopt_draws(
    records: RunRecords, unit: Unit, trainer: pl.Trainer, folder: str, before: int | None
) -> None:
    """Let every collector write to the folder of an attempt.

    Args:
        records: The records of the run.
        unit: What is trained.
        trainer: Its collectors are looked at.
        folder: Where the attempt writes.
        before: The attempt whose checkpoint it goes on from, if any.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    found = [one for one in callbacks if isinstance(one, SampleCollector) and one.dirpath]
    for number, collector in enumerate(found):
        name = "draws" if number == 0 else f"draws-{number}"
        collector.dirpath = f"{folder}/{name}"
        if before is not None and trainer.is_global_zero:
            _copy(f"{records.folder(unit, before)}/{name}", collector.dirpath)
    trainer.strategy.barrier()


def _copy(source: str, target: str) -> None:
    """Copy a stream: blobs before records, so that a record never lacks its blob; last its head."""
    old, new = open_directory(source), open_directory(target)
    # a zombie may still be adding to it: what came after the checkpoint is dropped later
    records = patiently(lambda: old.names("records"))
    blobs = patiently(lambda: old.names("blobs"))
    names = [f"blobs/{name}" for name in blobs] + [f"records/{name}" for name in records]
    for name in [*names, "manifest.json"]:
        data = patiently(lambda name=name: old.get(name))  # type: ignore[misc]
        if data is not None:
            patiently(lambda name=name, data=data: new.put(name, data))  # type: ignore[misc]
