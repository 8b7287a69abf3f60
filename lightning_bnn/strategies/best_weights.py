"""The best weights of each set of a bank, by its own validation NLL.

What early stopping does for a network that is trained alone, for K sets side by side: in every
round of validation each set is scored by its mean negative log likelihood, not by that of the
mixture, and the weights of its best round are kept. The sets never touch each other: what is kept
of one is what would be kept of it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.bank import Bank
from lightning_bnn.mixtures import full_precision

__all__ = ["BestWeights"]


class BestWeights:
    """By row of a bank, the weights of the round of validation with the lowest NLL.

    Weights are all that a set has of its own: what is inferred, point estimates, what its
    likelihood learns, and buffers such as the statistics of BatchNorm. It needs the memory of one
    more copy of them.

    Args:
        size: K, the number of sets.

    Attributes:
        nll: The lowest NLL of each set, (K,); infinite before the first round.
        last_nll: The NLL of each set in the last round, (K,); NaN of those that were not scored.
        epoch: The epoch of each set's best round, (K,); −1 before the first.
        rounds_since_best: The rounds of validation after the best one of each set, (K,).
        exchanged: Which sets have their best weights in the bank, and their last ones here, (K,).

    Example:
        >>> from torch import nn
        >>> bank = Bank(nn.Linear(1, 1), {"weight": torch.zeros(2, 1, 1),
        ...             "bias": torch.zeros(2, 1)}, ids=[0, 1], names=["weight", "bias"])
        >>> best = BestWeights(2)
        >>> for step, log_prob in enumerate(([-1.0, -3.0], [-2.0, -2.0])):
        ...     best.begin_round([0, 1])
        ...     best.add(torch.tensor(log_prob)[:, None])
        ...     best.end_round(bank, step, epoch=step)
        ...     bank.weights.data += 1
        >>> best.epoch, best.rounds_since_best, best.nll
        (tensor([0, 1]), tensor([1, 0]), tensor([1., 2.], dtype=torch.float64))
        >>> best.exchange(bank, best.rounds_since_best > 0)
        >>> bank.weights.tolist()
        [[0.0, 0.0], [2.0, 2.0]]
    """

    def __init__(self, size: int) -> None:
        self.nll = torch.full((size,), torch.inf, dtype=torch.float64)
        self.last_nll = torch.full((size,), torch.nan, dtype=torch.float64)
        self.epoch = torch.full((size,), -1)
        self.rounds_since_best = torch.zeros(size, dtype=torch.int64)
        self.exchanged = torch.zeros(size, dtype=torch.bool)
        self._step = -1  # of the last round
        self._kept: dict[str, Tensor] = {}
        self._rows: list[int] | None = None  # None where no round is running
        self._sums: Tensor | None = None  # of the log likelihoods in this round, and their count

    # ---------------------------------------------------------------- a round of validation

    def begin_round(self, rows: Sequence[int] | None) -> None:
        """Begin a round, and forget one that was not ended.

        Args:
            rows: The sets that are scored, in the order in which :meth:`add` gets them; None where
                none is.
        """
        self._rows, self._sums = None if rows is None else list(rows), None

    @property
    def running(self) -> bool:
        """Whether a round is running, which :meth:`add` may be called in."""
        return self._rows is not None

    def add(self, log_prob: Tensor) -> None:
        """Add the log likelihoods of a batch, (sets, batch)."""
        values = full_precision(log_prob.detach())
        count = values.new_tensor([values.shape[1]])
        sums = torch.cat([values.sum(1), count])
        self._sums = sums if self._sums is None else self._sums + sums

    def end_round(
        self,
        bank: Bank,
        step: int,
        epoch: int,
        reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
    ) -> None:
        """End a round: keep the weights of the sets that have never been better.

        Args:
            bank: The sets, as they were scored.
            step: The training's step. A second round at one step, as after a resume, is left out.
            epoch: The training's epoch.
            reduce: Sums over processes, in place or not.
        """
        rows, sums, self._rows = self._rows, self._sums, None
        if rows is None:
            return
        if sums is None:  # this process had no batch
            sums = full_precision(torch.zeros(len(rows) + 1, device=bank.weights.device))
        *totals, count = reduce(sums).tolist()
        if not count or step == self._step:
            return
        self._step = step
        with torch.inference_mode(False):  # what is made here is changed outside of validation
            last = torch.full_like(self.nll, torch.nan)
            last[rows] = -torch.tensor(totals, dtype=torch.float64) / count
            better = last < self.nll  # False of what is not finite
            self.last_nll, self.nll = last, torch.where(better, last, self.nll)
            self.epoch = torch.where(better, epoch, self.epoch)
            self.rounds_since_best = torch.where(better, 0, self.rounds_since_best + 1)
            for tensor, kept, places in self._pairs(bank, better):
                kept[places] = tensor[places]

    # ---------------------------------------------------------------- going back

    def exchange(self, bank: Bank, rows: Tensor) -> None:
        """Exchange the weights in a bank with those that are kept, in some rows.

        What was in the bank is kept now, so that a second call takes the first one back.

        Args:
            bank: The sets.
            rows: Which of them, (K,); those that were never scored stay as they are.
        """
        rows = rows & (self.epoch >= 0)
        if not rows.any():
            return
        for tensor, kept, places in self._pairs(bank, rows):
            last = tensor[places]
            tensor[places] = kept[places]
            kept[places] = last
        self.exchanged ^= rows

    def take(self, bank: Bank, rows: Tensor) -> None:
        """Put the weights that are kept into a bank, in some rows, for good.

        Args:
            bank: The sets.
            rows: Which of them, (K,); those that were never scored stay as they are.
        """
        for tensor, kept, places in self._pairs(bank, rows & (self.epoch >= 0)):
            tensor[places] = kept[places]

    def forget(self) -> None:
        """Keep no weights any more."""
        self._kept = {}

    def _pairs(self, bank: Bank, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """What the sets have of their own, what is kept of it, and the places of some rows."""
        tensors = {
            **dict(bank.named_parameters(recurse=False)),
            **dict(bank.named_buffers(recurse=False)),
        }
        del tensors["alive"]
        for name, tensor in tensors.items():
            kept = self._kept.get(name)
            # from a checkpoint it comes on another device
            self._kept[name] = tensor.detach().clone() if kept is None else kept.to(tensor)
            yield tensor.detach(), self._kept[name], rows.nonzero().flatten().to(tensor.device)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What was found so far; it is plain tensors and numbers."""
        return {
            "nll": self.nll,
            "last_nll": self.last_nll,
            "epoch": self.epoch,
            "rounds_since_best": self.rounds_since_best,
            "exchanged": self.exchanged,
            "step": self._step,
            "kept": self._kept,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        for name in ("nll", "last_nll", "epoch", "rounds_since_best", "exchanged"):
            setattr(self, name, state[name].cpu().clone())
        self._step, self._rows = state["step"], None
        self._kept = {name: tensor.clone() for name, tensor in state["kept"].items()}
