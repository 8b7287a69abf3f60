"""Exact resume: the order of the data.

A Lightning checkpoint holds weights, optimizers and counters, but not where a shuffled
data loader was.
Here a training loader is wrapped so that the order of its epoch k is a function of one seed
and k alone. Its place is saved with the loop; on resume the same order is made again and the
batches that were seen are passed over. So the next batch is the one that would have come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import torch

from lightning_bnn.random import isolated_random_state, mix_seeds

__all__ = ["ResumableLoader", "loader_generators"]


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
            for generator in loader_generators(self.loader):
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
            first = [] if self._seen else list(islice(batches, 1))
            for _ in range(self._seen):
                next(batches, None)
        for batch in chain(first, batches):
            self._seen += 1
            yield batch

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


def loader_generators(loader: Any) -> list[torch.Generator]:
    """The generators that the user gave to a loader or its samplers, which decide its order."""
    batches = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list({id(g): g for g in generators if isinstance(g, torch.Generator)}.values())
