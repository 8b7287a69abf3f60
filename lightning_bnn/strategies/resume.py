"""Exact resume: the order of the data and the global random state.

A Lightning checkpoint holds weights, optimizers and counters, but not where a shuffled
data loader was, nor the state of the random generators that dropout and augmentation use.
Here a training loader is wrapped so that the order of its epoch k is a function of one seed
and k alone. Its place is saved with the loop; on resume the same order is made again and the
batches that were seen are passed over. So the next batch is the one that would have come.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = [
    "ResumableLoader",
    "isolated_random_state",
    "mix_seeds",
    "random_state",
    "restore_random_state",
]


def random_state() -> dict[str, Any]:
    """The state of the global generators of torch, NumPy and Python, as plain values."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    _, keys, position, has_gauss, cached = numpy
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [torch.from_numpy(keys.astype(np.int64)), int(position), has_gauss, cached],
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the global generators to a state that :func:`random_state` gave.

    Example:
        >>> state = random_state()
        >>> first = torch.rand(2)
        >>> restore_random_state(state)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    torch.set_rng_state(state["torch"].cpu())
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(  # noqa: NPY002
        ("MT19937", keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached)
    )
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    cuda = state.get("cuda", [])
    if torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([one.cpu() for one in cuda])


@contextmanager
def isolated_random_state(seed: int | None = None) -> Iterator[None]:
    """Leave the global generators as they were found; inside, start them from ``seed``."""
    state = random_state()
    try:
        if seed is not None:
            # torch.manual_seed keeps a note of each call for devices that are not in use yet
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_available():
                torch.cuda.manual_seed_all(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            random.seed(seed)
        yield
    finally:
        restore_random_state(state)


class ResumableLoader:
    """A data loader whose order is a function of (seed, epoch), and whose place can be saved.

    Lightning saves ``state_dict()`` with the fit loop and calls ``load_state_dict()`` before
    the first batch. Every other attribute is the wrapped loader's. One thing is not repeated:
    random numbers that persistent workers draw by themselves, for they are seeded once.

    Args:
        loader: Any iterable of batches, such as a ``DataLoader``.
        seed: Decides, with ``rank``, the order of every epoch.
        rank: The rank of this process.
        epoch: Gives the current epoch; by default each pass over the data is one.
        limit: The number of batches after which an epoch ends, if not the loader's length.
        progress: Gives the number of batches of this epoch that were used so far, where that
            may differ from the number that was handed out (Lightning fetches one ahead when a
            loader has no length).
        opener: Makes the iterator of an epoch from its number and the rank, in place of
            ``iter(loader)``; its order must be a function of these and of the global generators.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> loader = ResumableLoader(DataLoader(range(6), shuffle=True), seed=1)
        >>> batches = iter(loader)
        >>> first = next(batches)
        >>> state = loader.state_dict()
        >>> rest = [int(batch) for batch in batches]
        >>> loader = ResumableLoader(DataLoader(range(6), shuffle=True), seed=2)
        >>> loader.load_state_dict(state)
        >>> rest == [int(batch) for batch in loader]
        True
    """

    def __init__(
        self,
        loader: Any,
        seed: int,
        rank: int = 0,
        epoch: Callable[[], int] | None = None,
        limit: float = float("inf"),
        progress: Callable[[], int] | None = None,
        opener: Callable[[int, int], Iterator[Any]] | None = None,
    ) -> None:
        self.loader = loader
        self.opener = opener
        self._seed, self._rank, self._limit = seed, rank, limit
        self._current_epoch = epoch
        self._epoch = -1
        self._seen = 0
        self._resuming = False
        self._progress = progress

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        if not self._resuming:
            self._epoch = self._current_epoch() if self._current_epoch else self._epoch + 1
            self._seen = 0
        self._resuming = False
        seed = mix_seeds(self._seed, self._epoch, self._rank)
        with isolated_random_state(seed):
            for generator in self._generators():
                generator.manual_seed(seed)
            opener = self.opener
            if opener is None and getattr(self.loader, "_iterator", None) is not None:
                # A loader with persistent workers draws a seed for them before its first order
                # only: with one drawn here, the order does not depend on how often it was asked.
                torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            batches = iter(self.loader) if opener is None else opener(self._epoch, self._rank)
            # Fetching what was seen is the price of being exact: samplers, workers and their
            # augmentation all stand where they stood. The first fetch of an epoch belongs in
            # here too, because a sampler draws its order then.
            for _ in range(self._seen):
                next(batches, None)
            following = _NOT_YET if self._seen else next(batches, _END)
        if following is _NOT_YET:
            following = next(batches, _END)
        while following is not _END:
            self._seen += 1
            yield following
            following = next(batches, _END)

    def _generators(self) -> list[torch.Generator]:
        """Generators that the user gave to the loader or its samplers, which decide its order."""
        batches = getattr(self.loader, "batch_sampler", None)
        owners = (
            self.loader,
            getattr(self.loader, "sampler", None),
            getattr(batches, "sampler", None),
        )
        found = {
            id(g): g for owner in owners if (g := getattr(owner, "generator", None)) is not None
        }
        return list(found.values())

    def state_dict(self) -> dict[str, Any]:
        """The seed, the epoch and the number of its batches that were used."""
        seen = self._seen if self._progress is None else self._progress()
        return {"seed": self._seed, "epoch": self._epoch, "seen": seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch that was used."""
        self._seed, self._epoch, self._seen = state["seed"], state["epoch"], state["seen"]
        self._resuming = self._epoch >= 0 and 0 < self._seen < min(self._length(), self._limit)

    def _length(self) -> float:
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return float("inf")


_END = object()
_NOT_YET = object()


def mix_seeds(*numbers: int) -> int:
    """One 32-bit seed from several numbers.

    Example:
        >>> mix_seeds(1, 2) == mix_seeds(1, 2), mix_seeds(1, 2) == mix_seeds(2, 1)
        (True, False)
    """
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])
