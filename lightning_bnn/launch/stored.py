"""A run as it lies in its storage: its results and its posterior, without Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from torch import nn

from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.results import MemberResult, member_results
from lightning_bnn.launch.units import Unit
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import DrawsPosterior, MixturePosterior, WeightPosterior

__all__ = ["Kind", "StoredRun"]

Kind = Literal["posterior", "swag"]


class StoredRun:
    """A run that was launched, read from its storage; it may still be running.

    Args:
        storage: The directory or URL that was given to ``launch``.
    """

    def __init__(self, storage: str | os.PathLike[str]) -> None:
        self.records = RunRecords(storage)
        self.storage = self.records.storage
        self._committed: dict[str, dict[str, Any]] = {}  # a commit never changes

    def units(self) -> list[Unit]:
        """The units of the run."""
        return self.records.units()

    @property
    def members(self) -> int:
        """How many members or chains the run has in all."""
        return sum(len(unit.members) for unit in self.units())

    def committed(self) -> dict[Unit, dict[str, Any]]:
        """The results of the units that are done, in order."""
        present = self.records.committed_names()
        found = {}
        for unit in self.units():
            if unit.name in present and unit.name not in self._committed:
                commit = self.records.committed(unit)
                if commit is not None:
                    self._committed[unit.name] = commit["result"]
            if unit.name in self._committed:
                found[unit] = self._committed[unit.name]
        return found

    def results(self) -> list[MemberResult]:
        """The results of the members that are done or have diverged, in order."""
        return [
            result
            for unit, committed in self.committed().items()
            for result in member_results(self.records, unit, committed)
        ]

    def posterior(
        self,
        net: nn.Module,
        likelihood: Likelihood | None = None,
        kind: Kind = "posterior",
        running: bool = False,
    ) -> MixturePosterior:
        """The mixture over all members that are done, each with the same weight.

        Args:
            net: A network of the architecture that the members have; its values do not matter.
            likelihood: Needed only if it is one of your own.
            kind: ``"swag"`` for the Gaussians that SWAG has made of each.
            running: Whether draws of chains that are still running count as well.

        Raises:
            ConfigurationError: No member is done yet.
        """
        parts = []
        for unit, committed in self.committed().items():
            if kind not in committed["members"]:
                raise ConfigurationError(
                    f"{self.storage}: {unit} has left no posterior of the kind {kind!r}, only "
                    f"{sorted(committed['members'])}. For 'swag' the trainer needs SWAGMoments."
                )
            places = committed["members"][kind]
            parts += self._load(unit, places, net, likelihood)
        if running:
            parts += self._running(net, likelihood)
        if not parts:
            drawn = ", and no chain has a draw" if running else ""
            raise ConfigurationError(
                f"No member of the run in {self.storage} is done yet{drawn}; there are "
                f"{self.members}. Wait for the first, or launch the run again to go on."
            )
        return MixturePosterior(parts)

    def _load(
        self,
        unit: Unit,
        places: Mapping[str, Mapping[str, Any]],
        net: nn.Module,
        likelihood: Likelihood | None,
    ) -> list[WeightPosterior]:
        parts: list[WeightPosterior] = []
        for member in unit.members:
            place = places.get(str(member))
            if place is None:
                continue
            part = WeightPosterior.load(
                f"{self.records.folder(unit)}/{place['place']}", net, likelihood
            )
            if "chain" in place:
                assert isinstance(part, DrawsPosterior)
                part = part.chain(place["chain"])
            parts.append(part)
        return parts

    def _running(self, net: nn.Module, likelihood: Likelihood | None) -> list[WeightPosterior]:
        """The chains of units that are not done, as far as their draws have come."""
        done = {unit.name for unit in self.committed()}
        parts: list[WeightPosterior] = []
        for unit in self.units():
            if unit.name in done:
                continue
            found = []
            for attempt in self.records.attempts(unit):
                place = f"{self.records.folder(unit, attempt)}/draws"
                with suppress(PosteriorFormatError):  # no draw yet
                    found.append(WeightPosterior.load(place, net, likelihood))
            # the last has the draws of those before it, but may be taking them over just now
            longest = max(found, key=len, default=None)  # type: ignore[arg-type]
            if isinstance(longest, DrawsPosterior):
                parts += [longest.chain(number) for number in range(longest.chains)]
        return parts
