"""Draws on the disk as they are taken: a stored posterior that grows, and is whole at each moment.

Layout of a stream::

    <directory>/manifest.json                              the head, written at the start
    <directory>/blobs/fixed-<hash>.safetensors             what all draws have in common
    <directory>/blobs/draw-<step>-<id>.safetensors         all chains after a step, stacked
    <directory>/records/<step>.json                        says that this step's draw is there
    <directory>/end.json                                   how many there were when a fit ended
    <directory>/.lock                                      locked while a trainer writes here

The head is the manifest of an ordinary posterior of draws (see
:mod:`lightning_bnn.storage.store`), with the names and shapes that every *snapshot* (the draws
of all chains after one step) has. A snapshot is there when its record is: a small JSON object with
a hash of itself, which names the blob and its hash. Records are numbered from 0 on, so that one
that was lost is missed; ``end.json``, which is there when a fit has ended and no other has resumed
it, tells if the last ones were. The blob is written first, flushed and renamed, then the record
likewise, so that a crash at any moment leaves the stream without the snapshot or with it. Snapshots
are removed the other way round: latest record first, and the blobs when no record names them any
more. What a crash leaves behind is in nobody's way, and :meth:`DrawStream.truncate` removes it.

Memory does not grow with the number of draws: a snapshot is written from the tensors' own memory,
hashed meanwhile, and read when it is asked for.
"""

from __future__ import annotations

import copy
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.lightning import rank_zero_warn
from lightning_bnn.storage import store
from lightning_bnn.storage.files import Files, open_directory
from lightning_bnn.storage.manifest import (
    LIMIT,
    MANIFEST,
    VERSION,
    checked,
    encode,
    json_value,
    unseal,
)
from lightning_bnn.storage.store import describe_tensors, pieces_of, read_blob, sha256_of

__all__ = ["Change", "DrawStream", "StoredDraws", "Weights"]

FORMAT = "lightning_bnn.draw"
RECORD = re.compile(r"([0-9]{12})\.json")
END = "end.json"
_TRIES = 3  # to read a stream that a run changes meanwhile
_MOST_MISSING = 10_000  # snapshots that are named one by one

HEAD = {"chains": int, "stream": {"id": str, "tensors": store.TENSORS}}

# of a blob's tensors, those of the likelihood; no name of a network begins with a dot
LIKELIHOOD = ".likelihood."

Weights = dict[str, Tensor]
# from the name of a tensor and its values, which may have more axes in front, to new values
Change = Callable[[str, Tensor], Tensor]


class StoredDraws(Sequence[Weights]):
    """Draws on the disk as a sequence, each read when it is asked for; one blob is kept.

    The draws of a snapshot follow each other, chain after chain, then comes the next snapshot.

    Args:
        files: Where they lie.
        entries: The blobs, as a manifest has them.
        chains: The draws that each blob holds, stacked; 0 for a single one without that axis.

    Attributes:
        shapes: The shape of each tensor of a draw, by name.
        device: Where draws go when they are read.

    Example:
        >>> from lightning_bnn.storage import store
        >>> blobs = {"a": {"w": torch.zeros(2)}, "b": {"w": torch.ones(2)}}
        >>> store.write("memory://stored-doc", kind="draws", blobs=blobs, fields={})
        >>> stored = store.read("memory://stored-doc")
        >>> draws = StoredDraws(stored.files, [stored.entry(name) for name in "ab"], chains=0)
        >>> len(draws), draws[1]
        (2, {'w': tensor([1., 1.])})
    """

    def __init__(self, files: Files, entries: Sequence[dict[str, Any]], chains: int) -> None:
        self._files, self._entries, self._chains = files, list(entries), chains
        tensors = self._entries[0]["tensors"] if entries else {}
        self.shapes = {
            name: torch.Size(tensor["shape"][1:] if chains else tensor["shape"])
            for name, tensor in tensors.items()
            if not name.startswith(LIKELIHOOD)
        }
        self.device = torch.device("cpu")
        self._last: tuple[int, Weights] | None = None
        # of the blobs whose hash was found good, as they were before it
        self._stamps: dict[int, Any] = {}
        self._changes: list[Change] = []  # what is done to each tensor that is read
        self._chosen = range(len(self._entries) * max(1, chains))

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Weights: ...
    @overload
    def __getitem__(self, index: slice) -> StoredDraws: ...
    def __getitem__(self, index: int | slice) -> Weights | StoredDraws:
        """One draw, as a copy of its own.

        Its blob's hash is checked the first time, and whenever the file was touched since; on
        remote storage, where that cannot be known, each time. A slice stays on the disk.
        """
        if isinstance(index, slice):
            return self._with(_chosen=self._chosen[index])
        number, chain = divmod(self._chosen[index], max(1, self._chains))
        last = self._last  # looked at once: another thread may replace it
        if last is None or last[0] != number:
            last = self._last = None  # two blobs are never held together
            blob = self._read(number)
            self._last = (number, blob)
        else:
            blob = last[1]
        draw: Weights = {}
        for name in self.shapes:
            tensor = blob[name][chain] if self._chains else blob[name]
            draw[name] = tensor.to(self.device, copy=True)
            for change in self._changes:
                draw[name] = change(name, draw[name])
        return draw

    def _read(self, number: int) -> Weights:
        entry, stamp = self._entries[number], self._stamps.get(number)
        if stamp is not None:
            return read_blob(self._files, entry, stamp)
        with suppress(OSError):  # a file that is missing: reading it says so
            stamp = self._files.stamp(f"blobs/{entry['file']}")
        blob = read_blob(self._files, entry)
        self._stamps[number] = stamp
        return blob

    def mapped(self, change: Change) -> StoredDraws:
        """The same draws, with every tensor changed when it is read; the files stay as they are.

        Args:
            change: From the name of a tensor and its values to new values.
        """
        made = self._with(_changes=[*self._changes, change])
        made.shapes = {name: tensor.shape for name, tensor in made[0].items()}
        return made

    def to(self, device: torch.device | str) -> StoredDraws:
        """The same draws, to be read onto a device."""
        return self._with(device=torch.device(device))

    def _with(self, **changes: Any) -> StoredDraws:
        made = copy.copy(self)
        vars(made).update(changes, _last=None)
        return made


class DrawStream:
    """A directory that grows draw by draw; ``Posterior.load`` opens it at any moment.

    One process writes at a time. Use :meth:`create` or :meth:`open`.

    Attributes:
        chains: The number of chains, the leading axis of every tensor of the weights.
        id: Tells this stream from every other.

    Example:
        >>> import torch
        >>> weights = {"w": torch.zeros(2, 3)}  # two chains
        >>> stream = DrawStream.create("memory://stream-doc", fields={}, weights=weights)
        >>> for step in (10, 20):
        ...     stream.append(step, {"w": torch.full((2, 3), float(step))})
        >>> stream.truncate(after_step=10)
        >>> stream = DrawStream.open("memory://stream-doc")
        >>> stream.steps(), len(stream.draws()), stream.draws()[1]
        ([10], 2, {'w': tensor([10., 10., 10.])})
    """

    def __init__(self, stored: store.Stored, last_step: int | None = None) -> None:
        head = stored.fields.get("stream")
        if head is None:
            raise PosteriorFormatError(
                f"{stored.files} is no stream of draws: it was written by posterior.save(). Pass "
                "the directory that was given to SampleCollector(dirpath=...)."
            )
        self.files, self.stored = stored.files, stored
        checked(stored.fields, HEAD, f"{self.files}: {MANIFEST}", "fields")
        self.chains: int = stored.fields["chains"]
        for name, tensor in head["tensors"].items():
            if not name.startswith(LIKELIHOOD) and tensor["shape"][:1] != [self.chains]:
                raise PosteriorFormatError(
                    f"{self.files}: {MANIFEST} says that there are {self.chains} chains, and that "
                    f"{name!r} of all of them has the shape {tensor['shape']}."
                )
        self.id: str = head["id"]
        self._tensors: dict[str, Any] = head["tensors"]
        self._head = self.files.get(MANIFEST)
        self._entries: dict[int, dict[str, Any]] = {}
        self._numbers: dict[int, int] = {}
        for left in reversed(range(_TRIES)):
            # of a run that resumes meanwhile, old and new records may be seen
            try:
                self._look(last_step)
            except PosteriorFormatError:
                if left == 0:
                    raise
                continue
            if not (missing := self._missing(last_step)):
                break
        if missing:
            known = len(self) + len(missing)
            numbers = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
            rank_zero_warn(
                f"{self.files}: {len(self)} of {known} snapshots of the draws are there; the "
                f"records of numbers {numbers} (from 0) are missing. Restore them from a copy; "
                "what is there is used.",
                category=UserWarning,
            )

    def _look(self, last_step: int | None) -> None:
        """Note the snapshots that are there now."""
        # A run may be writing meanwhile: a record that is seen has its blob, if the blobs are
        # looked at later; one that is gone again was removed by a run that resumed.
        records = {
            step: record
            for step in self.recorded_steps()
            if (last_step is None or step <= last_step) and (record := self._read(step))
        }
        present = set(self.files.names("blobs"))
        self._entries, self._numbers = {}, {}
        for place, (step, record) in enumerate(records.items()):
            blob = record["blob"]
            if blob["file"] in present:
                self._note(step, blob, record.get("number", place))  # none before version 0.2
            elif self.files.get(_record_name(step), 1) is not None:
                raise PosteriorFormatError(
                    f"{self.files}: {_record_name(step)} names blobs/{blob['file']}, which is "
                    "missing. Restore it from a copy, or remove the record."
                )

    def _missing(self, last_step: int | None) -> list[int]:
        """The numbers of the snapshots that were written and are not there."""
        count = self._next()
        if last_step is None and (data := self.files.get(END, LIMIT + 1)) is not None:
            end = unseal(data, f"{self.files}: {END}", FORMAT, {"stream": str, "snapshots": int})
            count = max(count, end["snapshots"] if end["stream"] == self.id else 0)
        if count > len(self) + _MOST_MISSING:
            raise PosteriorFormatError(
                f"{self.files}: {len(self)} of {count} snapshots of the draws are there. Restore "
                "the others from a copy."
            )
        return sorted(set(range(count)) - set(self._numbers.values()))

    def end(self) -> None:
        """Say that all draws of a fit are there, so that one that is lost later is missed."""
        body = {"format": FORMAT, "version": VERSION, "stream": self.id, "snapshots": self._next()}
        with self.files.one_writer():
            self._check_owned()
            self.files.put(END, encode(body))

    def _next(self) -> int:
        return 1 + max(self._numbers.values(), default=-1)

    # ---------------------------------------------------------------- making, opening

    @staticmethod
    def check_free(directory: str | os.PathLike[str]) -> None:
        """Raise a ConfigurationError if a new stream may not begin in a directory."""
        files = open_directory(directory)
        steps = [name[:12] for name in files.names("records") if RECORD.fullmatch(name)]
        if steps:
            raise ConfigurationError(
                f"{files} already holds draws: {len(steps)} snapshots, the last of step "
                f"{int(steps[-1])}. Resume with ckpt_path=, choose another directory or remove it."
            )
        if files.is_file() or (
            files.get(MANIFEST) is not None and "stream" not in store.read(directory).fields
        ):
            raise ConfigurationError(
                f"{files} already holds a posterior or is a file. Choose another directory."
            )

    @classmethod
    def create(
        cls,
        directory: str | os.PathLike[str],
        *,
        fields: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        fixed: Mapping[str, Tensor] | None = None,
        likelihood: Mapping[str, Tensor] | None = None,
    ) -> Self:
        """Begin a stream; see :func:`lightning_bnn.posteriors.draws.create_stream` for nets.

        Args:
            directory: A local directory or an fsspec URL, without draws.
            fields: What the manifest says of the network and the likelihood.
            weights: Weights such as every snapshot will have: names, dtypes and shapes, with a
                leading axis of chains. Their values are not stored.
            fixed: The tensors that all draws have in common.
            likelihood: What the likelihood has learned so far.

        Raises:
            ConfigurationError: The directory holds draws or something else already.
        """
        cls.check_free(directory)
        chains = len(next(iter(weights.values())))
        common = {"fixed": fixed or {}, "likelihood": likelihood or {}}
        described = describe_tensors(_snapshot(weights, likelihood))
        head = {"id": secrets.token_hex(8), "tensors": described}
        store.write(
            directory,
            kind="draws",
            blobs={name: tensors for name, tensors in common.items() if tensors},
            fields={**fields, "chains": chains, "stream": head},
        )
        return cls.open(directory)

    @classmethod
    def open(cls, directory: str | os.PathLike[str], last_step: int | None = None) -> Self:
        """Open a stream to read it or to resume it.

        Args:
            directory: Where it lies.
            last_step: What is of later steps is not looked at, be it damaged or not.

        Raises:
            PosteriorFormatError: There is none, or it is damaged.
        """
        return cls(store.read(directory), last_step)

    # ---------------------------------------------------------------- reading

    def __len__(self) -> int:
        """The number of snapshots; each holds a draw of every chain."""
        return len(self._entries)

    def steps(self) -> list[int]:
        """The steps after which snapshots were taken, in order."""
        return list(self._entries)

    def recorded_steps(self) -> list[int]:
        """The steps of all records on the disk now, good or not, in order."""
        return [int(name[:12]) for name in self.files.names("records") if RECORD.fullmatch(name)]

    def hashes(self) -> dict[int, str]:
        """The sha256 of each snapshot's file, by step; equal where draws are equal in each bit."""
        return {step: entry["sha256"] for step, entry in self._entries.items()}

    def fields(self, step: int) -> dict[str, Any]:
        """The fields that were given with the snapshot of a step."""
        self._entry(step)  # says what is there instead
        return (self._read(step) or {}).get("fields", {})

    def draws(self, steps: Sequence[int] | None = None) -> StoredDraws:
        """The draws, step after step and in it chain after chain, read when asked for.

        Args:
            steps: After which steps they were taken; by default all so far.
        """
        chosen = self.steps() if steps is None else steps
        return StoredDraws(self.files, [self._entry(step) for step in chosen], self.chains)

    def fixed(self) -> Weights:
        """The tensors that all draws have in common."""
        return self.stored.load_if_present("fixed")

    def likelihood(self, step: int | None = None) -> Weights:
        """What the likelihood had learned when a snapshot was taken, by default the last."""
        names = [name for name in self._tensors if name.startswith(LIKELIHOOD)]
        if not names or not self._entries:
            return {}
        entry = self._entry(max(self._entries) if step is None else step)
        blob = read_blob(self.files, entry)
        return {name.removeprefix(LIKELIHOOD): blob[name] for name in names}

    def _entry(self, step: int) -> dict[str, Any]:
        if step not in self._entries:
            raise PosteriorFormatError(
                f"{self.files} has no draws of step {step}; it has {len(self)} snapshots. They may "
                "have been dropped by a run that resumed from an earlier checkpoint."
            )
        return self._entries[step]

    # ---------------------------------------------------------------- writing

    def append(
        self,
        step: int,
        weights: Mapping[str, Tensor],
        likelihood: Mapping[str, Tensor] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """Add the draws of all chains after a step; on the disk when this returns.

        Args:
            step: A later step than all before.
            weights: The weights, with a leading axis of chains.
            likelihood: What the likelihood has learned so far.
            fields: Anything else worth keeping of this step, as JSON.

        Raises:
            ConfigurationError: The weights are not those that the stream was made for, the step is
                not a later one, or another run has taken the directory.
            OSError: The disk is full or fails; all earlier draws are as they were.
        """
        if self._entries and step <= max(self._entries):
            raise ConfigurationError(
                f"{self.files} holds the draws of step {max(self._entries)}; the next must be "
                f"of a later step, but got step {step}."
            )
        tensors = _snapshot(weights, likelihood)
        if (given := describe_tensors(tensors)) != self._tensors:
            raise ConfigurationError(
                f"All snapshots of the stream in {self.files} have the tensors {self._tensors}; "
                f"this one has {given}."
            )
        body = {"format": FORMAT, "version": VERSION, "stream": self.id, "step": step}
        body["number"] = number = self._next()
        body["fields"] = json_value(fields or {}, "fields")
        pieces = pieces_of(tensors)
        size = sum(len(piece) for piece in pieces)
        blob = {"file": f"draw-{step:012d}-{self.id}.safetensors", "bytes": size}
        path, record = _record_name(step), b""
        with self.files.one_writer(), ThreadPoolExecutor(1) as beside:
            self._check_owned()
            try:
                digest = beside.submit(sha256_of, pieces)
                self.files.put(f"blobs/{blob['file']}", *pieces)
                blob["sha256"] = digest.result()
                record = encode({**body, "blob": blob})
                self.files.put(path, record)
            except BaseException:
                # A failed put of the record may still have arrived (a lost reply): look first.
                with suppress(OSError):
                    if record and self.files.get(path) == record:
                        self._note(step, blob, number)
                    else:
                        self.files.remove(f"blobs/{blob['file']}")
                raise
        self._note(step, blob, number)

    def _note(self, step: int, blob: Mapping[str, Any], number: int) -> None:
        self._entries[step] = {**blob, "tensors": self._tensors}
        self._numbers[step] = number

    def truncate(self, after_step: int) -> None:
        """Remove the snapshots of steps after ``after_step``, and what crashes have left behind.

        Args:
            after_step: The last step to keep.
        """
        with self.files.one_writer():
            self._check_owned()
            self.files.remove(END)
            # the latest first: at each moment the stream is one that once was
            later = [step for step in reversed(self.recorded_steps()) if step > after_step]
            self.files.remove(*map(_record_name, later))
            for step in later:
                self._entries.pop(step, None)
                self._numbers.pop(step, None)
            # blobs when that is on the disk: no record may outlive its blob
            common = [self.stored.entry(name) for name in self.stored.blob_names]
            kept = [*common, *self._entries.values()]
            store.remove_unnamed(self.files, {entry["file"] for entry in kept})

    def _check_owned(self) -> None:
        if self.files.get(MANIFEST) != self._head:
            raise ConfigurationError(
                f"{self.files} was removed, or taken by another run, since this one began to write "
                "draws to it. Give each run a directory of its own."
            )

    def _read(self, step: int) -> dict[str, Any] | None:
        """Read a record and check it; None if it is gone."""
        data = self.files.get(_record_name(step), LIMIT + 1)
        if data is None:
            return None
        # of this step and of this stream, not one that was copied here
        form = {"step": {step}, "stream": {self.id}, "number?": int, "fields": dict}
        form["blob"] = store.BLOB
        try:
            return unseal(data, f"{self.files}: {_record_name(step)}", FORMAT, form)
        except PosteriorFormatError as error:
            raise PosteriorFormatError(
                f"{error} If there is no copy, remove this record: the draws of other steps are "
                "not touched by it."
            ) from error


def _record_name(step: int) -> str:
    return f"records/{step:012d}.json"


def _snapshot(weights: Mapping[str, Tensor], likelihood: Mapping[str, Tensor] | None) -> Weights:
    learned = {LIKELIHOOD + name: tensor for name, tensor in (likelihood or {}).items()}
    return {**weights, **learned}
