"""Draws that stay on the disk, as a sequence."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from lightning_bnn.errors import PosteriorFormatError
from lightning_bnn.posteriors.blobs import read_blob
from lightning_bnn.posteriors.files import Files
from lightning_bnn.posteriors.manifest import DTYPES

__all__ = ["LIKELIHOOD", "StoredDraws"]

# of a blob's tensors, those of the likelihood; no name of a network begins with a dot
LIKELIHOOD = ".likelihood."

Weights = dict[str, Tensor]
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
        >>> from lightning_bnn.posteriors import store
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
        for entry in self._entries:
            if entry["tensors"] != tensors:
                raise PosteriorFormatError(
                    f"{files}: blobs/{entry['file']} has other tensors than the first draw, "
                    f"blobs/{self._entries[0]['file']}. They are not of one posterior."
                )
        self.shapes = {
            name: torch.Size(tensor["shape"][1:] if chains else tensor["shape"])
            for name, tensor in tensors.items()
            if not name.startswith(LIKELIHOOD)
        }
        self.device = torch.device("cpu")
        self._last: tuple[int, Weights] | None = None
        self._checked: set[int] = set()  # the blobs whose hash was found good
        self._changes: list[Change] = []  # what is done to each tensor that is read
        self._chosen = range(len(self._entries) * max(1, chains))

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def bytes(self) -> int:
        """The memory that all draws take when they are read; on the disk zeros take less."""
        return sum(
            DTYPES[tensor["dtype"]].itemsize * math.prod(tensor["shape"])
            for entry in self._entries
            for tensor in entry["tensors"].values()
        )

    def every(self, first: int, step: int) -> StoredDraws:
        """The draws number ``first``, ``first + step`` and so on, still on the disk."""
        made = copy.copy(self)
        made._chosen, made._last = self._chosen[first::step], None
        return made

    @overload
    def __getitem__(self, index: int) -> Weights: ...
    @overload
    def __getitem__(self, index: slice) -> list[Weights]: ...
    def __getitem__(self, index: int | slice) -> Weights | list[Weights]:
        """One draw, as a copy of its own; its blob's hash is checked the first time."""
        if isinstance(index, slice):
            return [self[one] for one in range(len(self))[index]]
        number, chain = divmod(self._chosen[index], max(1, self._chains))
        last = self._last  # looked at once: another thread may replace it
        if last is None or last[0] != number:
            last = self._last = None  # two blobs are never held together
            blob = read_blob(self._files, self._entries[number], known_good=number in self._checked)
            self._checked.add(number)
            self._last = (number, blob)
        else:
            blob = last[1]
        return {
            name: self._changed(name, blob[name][chain] if self._chains else blob[name])
            for name in self.shapes
        }

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device, copy=True)
        for change in self._changes:
            tensor = change(name, tensor)
        return tensor

    def mapped(self, change: Change) -> StoredDraws:
        """The same draws, with every tensor changed when it is read; the files stay as they are.

        Args:
            change: From the name of a tensor and its values to new values.
        """
        made = copy.copy(self)
        made._changes, made._last = [*self._changes, change], None
        made.shapes = {name: tensor.shape for name, tensor in made[0].items()}
        return made

    def to(self, device: torch.device | str) -> StoredDraws:
        """The same draws, to be read onto a device."""
        moved = copy.copy(self)
        moved.device, moved._last = torch.device(device), None
        return moved
