"""The most uncertain rows with their pictures, and pictures as PNG in a data URI."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from lightning_bnn.report.rows import Array, Rows

__all__ = ["MostUncertain", "data_uri", "is_image", "picture"]

# Longest side of a picture in the report, in pixels.
LARGEST = 64


def is_image(inputs: object) -> bool:
    """Whether inputs are a batch of grey or colour pictures, (B, 1 or 3, H, W)."""
    return isinstance(inputs, Tensor) and inputs.ndim == 4 and inputs.shape[1] in (1, 3)


def picture(image: Tensor) -> Array:
    """A picture (C, H, W) as bytes (H, W, C), at most 64 pixels a side.

    Values within [0, 1] are taken as they are; others are stretched from the picture's smallest to
    its largest.

    Example:
        >>> import torch
        >>> picture(torch.tensor([[[0.0, 1.0]]])).tolist()
        [[[0], [255]]]
    """
    image = image.detach().cpu().float()
    longest = max(image.shape[1:])
    if longest > LARGEST:
        size = [max(1, round(side * LARGEST / longest)) for side in image.shape[1:]]
        image = F.interpolate(image[None], size, mode="area")[0]
    lowest, highest = image.min(), image.max()
    if lowest < 0 or highest > 1:
        image = (image - lowest) / (highest - lowest).clamp(min=1e-12)
    shown: Array = (image.nan_to_num() * 255).round().byte().permute(1, 2, 0).numpy()
    return shown


def data_uri(pixels: Array) -> str:
    """A picture (H, W, C) of bytes as a PNG that a page can hold.

    Example:
        >>> data_uri(np.zeros((8, 8, 1), np.uint8))[:22]
        'data:image/png;base64,'
    """
    from PIL import Image  # only where there are pictures

    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


class MostUncertain:
    """The examples with the rows of largest entropy, kept while streaming.

    Args:
        keep: How many.
    """

    def __init__(self, keep: int = 24) -> None:
        self.keep = keep
        self.entries: list[dict[str, Any]] = []

    def add(self, rows: Rows, example: Array, inputs: Tensor | None) -> None:
        """Add the rows of a batch.

        Args:
            rows: Of classes.
            example: The indices of the batch's examples, (B,), those without rows included.
            inputs: The batch's inputs; pictures are kept, others are not.
        """
        columns = rows.columns
        order = np.lexsort((rows.position, rows.example, -columns["entropy"]))
        # Of an example with many rows the most uncertain one, or it would fill the list alone.
        first = np.unique(rows.example[order], return_index=True)[1]
        order = order[np.sort(first)[: self.keep]]
        least = self.entries[-1]["entropy"] if len(self.entries) >= self.keep else -np.inf
        order = order[columns["entropy"][order] >= least]
        if not len(order):
            return
        sorter = np.argsort(example)
        places = sorter[np.searchsorted(example[sorter], rows.example[order])]
        names = ("target", "predicted", "confidence", "entropy", "epistemic")
        for row, place in zip(order, places, strict=True):
            entry: dict[str, Any] = {"example": int(rows.example[row])}
            entry["position"] = int(rows.position[row])
            entry |= {name: columns[name][row].item() for name in names}
            entry["image"] = None
            if inputs is not None and is_image(inputs):
                entry["image"] = picture(inputs[int(place)])
            self.entries.append(entry)
        self._cut()

    def merge(self, other: MostUncertain) -> None:
        """Add what another process kept."""
        self.entries = [*self.entries, *other.entries]
        self._cut()

    def _cut(self) -> None:
        self.entries.sort(
            key=lambda entry: (-entry["entropy"], entry["example"], entry["position"])
        )
        del self.entries[self.keep :]

    def numbers(self) -> list[dict[str, Any]]:
        """The entries as the document has them, the most uncertain first."""
        listed = []
        for entry in self.entries:
            image = entry["image"]
            shown = {name: value for name, value in entry.items() if name != "position"}
            listed.append({**shown, "image": None if image is None else data_uri(image)})
        return listed
