"""The folder of a run: who does what, what is done, and who may say so.

Layout of the storage of a run, a local path or an fsspec URL::

    <storage>/run.json                          what the run is; written once
    <storage>/units/<unit>/lease.json           the attempt that may commit; why the unit has failed
    <storage>/units/<unit>/progress.json        how far it is; replaced every few seconds
    <storage>/units/<unit>/commit.json          the result; written once, and the end of the unit
    <storage>/units/<unit>/attempt-<n>/         all that attempt n writes: checkpoints, draws, logs,
                                                posteriors

A unit is done when its commit is there. An attempt writes to a folder of its own only, so that a
*zombie*, which still runs although its node was given up, is in nobody's way; and it may commit
only while the lease names it and no other attempt has committed. Writing a commit is exclusive (a
hard link locally, a conditional PUT on S3), so a unit has one result however many attempts end.

The run, leases and commits end with a hash of themselves.

One driver has a run at a time, where that can be known. On a local disk its claim is a lock of the
process, gone the moment that it dies. On remote storage only drivers of the same process see each
other; of two others the later one takes the run over, and the earlier one ends when it finds out.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from lightning_bnn.errors import ConfigurationError, FencedError, PosteriorFormatError
from lightning_bnn.launch.patience import patiently
from lightning_bnn.launch.units import Unit
from lightning_bnn.storage.files import absolute, open_directory
from lightning_bnn.storage.manifest import LIMIT, VERSION, encode, json_value, unseal

__all__ = ["RunRecords"]

_FORMAT = "lightning_bnn.{}"
_ATTEMPT = re.compile(r"attempt-([0-9]{4,})")
# what each must hold
_FORMS = {
    "run": {"units": [[int]]},
    "lease": {"attempt": int, "error?": str},
    "commit": {"attempt": int, "result": dict},
}

# The runs that this process drives: the lock of a process does not keep out itself.
_CLAIMED: set[str] = set()
_CLAIMING = threading.Lock()


class RunRecords:
    """The records of a run; reading them needs neither Ray nor the run itself.

    Args:
        storage: A directory or an fsspec URL.

    Example:
        >>> records = RunRecords("memory://records-doc")
        >>> unit = Unit((0,))
        >>> records.grant(unit, attempt=1)
        >>> records.grant(unit, attempt=2)
        >>> try:
        ...     records.commit(unit, attempt=1, result={})
        ... except FencedError as error:
        ...     print(error)
        Attempt 1 of member 0 may not commit: attempt 2 has taken its place.
        >>> records.commit(unit, attempt=2, result={"loss": 0.5})
        >>> records.committed(unit)["result"]
        {'loss': 0.5}
    """

    def __init__(self, storage: str | os.PathLike[str]) -> None:
        local = re.sub("^(file|local)://", "", str(storage))  # one run has one name
        # the slashes of memory:// stay
        self.storage = re.sub(r"(?<=[^:/])/+$", "", absolute(local))
        self.files = open_directory(self.storage)

    # ---------------------------------------------------------------- the run

    def begin(self, description: Mapping[str, Any]) -> dict[str, Any]:
        """Write what the run is, or check that the same run was begun here before.

        Args:
            description: What must not change between one start of a run and the next.

        Raises:
            ConfigurationError: The storage is of another run.
        """
        if patiently(self.files.is_file):
            raise ConfigurationError(f"{self.files} is a file; a run is stored in a directory.")
        body = json_value(description, "run")
        if patiently(lambda: self.files.create("run.json", _sealed("run", body))):
            return body
        before = self.run() or {}
        for name in [*before, *body]:
            was, now = before.get(name), body.get(name)
            if name == "units" and now and now[: len(was or ())] == was:
                continue  # the same, or more members than before
            if was != now:
                hint = "Members can be added after full stacks only. " if name == "units" else ""
                raise ConfigurationError(
                    f"{self.files} holds a run with {name}={was!r:.200}; this one has "
                    f"{name}={now!r:.200}. {hint}Use the same options to resume it, or another "
                    "storage= for a new run."
                )
        if before != body:
            patiently(lambda: self.files.put("run.json", _sealed("run", body)))
        return body

    def run(self) -> dict[str, Any] | None:
        """What the run is; None where none was begun."""
        return self._read("run.json", "run")

    def units(self) -> list[Unit]:
        """The units of the run.

        Raises:
            ConfigurationError: There is no run here.
        """
        run = self.run()
        if run is None:
            found = ", ".join(self.files.names()[:5]) or "nothing"
            raise ConfigurationError(
                f"{self.files} holds no run: there is no run.json; found: {found}. Pass the "
                "storage= that was given to launch."
            )
        if not all(run["units"]):
            raise ConfigurationError(f"{self.files}: run.json names a unit without members.")
        return [Unit(tuple(members)) for members in run["units"]]

    def claim(self) -> Callable[[], None]:
        """Keep other drivers from the run until the result is called.

        Raises:
            ConfigurationError: Another driver has it.

        Example:
            >>> release = RunRecords("memory://claim-doc").claim()
            >>> try:
            ...     RunRecords("memory://claim-doc/").claim()
            ... except ConfigurationError as error:
            ...     print(error)
            The run in memory://claim-doc is under way in this process. Wait for it, or cancel() it.
            >>> release()
            >>> RunRecords("memory://claim-doc").claim()()
        """
        with _CLAIMING:
            if self.storage in _CLAIMED:
                raise ConfigurationError(
                    f"The run in {self.storage} is under way in this process. Wait for it, or "
                    "cancel() it."
                )
            try:
                unlock = self.files.claim()
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"The run in {self.storage} is under way: another process on this storage "
                    "drives it. Wait for that one or end it; or use another storage= for a new run."
                ) from error
            _CLAIMED.add(self.storage)

        def release() -> None:
            with _CLAIMING:
                if self.storage in _CLAIMED:
                    _CLAIMED.remove(self.storage)
                    unlock()

        return release

    # ---------------------------------------------------------------- attempts

    def folder(self, unit: Unit, attempt: int | None = None) -> str:
        """Where an attempt writes, or where all of a unit lies."""
        place = f"{self.storage}/units/{unit.name}"
        return place if attempt is None else f"{place}/attempt-{attempt:04d}"

    def attempts(self, unit: Unit) -> list[int]:
        """The numbers of the attempts that have written anything, in order."""
        names = patiently(lambda: self.files.names(f"units/{unit.name}"))
        return sorted(int(found[1]) for name in names if (found := _ATTEMPT.fullmatch(name)))

    def grant(self, unit: Unit, attempt: int, error: str | None = None) -> None:
        """Let an attempt commit, and no other from now on. Only the driver of a run does this.

        Args:
            unit: What is trained.
            attempt: The number of the attempt.
            error: Why the unit has failed: then there will be no such attempt.
        """
        lease = {"attempt": attempt, **({} if error is None else {"error": error})}
        name = f"units/{unit.name}/lease.json"
        patiently(lambda: self.files.put(name, _sealed("lease", lease)))

    def lease(self, unit: Unit) -> dict[str, Any]:
        """The ``attempt`` that may commit, 0 if there was none; and the ``error`` of a failure."""
        return self._read(f"units/{unit.name}/lease.json", "lease") or {"attempt": 0}

    def granted(self, unit: Unit) -> int:
        """The attempt that may commit; 0 where there was none."""
        return int(self.lease(unit)["attempt"])

    def check_granted(self, unit: Unit, attempt: int) -> None:
        """Raise a FencedError if another attempt has taken the place of this one."""
        holder = self.granted(unit)
        if holder != attempt:
            why = f"attempt {holder} has taken its place" if holder else "its lease is gone"
            raise FencedError(f"Attempt {attempt} of {unit} may not commit: {why}.")

    def commit(self, unit: Unit, attempt: int, result: Mapping[str, Any]) -> None:
        """Say that a unit is done, once and for all.

        Raises:
            FencedError: Another attempt has taken its place, or has committed before.
        """
        self.check_granted(unit, attempt)
        body = json_value({"attempt": attempt, "result": result}, "commit")
        name = f"units/{unit.name}/commit.json"
        if not patiently(lambda: self.files.create(name, _sealed("commit", body))):
            first = (self.committed(unit) or {}).get("attempt")
            raise FencedError(
                f"Attempt {attempt} of {unit} may not commit: attempt {first} has done so before."
            )

    def committed(self, unit: Unit) -> dict[str, Any] | None:
        """The attempt that has committed and its result; None while there is none."""
        return self._read(f"units/{unit.name}/commit.json", "commit")

    def unit_names(self) -> set[str]:
        """The names of the units that have a folder: no other can have a commit."""
        return set(patiently(lambda: self.files.names("units")))

    # ---------------------------------------------------------------- progress

    def put_progress(self, unit: Unit, progress: Mapping[str, Any]) -> None:
        """Say how far an attempt is; whoever reads it may find it gone or old."""
        self.files.put(f"units/{unit.name}/progress.json", json.dumps(progress).encode())

    def progress(self, unit: Unit) -> dict[str, Any] | None:
        """The last progress that a unit told of, if any can be read."""
        try:
            data = self.files.get(f"units/{unit.name}/progress.json", LIMIT)
            progress = None if data is None else json.loads(data)
        except Exception:  # of whatever client reads the storage; there will be another
            return None
        return progress if isinstance(progress, dict) else None

    def _read(self, name: str, kind: str) -> dict[str, Any] | None:
        data = patiently(lambda: self.files.get(name, LIMIT + 1))
        if data is None:
            return None
        try:
            record = unseal(data, f"{self.files}: {name}", _FORMAT.format(kind), _FORMS[kind])
        except PosteriorFormatError as error:
            raise ConfigurationError(
                f"{error} If this is no storage of a run, choose another storage=."
            ) from error
        return {key: record[key] for key in record if key not in ("format", "version", "sha256")}


def _sealed(kind: str, body: Mapping[str, Any]) -> bytes:
    return encode({"format": _FORMAT.format(kind), "version": VERSION, **body})
