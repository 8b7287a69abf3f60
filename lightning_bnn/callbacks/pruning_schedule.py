r"""When weights are pruned while training, and how many of them by then.

The share that is removed rises from 0 at ``begin`` to F at ``end``. With u, from 0 to 1, for how
much of that stretch has passed:

* ``cubic``: :math:`F\,(1 - (1 - u)^3)`, quickly at first, when there is much to spare, and slowly
  towards the end (Zhu and Gupta, 2017, *To prune, or not to prune*);
* ``linear``: :math:`F\,u`;
* ``once``: all of F at ``begin``.

A position is a number of optimizer steps that were taken; where it is not known how many steps
an epoch has, a number of completed epochs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lightning_bnn.callbacks.progress import Unit, steps_per_epoch, training_length
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import pl

__all__ = ["PruningRule", "Shape", "check_places", "resolve"]

Shape = Literal["cubic", "linear", "once"]
Place = int | float

_PRUNINGS = 50  # in all, unless told: each looks at every weight


@dataclass(frozen=True)
class PruningRule:
    """At which positions weights are pruned, and how many by then.

    Args:
        shape: How the share rises.
        fraction: The share that is removed in the end.
        begin: The position from which it rises.
        end: The position at which it is reached.
        every: The steps or epochs from one pruning to the next; the last is at ``end``.
        unit: What positions count.

    Example:
        >>> rule = PruningRule("linear", 0.8, begin=10, end=50, every=15)
        >>> [(step, round(rule.share(step), 2)) for step in range(60) if rule.due(step, step - 1)]
        [(25, 0.3), (40, 0.6), (50, 0.8)]
    """

    shape: Shape
    fraction: float
    begin: int
    end: int
    every: int
    unit: Unit = "steps"

    def due(self, position: int, seen: int) -> bool:
        """Whether to prune at a position, where ``seen`` was the last that was looked at."""
        return self._count(position) > self._count(seen)

    def share(self, position: int) -> float:
        """The share of the weights that is gone after the pruning at a position."""
        if position >= self.end:
            return self.fraction  # exactly
        passed = max(0.0, (position - self.begin) / (self.end - self.begin))
        return self.fraction * (passed if self.shape == "linear" else 1 - (1 - passed) ** 3)

    def _count(self, position: int) -> int:
        """The number of prunings up to a position."""
        if position < self.begin:
            return 0
        if position >= self.end:
            return 1 + math.ceil((self.end - self.begin) / self.every)
        return (position - self.begin) // self.every


def check_places(start: Place, end: Place, shape: Shape) -> None:
    """Raise unless both are shares of training or whole numbers of epochs, in this order.

    Example:
        >>> check_places(0.9, 0.5, "cubic")
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: start= comes before end=; got 0.9 and 0.5. ...
    """
    for name, place in (("start", start), ("end", end)):
        whole = isinstance(place, int) and not isinstance(place, bool) and place >= 0
        if not whole and not (isinstance(place, float) and 0 <= place <= 1):
            raise ConfigurationError(
                f"{name}= is a share of training, from 0.0 to 1.0, or a whole number of epochs; "
                f"got {place!r}."
            )
    if shape != "once" and type(start) is type(end) and start >= end:
        raise ConfigurationError(
            f"start= comes before end=; got {start} and {end}. Give the larger one to end=, or use "
            "schedule='once'."
        )


def resolve(
    shape: Shape,
    fraction: float,
    start: Place,
    end: Place,
    every_n_steps: int | None,
    trainer: pl.Trainer,
    module: pl.LightningModule,
) -> PruningRule:
    """The rule for a fit, whose length is looked up where it is needed.

    Raises:
        ConfigurationError: The length is needed and not known, or the fit is too short.
    """
    places = {"start": start} if shape == "once" else {"start": start, "end": end}
    epoch = steps_per_epoch(trainer, module)
    whole = all(isinstance(place, int) for place in places.values())
    unit: Unit = "epochs" if epoch is None and whole else "steps"
    if unit == "epochs" and every_n_steps is not None:
        raise ConfigurationError(
            f"every_n_steps={every_n_steps} needs training data with a length. Leave it out, to "
            "prune after whole epochs."
        )
    length = training_length(trainer, module, unit)
    positions = []
    for name, place in places.items():
        scale = length if isinstance(place, float) else 1 if unit == "epochs" else epoch
        if scale is None:
            raise ConfigurationError(
                f"{name}={place} cannot be told in steps, as the length of this fit or of its "
                "epochs is not known. Pass start= and end= as numbers of epochs (ints)."
            )
        positions.append(math.floor(place * scale + 1e-9))  # 0.29 · 100 is a little less than 29
    begin, last = positions[0], positions[-1]
    late = length is not None and last > length + 1e-9
    if late or (shape != "once" and begin >= last):
        raise ConfigurationError(
            f"SNRPruning would begin after {begin} and end after {last} {unit}, and this fit ends "
            f"after {length}. Train longer, put start= and end= further apart and within the fit, "
            "or use schedule='once'."
        )
    every = every_n_steps or max(1, math.ceil((last - begin) / _PRUNINGS))
    return PruningRule(shape, fraction, begin, last, every, unit)
