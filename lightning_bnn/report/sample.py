r"""A uniform sample of rows of bounded size, the same however the rows were split and ordered.

Each row gets a priority: a number in (0, 1) that is a hash of its example's index and its number
within the example (:mod:`lightning_bnn.random.hashing`). The sample is the rows of smallest
priority (bottom-k sampling). Since a priority depends on nothing else, what several processes kept
can be put together, and gives exactly what one process would have kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_bnn.random.hashing import stream_seeds, uniforms

__all__ = ["Array", "Sample", "priorities"]

Array = NDArray[Any]


def priorities(example: Array, position: Array, stream: int = 0) -> Array:
    """A number in (0, 1) for each row.

    Args:
        example: Indices of examples, int64 (n,).
        position: Numbers within the example, int64 (n,).
        stream: Another one gives other, unrelated numbers.

    Example:
        >>> both = priorities(np.array([3, 4]), np.array([0, 0]))
        >>> bool(both[1] == priorities(np.array([4]), np.array([0]))[0])
        True
    """
    seeds = stream_seeds(torch.as_tensor(example), stream)
    return uniforms(seeds, torch.as_tensor(position)[:, None]).reshape(-1).numpy()


class Sample:
    """At most ``keep`` rows, chosen uniformly among all that were added.

    Args:
        keep: The largest number of rows.

    Example:
        >>> sample = Sample(keep=100)
        >>> for start in range(0, 1000, 50):
        ...     index = np.arange(start, start + 50)
        ...     sample.add(index, np.zeros(50, int), {"square": index**2})
        >>> len(sample), bool((sample["square"] == sample.example**2).all())
        (100, True)
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._threshold = 1.0  # no row at or above it can be kept any more
        self._parts: list[dict[str, Array]] = []
        self._ordered = True  # one part, in the order of the examples

    def admits(self, example: Array, position: Array) -> Array:
        """Which rows may still be kept: all others need not be computed."""
        return priorities(example, position) < self._threshold

    def add(self, example: Array, position: Array, columns: Mapping[str, Array]) -> None:
        """Add rows; the columns may have further axes."""
        priority = priorities(example, position)
        chosen = priority < self._threshold
        rows = {"example": example, "position": position, "priority": priority, **columns}
        if chosen.any():
            self._append([{name: np.array(column[chosen]) for name, column in rows.items()}])

    def merge(self, other: Sample) -> None:
        """Add what another sample kept."""
        self._append(other._parts)

    def _append(self, parts: list[dict[str, Array]]) -> None:
        self._parts, self._ordered = [*self._parts, *parts], False
        # Compacted now and then, not at every batch: sorting costs more than holding twice as much.
        if self._held > 2 * self.keep:
            self._compact()

    @property
    def _held(self) -> int:
        return sum(len(part["example"]) for part in self._parts)

    def _compact(self) -> dict[str, Array]:
        """The rows of smallest priority in the order of the examples, as the only part."""
        if self._ordered:
            return self._parts[0]
        rows = {name: np.concatenate([p[name] for p in self._parts]) for name in self._parts[0]}
        chosen = np.argsort(rows["priority"])[: self.keep]
        if len(rows["priority"]) > self.keep:
            self._threshold = float(rows["priority"][chosen].max())
        order = chosen[np.lexsort((rows["position"][chosen], rows["example"][chosen]))]
        self._parts, self._ordered = [{name: column[order] for name, column in rows.items()}], True
        return self._parts[0]

    def __len__(self) -> int:
        return min(self._held, self.keep)

    def __getitem__(self, name: str) -> Array:
        """A column of the sample, in the order of the examples; empty before the first row."""
        return self._compact()[name] if self._parts else np.zeros(0)

    @property
    def example(self) -> Array:
        """The examples' indices, in ascending order."""
        return self["example"]

    def __getstate__(self) -> dict[str, Any]:
        if self._parts:
            self._compact()
        return self.__dict__.copy()
