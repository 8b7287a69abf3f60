"""The learning rate while SWAG averages: gone to in a few epochs or steps, and then held."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_bnn.callbacks.draw_rule import check_count, check_positive
from lightning_bnn.errors import ConfigurationError

__all__ = ["AnnealShape", "AveragingRate", "annealed"]

AnnealShape = Literal["cosine", "linear"]


def annealed(first: float, last: float, share: float, shape: AnnealShape) -> float:
    """A learning rate on its way from ``first`` to ``last``, of which it has gone a share.

    Example:
        >>> [round(annealed(1.0, 0.0, share, "cosine"), 3) for share in (0.0, 0.25, 0.5, 1.0)]
        [1.0, 0.854, 0.5, 0.0]
        >>> annealed(1.0, 0.5, 0.5, "linear")
        0.75
    """
    if share >= 1:
        return last
    weight = share if shape == "linear" else (1 - math.cos(math.pi * share)) / 2
    return first + (last - first) * weight


class AveragingRate:
    """Learning rates that go from what they are to one value, and stay there.

    They are set before every batch, so that a scheduler's values are never used, and are a function
    of how far training has gone, so that they are the same after a resume.

    Args:
        lr: Where they go; None leaves them alone.
        anneal: In how many epochs or steps.
        shape: How: ``"cosine"`` or ``"linear"``.

    Attributes:
        first: What they were when averaging began, or when a group of parameters was added to an
            optimizer after that; None before.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        >>> rate = AveragingRate(0.3, anneal=2, shape="linear")
        >>> for gone in (0, 1, 2, 3):
        ...     rate.apply([optimizer], gone)
        ...     print(round(optimizer.param_groups[0]["lr"], 3), end=" ")
        0.1 0.2 0.3 0.3
    """

    def __init__(self, lr: float | None, anneal: int, shape: AnnealShape) -> None:
        if lr is not None:
            check_positive("lr", lr)
        check_count("anneal", anneal, 0)
        if shape not in ("cosine", "linear"):
            raise ConfigurationError(f"anneal_shape= is 'cosine' or 'linear'; got {shape!r}.")
        self.lr = lr
        self.anneal = anneal
        self.shape = shape
        self.first: list[float] | None = None

    def apply(self, optimizers: Iterable[Optimizer], gone: float) -> None:
        """Set all learning rates, ``gone`` epochs or steps after averaging began."""
        if self.lr is None or gone < 0:
            return
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        known = self.first or []
        self.first = [*known, *(float(group["lr"]) for group in groups[len(known) :])]
        share = gone / self.anneal if self.anneal else 1.0
        for group, first in zip(groups, self.first, strict=True):
            value = annealed(first, self.lr, share, self.shape)
            if isinstance(group["lr"], Tensor):  # as compiled and capturable optimizers have it
                group["lr"].fill_(value)
            else:
                group["lr"] = value
