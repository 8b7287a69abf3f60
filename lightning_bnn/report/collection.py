"""What a run gathers for one page: statistics of every model, by every process.

Statistics are sums and bounded samples, so that those of several processes add up to what one
process would have gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_bnn.report.outside import Outside
from lightning_bnn.report.statistics import Statistics

__all__ = ["Collection"]


class Collection:
    """Statistics of several models on one data set, on data from elsewhere and for the temperature.

    Args:
        names: The models.
        bins: Bins of the reliability diagram.

    Attributes:
        models: Statistics by model.
        outside: Scores by model, and by data from elsewhere.
        validation: Statistics of other data, which the temperature is fitted on, by model.
        failure: Why no page can be made of it; None if nothing went wrong.
        fewest: The fewest examples that one of the processes saw; once gathered.
        pruning: By model, the numbers of its pruning curve; on the gathered collection.

    Example:
        >>> Collection(["net", "ensemble"]).examples
        0
    """

    def __init__(self, names: Sequence[str], bins: int = 15) -> None:
        self.models = {name: Statistics(bins=bins) for name in names}
        self.validation = {name: Statistics(bins=bins) for name in names}
        self.outside: dict[str, dict[str, Outside]] = {name: {} for name in names}
        self.failure: str | None = None
        self.fewest: int | None = None
        self.pruning: dict[str, dict[str, Any]] = {}

    @property
    def examples(self) -> int:
        """How many examples were seen."""
        return next(iter(self.models.values())).examples

    @property
    def rows(self) -> int:
        """How many valid predictions every model has at least."""
        return min(statistics.rows for statistics in self.models.values())

    def merge(self, other: Collection) -> None:
        """Add what another process gathered."""
        self.failure = self.failure or other.failure
        for own, strange in ((self.models, other.models), (self.validation, other.validation)):
            for name, statistics in strange.items():
                if own[name].examples and statistics.examples:
                    own[name].merge(statistics)
                elif statistics.examples:
                    own[name] = statistics
        for name, places in other.outside.items():
            for place, outside in places.items():
                if place in self.outside[name]:
                    self.outside[name][place].merge(outside)
                else:
                    self.outside[name][place] = outside

    def gathered(self, world_size: int) -> Collection:
        """What all processes gathered, the same in each; every one of them has to ask."""
        if world_size == 1:
            return self
        parts: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(parts, self)
        whole = parts[0]
        whole.fewest = min(part.examples for part in parts)
        for part in parts[1:]:
            whole.merge(part)
        return whole
