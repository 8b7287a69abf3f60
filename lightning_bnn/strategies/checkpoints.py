"""Checkpoints of a fit on local disks: written all or nothing, and checked when they are read.

A checkpoint goes to a temporary name in its folder, is flushed and renamed, so that a crash or a
full disk leaves the one before as it was. It needs no checksum of its own: the file is a zip
archive, which has one of each of its parts. ``torch.load`` does not look at them; here they are
compared first. On remote storage all is as Lightning does it.

A damaged checkpoint is an error, but where a fit resumes from it: then the newest whole one that
was written before it to the same folder is used, with a warning, because a resumed fit comes to
the same end from either. It must be of the same fit: where a folder holds checkpoints of several,
and the damaged one does not tell whose it was, none is chosen. To test or to load, other weights
than asked for would be no help.
"""

from __future__ import annotations

import re
import time
import zipfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from lightning_bnn.errors import CheckpointError
from lightning_bnn.lightning import TorchCheckpointIO, TrainerFn, pl, pl_load, rank_zero_warn
from lightning_bnn.storage.files import TEMPORARY, write_atomic

__all__ = ["WholeCheckpointIO", "check_checkpoint", "protect_checkpoints"]

_HOUR = 3600.0


def protect_checkpoints(trainer: pl.Trainer) -> None:
    """Let a trainer write and read its checkpoints by this module, unless it was told how."""
    owner: Any = trainer.strategy
    while hasattr(owner.checkpoint_io, "checkpoint_io"):  # AsyncCheckpointIO, around another
        owner = owner.checkpoint_io
    if type(owner.checkpoint_io) in (TorchCheckpointIO, WholeCheckpointIO):
        owner._checkpoint_io = WholeCheckpointIO(trainer)


def check_checkpoint(path: Any) -> None:
    """Raise if a local file is no whole checkpoint.

    Raises:
        CheckpointError: The file is damaged.
    """
    local = _local(path)
    if local is not None and (reason := _damage(local)):
        raise CheckpointError(
            f"The checkpoint {local} is damaged: {reason}. Use another one, or copy the file again "
            "from where it came from."
        )


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's plugin for checkpoints of one file, with files that are whole.

    Args:
        trainer: Whose checkpoints they are.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__()
        self._trainer = trainer

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        local = _local(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        write_atomic(local, partial(_save, checkpoint))
        for left in local.parent.glob(".tmp-*"):  # of a process that was killed while saving
            with suppress(OSError):  # or of one that is saving now, and renames it
                if TEMPORARY.fullmatch(left.name) and time.time() - _written(left) > _HOUR:
                    left.unlink()

    @override
    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        local = _local(path)
        if local is not None and local.is_file():
            path = self._whole(local)
            # by name: processes on several machines may have copies in folders of their own
            first = self._trainer.strategy.broadcast(path.name)
            if path.name != first:
                raise CheckpointError(
                    f"The first process resumes from {first}, this one would from {path}: their "
                    f"copies of {local} differ. Pass a ckpt_path= that is whole on all machines."
                )
        return super().load_checkpoint(path, *arguments, **options)

    def _whole(self, path: Path) -> Path:
        """The file itself; to resume, the newest whole one before it in its place."""
        reason = _damage(path)
        if reason and self._trainer.state.fn == TrainerFn.FITTING:
            earlier = _earlier(path)
            own = _fit_of(path)
            runs = {fit for _, fit in earlier}
            if own is None and len(runs) > 1:
                raise CheckpointError(
                    f"The checkpoint {path} is damaged: {reason}. Its folder holds checkpoints of "
                    f"{len(runs)} fits, so that no other can take its place. Pass the one to "
                    "resume from as ckpt_path=."
                )
            for other, fit in earlier:
                if own in (None, fit):
                    rank_zero_warn(
                        f"The checkpoint {path} is damaged: {reason}. The fit resumes from "
                        f"{other} instead, the newest whole one that was written before it."
                    )
                    return other
        check_checkpoint(path)
        return path


def _local(path: Any) -> Path | None:
    """The path of a local file; None for a remote one, and for what is no path."""
    if not isinstance(path, str | Path):
        return None
    if re.match(r"https?://", str(path)):  # which Lightning downloads, without fsspec's extra
        return None
    file_system, inner = fsspec.core.url_to_fs(str(path))
    return Path(inner) if isinstance(file_system, LocalFileSystem) else None


def _save(checkpoint: dict[str, Any], file: BinaryIO) -> None:
    """Write a checkpoint as it is made, without a copy of all of it in memory."""
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # a full disk, in the words of torch's writer
            raise error.__context__ from None
        raise


def _earlier(path: Path) -> list[tuple[Path, str]]:
    """Whole checkpoints of the same folder that were not written after it, and their fits."""
    found = []
    for other in path.parent.glob(f"*{path.suffix}"):
        with suppress(OSError):  # another process may have taken it away
            written = _written(other)
            if not other.is_file() or other.samefile(path) or written > _written(path):
                continue
            if not _damage(other) and (fit := _fit_of(other)) is not None:
                found.append((written, other, fit))
    return [(other, fit) for _, other, fit in sorted(found, reverse=True)]


def _fit_of(path: Path) -> str | None:
    """What tells the checkpoints of a fit from those of others; None if they cannot be resumed."""
    try:
        saved = pl_load(path, map_location="cpu", weights_only=True)
        own = saved.get("lightning_bnn", {})
        known = [own.get(name) for name in ("strategy", "options", "order")]
        return str(known) if "optimizer_states" in saved else None
    except Exception as error:  # a damaged file may lead to any
        # objects of the user's, which only resuming itself may load
        return "" if type(error).__name__ == "UnpicklingError" and not _damage(path) else None


def _written(path: Path) -> float:
    return path.stat().st_mtime


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is whole, or a folder, as sharded ones are."""
    if path.is_dir():
        return None
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                wrong = archive.testzip()
                parts = archive.infolist()
            # the table of contents has no checksum: its names, and flags that are never set
            names = {part.filename for part in parts}
            if len(names) < len(parts) or any(part.external_attr for part in parts):
                return "its table of contents is not as it was written"
            torch._C.PyTorchFileReader(str(path))  # which reads some fields that zipfile does not
        except Exception as error:  # a damaged file may lead to any
            return str(error).partition("\n")[0] or type(error).__name__
    return None if wrong is None else f"its part {wrong} does not have its checksum"
