r"""A uniform sample of rows of bounded size, the same however the rows were split and ordered.

Each row gets a priority: a 64-bit hash of its example's index and its number within the example
(the finaliser of SplitMix64; Steele, Lea and Flood, 2014). The sample is the rows of smallest
priority (bottom-k sampling). Since a priority depends on nothing else, what several processes kept
can be put together, and gives exactly what one process would have kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Sample", "priorities", "uniforms"]

Array = NDArray[Any]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_A = np.uint64(0xBF58476D1CE4E5B9)
_B = np.uint64(0x94D049BB133111EB)


def _mixed(words: Array) -> Array:
    words = (words ^ (words >> np.uint64(30))) * _A
    words = (words ^ (words >> np.uint64(27))) * _B
    return words ^ (words >> np.uint64(31))


def priorities(example: Array, position: Array, stream: int = 0) -> Array:
    """A 64-bit hash of each row.

    Args:
        example: Indices of examples, int64 (n,).
        position: Numbers within the example, int64 (n,).
        stream: Another number gives other, unrelated hashes.

    Example:
        >>> both = priorities(np.array([3, 4]), np.array([0, 0]))
        >>> bool(both[1] == priorities(np.array([4]), np.array([0]))[0])
        True
    """
    words = np.asarray(example).astype(np.uint64) * _GAMMA + np.uint64(2 * stream + 1)
    return _mixed(_mixed(words) + np.asarray(position).astype(np.uint64) * _GAMMA)


def uniforms(example: Array, position: Array) -> Array:
    """A number in (0, 1) for each row, unrelated to its priority.

    Example:
        >>> bool(abs(uniforms(np.arange(10_000), np.zeros(10_000)).mean() - 0.5) < 0.02)
        True
    """
    words = priorities(example, position, stream=1)
    return (np.asarray(words >> np.uint64(11), np.float64) + 0.5) * 2.0**-53


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
        self._threshold: int | None = None  # no row at or above it can be kept any more
        self._parts: list[dict[str, Array]] = []
        self._held = 0
        self._ordered = True

    def admits(self, example: Array, position: Array) -> Array:
        """Which rows may still be kept: all others need not be computed."""
        if self._threshold is None:
            return np.ones(len(example), bool)
        return priorities(example, position) < np.uint64(self._threshold)

    def add(self, example: Array, position: Array, columns: Mapping[str, Array]) -> None:
        """Add rows; the columns may have further axes."""
        chosen = self.admits(example, position)
        if not chosen.any():
            return
        part = {"example": example, "position": position, **columns}
        part = {name: np.array(column[chosen]) for name, column in part.items()}
        part["priority"] = priorities(part["example"], part["position"])
        self._append([part])

    def merge(self, other: Sample) -> None:
        """Add what another sample kept."""
        self._append(other._parts)

    def _append(self, parts: list[dict[str, Array]]) -> None:
        self._parts = [*self._parts, *parts]
        self._held += sum(len(part["example"]) for part in parts)
        self._ordered = False
        # Compacted now and then, not at every batch: sorting costs more than holding twice as much.
        if self._held > 2 * self.keep:
            self._compact()

    def _joined(self) -> dict[str, Array]:
        if not self._ordered:
            self._compact()
        return self._parts[0] if self._parts else {}

    def _compact(self) -> None:
        if not self._parts:
            return
        part = {name: np.concatenate([p[name] for p in self._parts]) for name in self._parts[0]}
        priority = part["priority"]
        if len(priority) > self.keep:
            chosen = np.argpartition(priority, self.keep)[: self.keep]
            self._threshold = int(priority[chosen].max())
        else:
            chosen = np.arange(len(priority))
        order = chosen[np.lexsort((part["position"][chosen], part["example"][chosen]))]
        self._parts = [{name: column[order] for name, column in part.items()}]
        self._held = len(order)
        self._ordered = True

    def __len__(self) -> int:
        return min(self._held, self.keep)

    def __getitem__(self, name: str) -> Array:
        """A column of the sample, in the order of the examples."""
        return self._joined()[name]

    @property
    def example(self) -> Array:
        """The examples' indices, in ascending order."""
        return self["example"]

    @property
    def position(self) -> Array:
        """The rows' numbers within their examples."""
        return self["position"]

    def __getstate__(self) -> dict[str, Any]:
        self._joined()
        return self.__dict__.copy()
