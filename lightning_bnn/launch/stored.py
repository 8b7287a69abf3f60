"""A run as it lies in its storage: its results and its posterior, without Ray."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal

from torch import nn

from lightning_bnn.diagnostics import Diagnosis, diagnose
from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.launch.records import RunRecords
from lightning_bnn.launch.units import Unit
from lightning_bnn.lightning import rank_zero_warn
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.posteriors import (
    AveragePosterior,
    DrawsPosterior,
    MixturePosterior,
    Posterior,
    WeightPosterior,
)
from lightning_bnn.posteriors.average import mixture_of
from lightning_bnn.storage.files import open_directory
from lightning_bnn.storage.manifest import checked

__all__ = [
    "Kind",
    "MemberResult",
    "StoredRun",
    "diagnose_chains",
    "load_posterior",
    "load_run",
    "member_results",
]

Kind = Literal["posterior", "swag"]
Status = Literal["done", "diverged", "failed"]
READERS = 8  # at a time: remote storage takes its time for each file
_LEAST_DRAWS = 4  # with fewer there is no R-hat
# what a commit says of the members; places are in the folder of the unit, and not in one above
_PLACE = {"place": re.compile(r"attempt-[0-9]{4,}/[\w-][\w.-]*", re.ASCII), "chain?": int}
_METRICS = {"*": float | None}
_RESULT = {
    **{"members": {"posterior": {"*": _PLACE}, "*": {"*": _PLACE}}, "asked?": dict},
    **{"metrics?": _METRICS, "own_metrics?": {"*": _METRICS}, "attempt?": int | None},
    **dict.fromkeys(("host?", "node?", "device?", "noise?"), str | None),
    **{"steps?": int | None, "seconds?": float | None},
}


@dataclass(frozen=True)
class MemberResult:
    """How a member ended.

    Attributes:
        member: Its number.
        status: ``"done"``; ``"diverged"``: it has no finite weights, though others of its stack
            may; ``"failed"``: no attempt came to an end.
        attempt: The attempt that ended it, from 1.
        metrics: What was logged last, by name; of a stack, of all its members together.
        own_metrics: Of a stack: those that this member has for itself.
        node: The node that it ran on last.
        host: The name of that machine.
        uri: Where its posterior is.
        error: What went wrong, if something did.
        seconds: How long its last attempt took.
        steps: Optimizer steps in all.

    Example:
        >>> MemberResult(3, "done", attempt=1, metrics={"train_loss": 0.2}).ok
        True
    """

    member: int
    status: Status
    attempt: int
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    node: str | None = None
    uri: str | None = None
    error: str | None = None
    seconds: float | None = None
    steps: int | None = None
    host: str | None = None
    own_metrics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether it has a posterior."""
        return self.status == "done"


def member_results(
    records: RunRecords, unit: Unit, result: Mapping[str, Any]
) -> list[MemberResult]:
    """The results of the members of a unit that was committed."""
    names = ("attempt", "metrics", "node", "seconds", "steps", "host")
    facts: dict[str, Any] = {name: result.get(name) for name in names}

    def of_member(member: int) -> MemberResult:
        place = result["members"]["posterior"].get(str(member))
        ended: dict[str, Any] = {"status": "diverged", "error": "its weights are not finite"}
        if place is not None:
            ended = {"status": "done", "uri": f"{records.folder(unit)}/{place['place']}"}
        own = result.get("own_metrics", {}).get(str(member), {})
        return MemberResult(member, **ended, **facts, own_metrics=own)

    return [of_member(member) for member in unit.members]


def load_run(storage: str | os.PathLike[str]) -> StoredRun:
    """Open a launched run for reading: ``load_run("runs/a").posterior(net)``.

    Args:
        storage: The directory or URL that was given to ``launch``.

    Raises:
        ConfigurationError: There is no run here.

    Example:
        >>> load_run("memory://no-such-run")
        Traceback (most recent call last):
        ...
        lightning_bnn.errors.ConfigurationError: memory://no-such-run holds no run: ...
    """
    run = StoredRun(storage)
    run.units()
    return run


def load_posterior(
    directory: str | os.PathLike[str], net: nn.Module, likelihood: Likelihood | None = None
) -> Posterior:
    """Read a saved posterior, or that of a launched run, whichever the directory holds.

    Args:
        directory: What was given to ``Posterior.save`` or to ``launch``.
        net: A network of the architecture of the posterior; its values do not matter.
        likelihood: Needed only if it is one of your own.
    """
    if open_directory(directory).get("run.json", 1) is None:
        return Posterior.load(directory, net, likelihood)
    return load_run(directory).posterior(net, likelihood)


class StoredRun:
    """A run that was launched, read from its storage; it may still be running.

    Args:
        storage: The directory or URL that was given to ``launch``.

    Attributes:
        storage: Where it is stored.
        records: Its records.
    """

    def __init__(self, storage: str | os.PathLike[str]) -> None:
        self.records = RunRecords(storage, only_look=True)
        self.storage = self.records.storage
        self._committed: dict[Unit, dict[str, Any]] = {}  # a commit never changes

    def units(self) -> list[Unit]:
        """The units of the run."""
        return self.records.units()

    @property
    def members(self) -> int:
        """How many members or chains the run has in all."""
        return sum(len(unit.members) for unit in self.units())

    def committed(self) -> dict[Unit, dict[str, Any]]:
        """The results of the units that are done, in order."""
        begun = self.records.unit_names()
        units = [unit for unit in self.units() if unit.name in begun]
        with ThreadPoolExecutor(READERS) as pool:
            results = zip(units, pool.map(self.result_of, units), strict=True)
            return {unit: result for unit, result in results if result is not None}

    def result_of(self, unit: Unit) -> dict[str, Any] | None:
        """The result of a unit, if it is done; it is read once."""
        if unit not in self._committed:
            if (commit := self.records.committed(unit)) is None:
                return None
            where = f"{self.records.folder(unit)}/commit.json"
            result = checked(commit["result"], _RESULT, where, "result")
            known = set(map(str, unit.members))
            if others := {*chain.from_iterable(result["members"].values())} - known:
                raise PosteriorFormatError(
                    f"{where} has the result of {min(others)!r:.80}, which is no member of {unit}. "
                    "It was not written by lightning-bnn; nothing was loaded."
                )
            self._committed[unit] = result
        return self._committed[unit]

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
    ) -> MixturePosterior | AveragePosterior:
        """The mixture over all members that are done, each with the same weight.

        It is over weights where the posteriors of the members are; of networks with dropout an
        :class:`~lightning_bnn.AveragePosterior`.

        If some are not done, or have diverged, a warning says how many there are of how many.

        Args:
            net: A network of the architecture that the members have; its values do not matter.
            likelihood: Needed only if it is one of your own.
            kind: ``"swag"`` for the Gaussians that SWAG has made of each.
            running: Whether draws of chains that are still running count as well.

        Raises:
            ConfigurationError: No member is done yet.
        """
        components: list[Posterior] = []
        done: set[str] = set()
        for unit, committed in self.committed().items():
            if kind not in committed["members"]:
                raise ConfigurationError(
                    f"{self.storage}: {unit} has left no posterior of the kind {kind!r}, only "
                    f"{sorted(committed['members'])}. For 'swag' the trainer needs SWAGMoments."
                )
            for member, place in committed["members"][kind].items():  # in the order of the members
                folder = f"{self.records.folder(unit)}/{place['place']}"
                stored = Posterior.load(folder, net, likelihood)
                if "chain" in place:
                    if not isinstance(stored, DrawsPosterior):
                        raise PosteriorFormatError(
                            f"{folder} holds no chains, of which commit.json names one."
                        )
                    stored = stored.chain(place["chain"])
                components.append(stored)
                done.add(member)
        if running:
            components += self._running(net, likelihood)
        members = [member for unit in self.units() for member in unit.members]
        left = [str(member) for member in members if str(member) not in done]
        if left and components and not running:
            rank_zero_warn(
                f"The posterior of the run in {self.storage} is of {len(members) - len(left)} of "
                f"{len(members)} members; none is there of {', '.join(left[:10])}"
                f"{', ...' * (len(left) > 10)}. They run still, were stopped, have failed or "
                "diverged, or their commit.json is gone: see `lightning-bnn status`.",
                category=UserWarning,
            )
        if not components:
            raise ConfigurationError(
                f"No member of the run in {self.storage} is done yet; there are {self.members}. "
                "Wait for the first, or launch the run again to resume it."
            )
        return mixture_of(components)

    def _running(self, net: nn.Module, likelihood: Likelihood | None) -> list[WeightPosterior]:
        """The chains of units that are not done, with the draws that they have so far."""
        chains: list[WeightPosterior] = []
        done = self.committed()
        for unit in (unit for unit in self.units() if unit not in done):
            streams: list[Any] = []
            for attempt in self.records.attempts(unit):
                place = f"{self.records.folder(unit, attempt)}/draws"
                with suppress(PosteriorFormatError):  # no draw yet
                    streams.append(WeightPosterior.load(place, net, likelihood))
            # the last has the draws of those before it, but may be taking them over just now
            if streams:
                longest = max(streams, key=len)
                chains += [longest.chain(number) for number in range(longest.chains)]
        return chains


def diagnose_chains(
    posterior: MixturePosterior | AveragePosterior, chains: int, inputs: Any, **options: Any
) -> Diagnosis:
    """R-hat and ESS over the chains that have some draws by now, wherever they ran or still run.

    Args:
        posterior: What there is of the run.
        chains: How many chains the run has in all.
        inputs: Where to watch predictions: a loader, a batch or a tensor.
        options: As for :func:`lightning_bnn.diagnostics.diagnose`.

    Raises:
        ConfigurationError: No chain has enough draws.
    """
    drawn: list[WeightPosterior] = [
        component
        for component in posterior.components
        if isinstance(component, DrawsPosterior)
        and len(component) >= _LEAST_DRAWS * component.chains
    ]
    if not drawn:
        raise ConfigurationError(
            f"No member of the run has {_LEAST_DRAWS} draws yet, so that there is nothing to "
            "compare. For chains the trainer needs SampleCollector(dirpath='draws'); members of "
            "ensembles and of variational inference are no chains."
        )
    diagnosis = diagnose(MixturePosterior(drawn), inputs, **options)
    if (missing := chains - len(drawn)) == 0:
        return diagnosis
    note = f"{missing} of {chains} chains have fewer than {_LEAST_DRAWS} draws: left out."
    return replace(diagnosis, notes=(*diagnosis.notes, note))
