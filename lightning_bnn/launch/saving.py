"""What members leave in the folder of an attempt: draws while they run, posteriors at the end.

A :class:`~lightning_bnn.callbacks.SampleCollector` with a directory writes to ``draws`` in the
folder of the attempt, whatever directory it was given: members must not share one. An attempt that
resumes from a checkpoint of an earlier one first copies that one's draws, up to the checkpoint.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning_bnn.callbacks import SampleCollector, SWAGMoments
from lightning_bnn.launch.patience import patiently
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.lightning import pl
from lightning_bnn.posteriors.average import mixture_of
from lightning_bnn.storage.files import open_directory
from lightning_bnn.strategies.bank_strategy import BankStrategy
from lightning_bnn.strategies.base import Strategy

__all__ = ["adopt_draws", "member_ids", "save_members"]


def member_ids(strategy: pl.LightningModule) -> tuple[int, ...] | None:
    """The numbers of the members or chains of a strategy; None if it trains one network."""
    return tuple(strategy.ids) if isinstance(strategy, BankStrategy) else None


def adopt_draws(
    records: RunRecords, unit: Unit, trainer: pl.Trainer, folder: str, before: int | None
) -> None:
    """Let every collector write to the folder of an attempt.

    Args:
        records: The records of the run.
        unit: What is trained.
        trainer: Its collectors are looked at.
        folder: Where the attempt writes.
        before: The attempt whose checkpoint it resumes from, if any.
    """
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    collectors = [each for each in callbacks if isinstance(each, SampleCollector) and each.dirpath]
    for number, collector in enumerate(collectors):
        name = "draws" if number == 0 else f"draws-{number}"
        collector.dirpath = f"{folder}/{name}"
        if before is not None and trainer.is_global_zero:
            _copy(f"{records.folder(unit, before)}/{name}", collector.dirpath)
    trainer.strategy.barrier()


def _copy(source: str, target: str) -> None:
    """Copy a stream: blobs before records, so that a record never lacks its blob; last its head."""
    old, new = open_directory(source), open_directory(target)
    # a zombie may still be adding to it: what is newer than the checkpoint is dropped later
    records = patiently(lambda: old.names("records"))
    blobs = patiently(lambda: old.names("blobs"))
    names = [f"blobs/{name}" for name in blobs] + [f"records/{name}" for name in records]
    for name in [*names, "manifest.json"]:
        data = patiently(partial(old.get, name))
        if data is not None:
            patiently(partial(new.put, name, data))


def save_members(
    source: Strategy | SWAGMoments, trainer: pl.Trainer, unit: Unit, folder: str
) -> dict[str, dict[str, Any]]:
    """Save the posterior of each member of a unit that is left.

    Draws that a collector has written lie in the folder already; of these only the place and the
    number of the chain are noted.

    Args:
        source: What gives the posteriors.
        trainer: The one that has fitted; its first rank saves.
        unit: The members.
        folder: Where the attempt writes.

    Returns:
        By the number of the member, where its posterior is: the ``place`` from the folder of the
        unit on, and which ``chain`` of it.
    """
    attempt = folder.rsplit("/", 1)[-1]
    stacked = member_ids(trainer.lightning_module) == unit.members
    collector = getattr(source, "collector", None)
    if collector is not None and len(collector) and collector.dirpath is not None and stacked:
        place = f"{attempt}/{collector.dirpath.rstrip('/').rsplit('/', 1)[-1]}"
        return {str(id): {"place": place, "chain": row} for row, id in enumerate(unit.members)}
    swag = isinstance(source, SWAGMoments)
    posteriors = source.member_posteriors()
    if not stacked:  # one member, whatever it is made of
        parts = list(posteriors.values())
        posteriors = {unit.members[0]: parts[0] if len(parts) == 1 else mixture_of(parts)}
    elif swag:  # which has them by row
        posteriors = {unit.members[row]: posterior for row, posterior in posteriors.items()}
    places = {}
    for id, posterior in posteriors.items():
        name = f"{'swag' if swag else 'posterior'}-{id:05d}"
        if trainer.is_global_zero:
            patiently(partial(posterior.save, f"{folder}/{name}"))
        places[str(id)] = {"place": f"{attempt}/{name}"}
    return places
