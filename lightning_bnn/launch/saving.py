"""What members leave behind: a posterior for each, in the folder of the attempt.

Draws that a :class:`~lightning_bnn.callbacks.SampleCollector` has written lie there already; of
these only the place and the number of the chain are noted.
"""

from __future__ import annotations

from typing import Any, cast

import pytorch_lightning as pl

from lightning_bnn.callbacks import SWAGMoments
from lightning_bnn.launch.patience import patiently
from lightning_bnn.launch.units import Unit
from lightning_bnn.posteriors import MixturePosterior, Posterior, WeightPosterior
from lightning_bnn.strategies.base import Strategy

__all__ = ["Place", "save_members"]

# Where a member's posterior is, from the folder of the unit on, and which chain of it
Place = dict[str, Any]


def save_members(
    source: Strategy | SWAGMoments, trainer: pl.Trainer, unit: Unit, folder: str
) -> dict[str, Place]:
    """Save the posterior of each member of a unit that is left.

    Args:
        source: What gives the posteriors.
        trainer: The one that has fitted; its first rank saves.
        unit: The members.
        folder: Where the attempt writes.

    Returns:
        By the number of the member, where its posterior is.
    """
    attempt = folder.rsplit("/", 1)[-1]
    strategy = trainer.lightning_module
    numbers = getattr(strategy, "member_numbers", None) or getattr(strategy, "chain_numbers", None)
    numbered = numbers is not None and tuple(numbers) == unit.members
    collector = getattr(source, "collector", None)
    if collector is not None and len(collector) and collector.dirpath is not None and numbered:
        place = f"{attempt}/{collector.dirpath.rstrip('/').rsplit('/', 1)[-1]}"
        return {
            str(number): {"place": place, "chain": chain}
            for chain, number in enumerate(unit.members)
        }
    swag = isinstance(source, SWAGMoments)
    parts = source.member_posteriors()
    if swag and numbered:
        parts = {unit.members[row]: part for row, part in parts.items()}
    if not numbered:  # one member, whatever it is made of
        together = cast("list[WeightPosterior]", list(parts.values()))
        whole = together[0] if len(together) == 1 else MixturePosterior(together)
        parts = {unit.members[0]: whole}
    places = {}
    for number, posterior in parts.items():
        name = f"{'swag' if swag else 'posterior'}-{number:05d}"
        if trainer.is_global_zero:
            _save(posterior, f"{folder}/{name}")
        places[str(number)] = {"place": f"{attempt}/{name}"}
    return places


def _save(posterior: Posterior, place: str) -> None:
    patiently(lambda: posterior.save(place))
