r"""When a collector's burn-in is over, and how far apart its draws are, found while sampling.

A fit plans S steps of sampling. At up to 200 moments of it, evenly spaced, the predictions of all
chains at a few fixed examples are recorded. The burn-in is over

* when the chains agree: the split R-hat of the later half of the record is at most 1.1 for every
  watched number, at the earliest after S/10 steps;
* else after S/3 steps.

Draws are then one integrated autocorrelation time of the predictions apart (that of the slowest
watched number), but so that each chain gives 10 to 50 of them; fewer, where 50 would be more than
a gigabyte of weights. Where S is not known, the burn-in has at least 1,000 steps and at most
10,000, and the draws have no upper number. A fit in cycles needs no agreement: its cycles settle
for a share of their length, and the draws, 40 of each chain, are evenly spaced.

(See :mod:`lightning_bnn.diagnostics.agreement` for R-hat and the autocorrelation time.)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.diagnostics.agreement import autocorrelation_time, split_rhat

__all__ = ["BurnIn"]

AGREE = 1.1
_RECORDS = 200  # of a whole fit
_LEAST, _MOST, _CYCLES = 10, 50, 40  # draws of a chain
_BYTES = 2**30
_ENOUGH = 20  # records that an agreement is judged by
_UNKNOWN = 3000.0, 30_000.0  # S for the earliest and the latest end where it is not known


class BurnIn:
    """The record of chains' predictions, and what was decided by it.

    Args:
        planned: S, the planned steps of sampling; infinite where it is not known.
        draw_bytes: The size of one draw of all chains.
        cycles: Whether the fit is in cycles.

    Attributes:
        steps: The steps of sampling so far.
        ended: After how many of them the burn-in ended; None while it lasts.
        every: The steps from one draw to the next.
        rhat: The R-hat by which it ended.
        time: The autocorrelation time in steps by which ``every`` was chosen.

    Example:
        >>> burn_in = BurnIn(planned=2000, draw_bytes=1000)
        >>> generator = torch.Generator().manual_seed(0)
        >>> while burn_in.ended is None:                      # chains that agree from the start
        ...     if burn_in.step():
        ...         burn_in.add(torch.randn(4, 3, generator=generator))
        >>> burn_in.ended, burn_in.every
        (200, 36)
    """

    def __init__(self, planned: float, draw_bytes: int, cycles: bool = False) -> None:
        self.planned, self.draw_bytes, self.cycles = planned, draw_bytes, cycles
        self.spacing = 10 if math.isinf(planned) else max(1, int(planned) // _RECORDS)
        self.steps = 0
        self.ended: int | None = None
        self.every: int | None = None
        self.rhat, self.time = math.nan, math.nan
        self._rows: list[Tensor] = []

    def step(self) -> bool:
        """Count a step of sampling; whether predictions are to be recorded after it."""
        self.steps += 1
        if self.cycles and self.ended is None:
            self._end(math.nan, math.nan, _CYCLES)
        last = self.ended is None and self.steps >= self._latest  # of a short fit
        return not self.cycles and (self.steps % self.spacing == 0 or last)

    def add(self, row: Tensor) -> None:
        """Record predictions, (chains, numbers), and decide whether the burn-in is over."""
        self._rows.append(row.detach().to("cpu", torch.float64))
        if len(self._rows) == 2 * _RECORDS:  # of a fit whose length is not known
            self._rows, self.spacing = self._rows[1::2], 2 * self.spacing
        if self.ended is None:
            self._decide()

    @property
    def _latest(self) -> float:
        return (_UNKNOWN[1] if math.isinf(self.planned) else self.planned) / 3

    def _decide(self) -> None:
        known = not math.isinf(self.planned)
        earliest = self.planned / 10 if known else _UNKNOWN[0] / 3
        late, count = self.steps >= self._latest, len(self._rows)
        if not late and (self.steps < earliest or count < _ENOUGH):
            return
        later = torch.stack(self._rows[count // 2 :], dim=1)
        rhat = float(split_rhat(later).max()) if later.shape[1] >= 4 else math.nan
        if late or rhat <= AGREE:
            enough = later.shape[1] >= 4
            time = float(autocorrelation_time(later).max()) if enough else 1.0
            self._end(rhat, time * self.spacing, _MOST)

    def _end(self, rhat: float, time: float, most: int) -> None:
        """End the burn-in now, and choose how far apart draws are."""
        self.ended, self.rhat, self.time = self.steps, rhat, time
        least = min(_LEAST, most)
        most = max(1, min(most, _BYTES // max(1, self.draw_bytes)))
        wanted = 1 if math.isnan(time) else math.ceil(time)
        left = self.planned - self.steps
        if math.isinf(left):
            self.every = max(wanted, self.spacing)
        else:
            widest = max(1, int(left / least))
            self.every = max(min(wanted, widest), math.ceil(left / most), 1)

    def settled(self) -> Tensor:
        """What was recorded since the burn-in ended, (chains, records, numbers)."""
        first = (self.ended or 0) // self.spacing
        return torch.stack(self._rows[first:] or self._rows[-1:], dim=1)

    @property
    def recorded(self) -> int:
        """How often predictions were recorded."""
        return len(self._rows)

    def state_dict(self) -> dict[str, Any]:
        """All that the next decision depends on."""
        return {**vars(self), "_rows": torch.stack(self._rows) if self._rows else None}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> BurnIn:
        """Resume where the saved one was."""
        made = cls.__new__(cls)
        rows = state["_rows"]
        vars(made).update({**state, "_rows": [] if rows is None else list(rows)})
        return made
