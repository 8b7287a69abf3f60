"""The most uncertain examples of a classification, with their pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from lightning_bnn.report import figure as fig
from lightning_bnn.report.rows import Array, Rows
from lightning_bnn.report.sections.base import Numbers, Section
from lightning_bnn.report.text import percent, short
from lightning_bnn.report.words import class_name

if TYPE_CHECKING:
    from lightning_bnn.report.statistics import Statistics

__all__ = ["Examples", "data_uri", "is_image", "picture"]

KEPT = ("target", "predicted", "confidence", "entropy", "epistemic")
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


class Examples(Section):
    """The examples with the rows of largest entropy, kept while batches come.

    Args:
        keep: How many.
    """

    key, order = "examples", 70
    title = "Examples"
    lead = "What the model found hardest."
    task = "classification"

    def __init__(self, keep: int = 24) -> None:
        self.keep = keep
        self.entries: list[dict[str, Any]] = []

    def add(self, rows: Rows) -> None:
        """Keep the most uncertain rows of a batch, and the pictures among its inputs."""
        columns = rows.columns
        order = np.lexsort((rows.position, rows.example, -columns["entropy"]))
        # Of an example with many rows the most uncertain one, or it would fill the list alone.
        first = np.unique(rows.example[order], return_index=True)[1]
        order = order[np.sort(first)[: self.keep]]
        least = self.entries[-1]["entropy"] if len(self.entries) >= self.keep else -np.inf
        for row in order[columns["entropy"][order] >= least]:
            entry: dict[str, Any] = {name: columns[name][row].item() for name in KEPT}
            entry |= {"example": int(rows.example[row]), "position": int(rows.position[row])}
            image = rows.inputs[int(rows.place[row])] if is_image(rows.inputs) else None
            self.entries.append(entry | {"image": None if image is None else picture(image)})
        self._cut()

    def merge(self, other: Examples) -> None:
        """Add what another process kept."""
        self.entries = [*self.entries, *other.entries]
        self._cut()

    def _cut(self) -> None:
        self.entries.sort(
            key=lambda entry: (-entry["entropy"], entry["example"], entry["position"])
        )
        del self.entries[self.keep :]

    def numbers(self, model: Statistics, block: Numbers) -> dict[str, Any]:
        """The entries, the most uncertain first, without their pictures."""
        names = ("example", *KEPT)
        return {"uncertain": [{name: entry[name] for name in names} for entry in self.entries]}

    def figures(self, block: Numbers, document: Numbers) -> Iterator[fig.Figure]:
        """Pictures with what was predicted and what is true."""
        pictures = []
        for each in self.entries:
            target, predicted = (class_name(document, each[k]) for k in ("target", "predicted"))
            rows = [
                ("true class", target),
                ("predicted", predicted),
                ("confidence", percent(each["confidence"])),
                ("entropy", short(each["entropy"])),
            ]
            if block["draws"] != 1:
                rows.append(("epistemic", short(each["epistemic"])))
            right, sure = target == predicted, percent(each["confidence"], 0)
            image = None if each["image"] is None else data_uri(each["image"])
            pictures.append(
                fig.Picture(f"Example {each['example']}", image, right, predicted, sure, rows,
                        "" if right else target)
            )  # fmt: skip
        if pictures:
            yield fig.Pictures(
                "examples-figure", "The most uncertain examples",
                "The examples with the largest entropy: the predicted class, the true one where "
                "they differ, and the confidence. Look for labels that are wrong, pictures that "
                "nobody could read, and kinds that the training data lacks.",
                wide=True, logged=False, pictures=pictures,
            )  # fmt: skip
