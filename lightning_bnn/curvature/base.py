r"""What a structure of the curvature is, and what a Gaussian over weights is made of.

A *curvature* collects :math:`H = \sum_i J_i^\top \Lambda_i J_i` in one pass over the data, as far
as its structure can hold it. :math:`\Lambda_i` is the Hessian of −log p in the outputs, which the
likelihood gives as columns (:meth:`lightning_bnn.likelihoods.Likelihood.hessian_columns`). With
P, the precision of the prior, one number for each tensor, it gives the spectrum of
:math:`P^{-1/2} H P^{-1/2}`, and so :math:`\log\det(H + P)`, and the *covariance*
:math:`(H + P)^{-1}`, which draws, has variances, and projects gradients.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn.coupling import Coupling
from lightning_bnn.curvature.linear import LinearisedNetwork
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.selection import FlatLayout

__all__ = ["Covariance", "Curvature", "Processes", "check_room"]

_GIGABYTE = 1e9
_BLOCK = 16  # columns of the Hessian whose gradients are computed together,
_NUMBERS = 2**25  # or fewer, if an example has more numbers than these


class Covariance(ABC):
    """The covariance Σ of a Gaussian over flat weights.

    Args:
        layout: How the weights lie in the flat vector.
        tensors: What it is made of, by name.

    Attributes:
        structure: The name of its structure.
        layered: Whether layers are independent, and :meth:`factors` gives theirs.
    """

    structure: ClassVar[str]
    layered: ClassVar[bool] = False
    kinds: ClassVar[dict[str, type[Covariance]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Covariance.kinds[cls.structure] = cls

    def __init__(self, layout: FlatLayout, tensors: Mapping[str, Tensor]) -> None:
        self.layout = layout
        # contiguous, as those that are read from a file, so that products have the same rounding
        self.tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}

    @abstractmethod
    def deviation(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """A draw of N(0, Σ), flat, (P,)."""

    @abstractmethod
    def variance(self) -> Tensor:
        """The diagonal of Σ, (P,)."""

    @abstractmethod
    def project(self, rows: Tensor) -> Tensor:
        """G times a root of Σ, so that the result R of rows G, (n, P), has R Rᵀ = G Σ Gᵀ."""

    def factors(self, layer: str) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Of a layer's weights and bias joined, (outputs, features), V, U and σ.

        V and U are bases of the outputs and of the features (None: as they are), and σ, (outputs,
        features), the standard deviations in their products.
        """
        raise NotImplementedError

    def to(self, device: torch.device | str | None = None, dtype: Any = None) -> Self:
        """The same on another device, or in another precision."""
        return type(self)(
            self.layout, {k: t.to(device=device, dtype=dtype) for k, t in self.tensors.items()}
        )

    def copy(self) -> Self:
        """The same in memory of its own."""
        return type(self)(self.layout, {k: t.clone() for k, t in self.tensors.items()})


@dataclass
class Processes:
    """The processes that share a pass; by default this one alone.

    Args:
        count: How many there are.
        index: Which of them this is, from 0.
        add_up: Gives the sum of a tensor over all processes, which all of them ask for.
    """

    count: int = 1
    index: int = 0
    add_up: Callable[[Tensor], Tensor] = lambda tensor: tensor


class Curvature(ABC):
    """A structure of H, which collects it batch by batch; sums over batches are made in float64.

    Args:
        net: The network.
        weights: The weights that H is of, by name.
        rank: Of structures that have one.

    Attributes:
        ranked: Whether the structure has a rank.

    Raises:
        ConfigurationError: The structure cannot hold these weights, or does not fit into memory.
    """

    covariance_type: ClassVar[type[Covariance]]
    ranked: ClassVar[bool] = False

    def __init__(
        self, net: nn.Module, weights: Mapping[str, Tensor], rank: int | None = None
    ) -> None:
        self.layout = FlatLayout(weights)
        self.device = next(iter(weights.values())).device
        # Apple's MPS has no float64
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self.own: Tensor | None = None

    def set_prior(self, own: Tensor, coupling: Coupling | None) -> None:
        """Let the prior's precision differ between the weights of a tensor.

        Args:
            own: What the precision of each weight is, times that of its tensor, (P,).
            coupling: What couples weights under the prior; a structure without room for it takes
                the precision of each weight given the others.
        """
        self.own = own.to(dtype=self.dtype, device=self.device)

    @classmethod
    @abstractmethod
    def check(cls, net: nn.Module, names: Sequence[str], rank: int | None = None) -> int:
        """The most bytes that it needs at a time; raises where a weight is not for it."""

    @abstractmethod
    def add(self, linear: LinearisedNetwork, inputs: Any, columns: Iterable[Tensor]) -> None:
        """Add what a batch has.

        Args:
            linear: The network.
            inputs: The batch's inputs.
            columns: Those of the Hessian in the outputs.
        """

    def sums(self) -> list[Tensor]:
        """The tensors that are sums over examples, and over processes."""
        return []

    def add_up(self, processes: Processes) -> None:
        """Let H be that of the data of all processes: in place, the sums of :meth:`sums`."""
        for tensor in self.sums():
            tensor.copy_(processes.add_up(tensor))

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply H by a number."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal of H, (P,)."""

    @abstractmethod
    def spectrum(self, precisions: Sequence[float]) -> Tensor:
        """The eigenvalues of P^(-1/2) H P^(-1/2), (P,); some that are 0 may be left out.

        Args:
            precisions: Those of the prior, of each tensor.
        """

    @abstractmethod
    def covariance(self, precisions: Sequence[float]) -> Covariance:
        """(H + P)⁻¹."""

    def shortfall(self) -> str | None:
        """A sentence on what of H the structure has left out, if that is a warning."""
        return None

    def log_determinant(self, precisions: Sequence[float]) -> float:
        """The logarithm of det(H + P) / det P."""
        return float(self.spectrum(precisions).log1p().sum())

    def spread(self, precisions: Sequence[float]) -> Tensor:
        """The precision of each weight, (P,)."""
        each = torch.tensor(precisions, dtype=self.dtype, device=self.device)
        sizes = torch.tensor(self.layout.sizes, device=self.device)
        spread = each.repeat_interleave(sizes)
        return spread if self.own is None else spread * self.own


class RowCurvature(Curvature):
    """A structure that is made of the gradients of each example."""

    @abstractmethod
    def add_rows(self, rows: Tensor) -> None:
        """Add Σ g gᵀ over rows, (n, P)."""

    def add(self, linear: LinearisedNetwork, inputs: Any, columns: Iterable[Tensor]) -> None:
        """Add what a batch has, some columns at a time."""
        block: list[Tensor] = []
        most = max(1, min(_BLOCK, _NUMBERS // self.layout.size))
        for column in columns:
            block.append(column)
            if len(block) == most:
                self._add_block(linear, inputs, block)
                block = []
        if block:
            self._add_block(linear, inputs, block)

    def _add_block(self, linear: LinearisedNetwork, inputs: Any, block: list[Tensor]) -> None:
        for _, rows in linear.rows(inputs, torch.stack(block)):
            self.add_rows(rows.flatten(0, 1))


def memory_of(device: torch.device) -> int | None:
    """The bytes of memory that a device has; None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def check_room(what: str, needed: int, device: torch.device, advice: str) -> None:
    """Raise if something needs more memory than a device has.

    Example:
        >>> check_room("x", 10**18, torch.device("cpu"), "Make it smaller.")
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: x needs 1,000,000,000.0 GB of memory, ...
    """
    held = memory_of(device)
    if held is not None and needed > held:
        raise ConfigurationError(
            f"{what} needs {needed / _GIGABYTE:,.1f} GB of memory, and {device.type} has "
            f"{held / _GIGABYTE:,.1f} GB. {advice}"
        )
