"""Checkpoints of a fit on local disks: written all or nothing, and checked when they are read.

A checkpoint goes to a temporary name in its folder, is flushed and renamed, so that a crash or a
full disk leaves the one before as it was. It needs no checksum of its own: the file is a zip
archive, which has one of each of its parts. ``torch.load`` does not look at them; here they are
compared first. On remote storage all is as Lightning does it.

A damaged checkpoint is an error, but where a fit resumes from it: then the newest whole one that
was written before it to the same folder is used, with a warning, because a resumed fit comes to
the same end from either. To test or to load, other weights than asked for would be no help.
"""

from __future__ import annotations

import io
import re
import time
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from lightning_bnn.errors import CheckpointError
from lightning_bnn.lightning import TorchCheckpointIO, TrainerFn, pl, rank_zero_warn
from lightning_bnn.storage.files import TEMPORARY, write_atomic

__all__ = ["WholeCheckpointIO", "check_checkpoint", "protect_checkpoints"]

_HOUR = 3600.0


def protect_checkpoints(trainer: pl.Trainer) -> None:
    """Let a trainer write and read its checkpoints by this module, unless it was told how."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = WholeCheckpointIO(trainer)


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
        contents = io.BytesIO()
        torch.save(checkpoint, contents)
        write_atomic(local, contents.getbuffer())
        for left in local.parent.glob(".tmp-*"):  # of a process that was killed while saving
            if TEMPORARY.fullmatch(left.name) and time.time() - _written(left) > _HOUR:
                left.unlink(missing_ok=True)

    @override
    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        local = _local(path)
        if local is not None and local.is_file():
            here = str(self._whole(local))
            path = self._trainer.strategy.broadcast(here)
            if path != here:
                raise CheckpointError(
                    f"The first process resumes from {path}, this one would from {here}: their "
                    f"copies of {local} differ. Pass a ckpt_path= that is whole on all machines."
                )
        return super().load_checkpoint(path, *arguments, **options)

    def _whole(self, path: Path) -> Path:
        """The file itself; to resume, the newest whole one before it in its place."""
        reason = _damage(path)
        if reason and self._trainer.state.fn == TrainerFn.FITTING:
            others = [other for other in path.parent.glob(f"*{path.suffix}") if other.is_file()]
            before = [o for o in others if not o.samefile(path) and _written(o) <= _written(path)]
            for earlier in sorted(before, key=_written, reverse=True):
                if not _damage(earlier):
                    rank_zero_warn(
                        f"The checkpoint {path} is damaged: {reason}. The fit resumes from "
                        f"{earlier} instead, the newest whole one that was written before it."
                    )
                    return earlier
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
