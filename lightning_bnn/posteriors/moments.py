"""Mean and variance of each weight of a posterior by itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_bnn.mixtures import at_least_float32
from lightning_bnn.storage.stream import Weights

__all__ = ["Moments", "RunningMoments", "at_least_float32"]


@dataclass(frozen=True)
class Moments:
    """Mean and variance of every parameter that varies, by name, in the network's order."""

    mean: Weights
    variance: Weights


class RunningMoments:
    """Moments over sets of values, one set after another, by the updates of Welford (1962).

    All sums are made in float64. Of integers, such as counters, the last value is kept.

    Example:
        >>> running = RunningMoments(["w"])
        >>> for value in (1.0, 3.0):
        ...     running.add({"w": torch.tensor([value])})
        >>> running.result(divisor=1)
        Moments(mean={'w': tensor([2.])}, variance={'w': tensor([2.])})
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names, self._count = list(names), 0
        self._mean: Weights = {}
        self._squares: Weights = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def add(
        self, values: Mapping[str, Tensor], variance: Mapping[str, Tensor] | None = None
    ) -> None:
        """Take one more set of values, each with a variance of its own if it has one."""
        self._count += 1
        for name in self._names:
            self._dtypes[name] = values[name].dtype
            if not values[name].is_floating_point():
                self._mean[name] = values[name]
                continue
            value = values[name].double()
            if name not in self._mean:
                self._mean[name], self._squares[name] = value.clone(), torch.zeros_like(value)
            else:
                step = value - self._mean[name]
                self._mean[name].add_(step, alpha=1 / self._count)
                self._squares[name].addcmul_(step, value - self._mean[name])
            if variance is not None and name in variance:
                self._squares[name].add_(variance[name])

    def mean(self) -> Weights:
        """The mean, in the dtype of the values."""
        return {name: tensor.to(self._dtypes[name]) for name, tensor in self._mean.items()}

    def result(self, divisor: int) -> Moments:
        """The mean, and the sum of squares over ``divisor``, at least in float32."""

        def given_back(tensors: Mapping[str, Tensor]) -> Weights:
            wide = {k: torch.promote_types(d, torch.float32) for k, d in self._dtypes.items()}
            return {name: tensor.to(wide[name]) for name, tensor in tensors.items()}

        variance = {name: tensor / divisor for name, tensor in self._squares.items()}
        return Moments(given_back(self._mean), given_back(variance))
