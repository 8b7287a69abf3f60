r"""Kronecker factors (KFAC) of the curvature of linear and convolutional layers.

A layer gets inputs a (with a 1 for its bias), and its outputs get gradients b of a column of the
Hessian, at R places of each example (one, or the positions of a sequence or an image). Then

.. math:: H \approx \frac1{NR}\Big(\sum_{i,r} a a^\top\Big) \otimes
          \Big(\sum_{i,c,r} b b^\top\Big) = A \otimes B

for the weights and the bias of a layer together, and layers are independent. Places without any
curvature, such as padding that has no label, are in neither sum and do not count. It is exact for a
single linear layer whose likelihood has the same Hessian for all examples, and for one example.
(Martens and Grosse, 2015, *Optimizing Neural Networks with Kronecker-factored Approximate
Curvature*; places as in Grosse and Martens, 2016, and the KFAC-expand of Eschenhagen et al., 2023.)

The prior's precision differs between weights and bias, but not between outputs: it is
:math:`D \otimes I`, and is added exactly. With :math:`D^{-1/2} A D^{-1/2} = U s U^\top` and
:math:`B = V t V^\top`,

.. math:: (A \otimes B + D \otimes I)^{-1} =
          (D^{-1/2} U \otimes V)\,(s \otimes t + 1)^{-1}\,(D^{-1/2} U \otimes V)^\top .

A posterior as the prior has another precision for each weight. It is taken as the nearest Kronecker
product of each layer, :math:`D \otimes E`, which diagonalises in the same way. That is exact for a
posterior of one linear layer and Gaussian noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_bnn.coupling import Coupling
from lightning_bnn.curvature.base import Covariance, Curvature
from lightning_bnn.curvature.layers import (
    RecordedPass,
    named,
    plain_layers,
    scatter,
    side_by_side,
)
from lightning_bnn.curvature.linear import LinearisedNetwork
from lightning_bnn.lightning import rank_zero_warn

__all__ = ["Kron", "KronCovariance"]

_PLACES = 4096
_REST = 0.01  # of a prior's precision that may be left out without a word
_CLOSE = 1e-10


class KronCovariance(Covariance):
    """The covariance of independent layers, each with Kronecker factors.

    A layer has ``left``, V, (out, out), ``right``, D^(-1/2) U, (in, in), and ``scale``,
    (s ⊗ t + 1)^(-1/2), (out, in).

    Example:
        >>> from lightning_bnn.selection import FlatLayout
        >>> layout = FlatLayout({"weight": torch.zeros(2, 3)})
        >>> factors = {".left": torch.eye(2), ".right": torch.eye(3), ".scale": torch.ones(2, 3)}
        >>> KronCovariance(layout, factors).variance()
        tensor([1., 1., 1., 1., 1., 1.])
    """

    structure = "kron"
    layered = True

    def factors(self, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        """The eigenbases of a layer, and the standard deviations in them."""
        left, right, scale = (self.tensors[f"{layer}.{key}"] for key in ("left", "right", "scale"))
        return left, right, scale

    def _layers(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        for name in self.tensors:
            layer, _, key = name.rpartition(".")
            if key == "scale":
                yield layer, *self.factors(layer)

    def deviation(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """A draw of N(0, Σ), layer by layer."""
        flat = like.new_empty(self.layout.size)
        for layer, left, right, scale in self._layers():
            noise = torch.empty_like(scale).normal_(generator=generator)
            scatter(self.layout, flat, layer, left @ (noise * scale) @ right.T)
        return flat

    def variance(self) -> Tensor:
        """The diagonal of Σ."""
        scales = list(self._layers())
        flat = scales[0][3].new_empty(self.layout.size)
        for layer, left, right, scale in scales:
            variance = left.square() @ scale.square() @ right.T.square()
            scatter(self.layout, flat, layer, variance)
        return flat

    def project(self, rows: Tensor) -> Tensor:
        """In the eigenbasis of each layer, times the scales."""
        parts = []
        for layer, left, right, scale in self._layers():
            joined = side_by_side(self.layout, rows, layer)
            parts.append((left.T @ joined @ right * scale).flatten(1))
        return torch.cat(parts, 1)


class Kron(Curvature):
    """The factors A and B of each layer.

    Example:
        >>> net = nn.Linear(1, 1, bias=False).eval()
        >>> curvature = Kron(net, dict(net.named_parameters()))
        >>> linear = LinearisedNetwork(net, dict(net.named_parameters()), {})
        >>> curvature.add(linear, torch.tensor([[2.0], [4.0]]), [torch.ones(2, 1)])
        >>> curvature.diagonal()                           # (4 + 16) · (1 + 1) / 2
        tensor([20.], dtype=torch.float64)
    """

    covariance_type = KronCovariance

    def __init__(
        self, net: nn.Module, weights: Mapping[str, Tensor], rank: int | None = None
    ) -> None:
        super().__init__(net, weights, rank)
        self.layers = plain_layers(net, self.layout.names)
        self._checked = False
        self._coupling: Coupling | None = None
        self._products: dict[Any, tuple[Tensor, Tensor]] = {}
        self.inputs: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        for layer, keys in self.layers.items():
            outputs, features = _sizes(net.get_submodule(layer), keys)
            empty = torch.zeros(outputs + features, dtype=self.dtype, device=self.device)
            self.inputs[layer] = empty.new_zeros(features, features)
            self.gradients[layer] = empty.new_zeros(outputs, outputs)
            self.counts[layer] = empty.new_zeros(())

    @classmethod
    def check(cls, net: nn.Module, names: Sequence[str], rank: int | None = None) -> int:
        """Two matrices for each layer, their eigenvectors, and room to compute them."""
        numbers = 0
        for layer, keys in plain_layers(net, names).items():
            outputs, features = _sizes(net.get_submodule(layer), keys)
            numbers += outputs**2 + features**2 + outputs * features
        return 4 * 8 * numbers

    def add(self, linear: LinearisedNetwork, inputs: Any, columns: Iterable[Tensor]) -> None:
        """One forward pass, and one backward pass for each column."""
        run = RecordedPass(
            linear.net, linear.tensors, self.layers, linear.prepared(inputs), not self._checked
        )
        self._checked = True
        waiting: dict[str, list[Tensor]] = {layer: [] for layer in self.layers}
        counted: dict[str, Tensor] = {}
        for column in columns:
            for layer, gradient in run.gradients(column).items():
                waiting[layer].append(gradient.flatten(0, -2))
                some = (gradient != 0).any(-1)
                counted[layer] = counted[layer] | some if layer in counted else some
                if len(waiting[layer]) * len(waiting[layer][0]) >= _PLACES:
                    _add_squares(self.gradients[layer], torch.cat(waiting.pop(layer)))
                    waiting[layer] = []
        for layer, left in waiting.items():
            if left:
                _add_squares(self.gradients[layer], torch.cat(left))
        for layer, some in counted.items():
            activations = run.inputs_of[layer]
            if not bool(some.all()):
                activations = activations * some.unsqueeze(-1)
            _add_squares(self.inputs[layer], activations)
            self.counts[layer] += some.sum()

    def set_prior(self, own: Tensor, coupling: Coupling | None) -> None:
        """The precision of each layer becomes a Kronecker product, the nearest one."""
        super().set_prior(own, coupling)
        self._coupling, self._products = coupling, {}

    def sums(self) -> list[Tensor]:
        """Both factors of all layers, and the numbers of places."""
        groups = (self.inputs, self.gradients, self.counts)
        return [tensor for group in groups for tensor in group.values()]

    def scale(self, factor: float) -> None:
        """Multiply H by a number."""
        for gradients in self.gradients.values():
            gradients *= factor

    def _factors(self, layer: str) -> tuple[Tensor, Tensor]:
        return self.inputs[layer] / self.counts[layer].clamp(min=1), self.gradients[layer]

    def diagonal(self) -> Tensor:
        """The diagonal of H."""
        flat = torch.zeros(self.layout.size, dtype=self.dtype, device=self.device)
        for layer in self.layers:
            a, b = self._factors(layer)
            scatter(self.layout, flat, layer, torch.outer(b.diagonal(), a.diagonal()))
        return flat

    def _roots(self, layer: str, precisions: Sequence[float]) -> tuple[Tensor, Tensor | None]:
        """Roots R, with R Rᵀ = D⁻¹, of the prior's factors D of a layer's inputs and outputs.

        One that is diagonal is a vector; None stands for I.
        """
        if self.own is None:
            return self._scales(layer, precisions), None
        right, left = (
            torch.linalg.inv(torch.linalg.cholesky(factor)).T
            for factor in self._prior_factors(layer, precisions)
        )
        return right, left

    def _prior_factors(self, layer: str, precisions: Sequence[float]) -> tuple[Tensor, Tensor]:
        """The factors of the prior's precision nearest to that of a layer."""
        own = side_by_side(self.layout, self.spread(precisions)[None], layer)[0]
        if self._coupling is None:
            logs = own.log()
            rows, columns = logs.mean(1) - logs.mean(), logs.mean(0)
            return columns.exp().diag(), rows.exp().diag()
        key = layer, *precisions
        if key not in self._products:  # it takes many passes over the block
            self._products[key] = nearest_product(self._block(layer, own))
        return self._products[key]

    def _block(self, layer: str, own: Tensor) -> Tensor:
        """The prior's precision of a layer, (out, in, out, in)."""
        assert self._coupling is not None
        whole = torch.zeros(self.layout.size, dtype=torch.long, device=self.device)
        whole[self._coupling.places] = torch.arange(
            1, len(self._coupling.places) + 1, device=self.device
        )
        at = side_by_side(self.layout, whole[None], layer)[0].flatten()
        matrix = F.pad(self._coupling.matrix.to(own), (1, 0, 1, 0))
        return (matrix[at][:, at] + own.flatten().diag()).view(*own.shape, *own.shape)

    def _warn_of_rest(self, precisions: Sequence[float]) -> None:
        """Say how much of a prior is no Kronecker product of each layer."""
        if self.own is None:
            return
        total, kept = self.spread(precisions).square().sum(), self.own.new_zeros(())
        if self._coupling is not None:
            total = total + self._coupling.matrix.to(total).square().sum()
        for layer in self.layers:
            right, left = self._prior_factors(layer, precisions)
            own = side_by_side(self.layout, self.spread(precisions)[None], layer)[0]
            if self._coupling is None:
                error = own - torch.outer(left.diagonal(), right.diagonal())
                kept = kept + own.square().sum() - error.square().sum()
            else:
                block = self._block(layer, own)
                error = block - torch.einsum("op,ij->oipj", left, right)
                kept = kept + block.square().sum() - error.square().sum()
        rest = math.sqrt(max(0.0, 1 - float(kept / total)))
        if rest > _REST:
            rank_zero_warn(
                f"structure='kron' keeps of the precision of a posterior that is the prior a "
                f"Kronecker product of each layer, which leaves out {100 * rest:.0f}% of it in the "
                "posterior (training has all of it). Pass structure='full' or 'diagonal' to keep "
                "what they can."
            )

    def _scales(self, layer: str, precisions: Sequence[float]) -> Tensor:
        """D^(-1/2), in the order of a layer's inputs."""
        by_name = dict(zip(self.layout.names, precisions, strict=True))
        features = len(self.inputs[layer])
        own = [by_name[named(layer, key)] for key in self.layers[layer]]
        counts = [features - 1, 1] if len(own) == 2 else [features]
        each = [value for value, count in zip(own, counts, strict=True) for _ in range(count)]
        return torch.tensor(each, dtype=self.dtype, device=self.device).rsqrt()

    def spectrum(self, precisions: Sequence[float]) -> Tensor:
        """The products of the eigenvalues of both factors of each layer."""
        parts = []
        for layer in self.layers:
            a, b = self._factors(layer)
            right, left = self._roots(layer, precisions)
            s = torch.linalg.eigvalsh(_whitened(right, a)).clamp(min=0)
            t = torch.linalg.eigvalsh(_whitened(left, b)).clamp(min=0)
            parts.append(torch.outer(t, s).flatten())
        return torch.cat(parts)

    def covariance(self, precisions: Sequence[float]) -> KronCovariance:
        """(A ⊗ B + D ⊗ I)⁻¹ of each layer."""
        tensors = {}
        self._warn_of_rest(precisions)
        for layer in self.layers:
            a, b = self._factors(layer)
            right, left = self._roots(layer, precisions)
            s, inner = torch.linalg.eigh(_whitened(right, a))
            t, outer = torch.linalg.eigh(_whitened(left, b))
            tensors[f"{layer}.left"] = _times(left, outer)
            tensors[f"{layer}.right"] = _times(right, inner)
            tensors[f"{layer}.scale"] = (torch.outer(t.clamp(min=0), s.clamp(min=0)) + 1).rsqrt()
        return KronCovariance(self.layout, tensors)


def _whitened(root: Tensor | None, matrix: Tensor) -> Tensor:
    """Rᵀ times a matrix times R."""
    if root is None:
        return matrix
    return root[:, None] * matrix * root if root.dim() == 1 else root.T @ matrix @ root


def _times(root: Tensor | None, matrix: Tensor) -> Tensor:
    """R times a matrix."""
    if root is None:
        return matrix
    return root[:, None] * matrix if root.dim() == 1 else root @ matrix


def nearest_product(block: Tensor, rounds: int = 30) -> tuple[Tensor, Tensor]:
    """The factors F, (in, in), and G, (out, out), whose products G ⊗ F are nearest to a block.

    By alternating least squares, which keeps both positive. (Van Loan and Pitsianis, 1993,
    *Approximation with Kronecker Products*.)

    Args:
        block: A positive definite matrix, as (out, in, out, in).
        rounds: How many there are at most.

    Example:
        >>> one, two = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[3.0]])
        >>> inputs, outputs = nearest_product(torch.einsum("op,ij->oipj", two, one))
        >>> torch.allclose(outputs * inputs, 3 * one)
        True
    """
    side, features = block.shape[:2]
    # a row for each pair of outputs, a column for each pair of inputs: the nearest of rank one
    pairs = block.permute(0, 2, 1, 3).reshape(side**2, features**2)
    outputs = torch.eye(side, dtype=block.dtype, device=block.device).flatten()
    inputs = pairs.new_zeros(features**2)
    for _ in range(rounds):
        before = inputs
        inputs = outputs @ pairs / outputs.square().sum()
        outputs = pairs @ inputs / inputs.square().sum()
        if float((inputs - before).norm()) <= _CLOSE * float(inputs.norm()):
            break
    return inputs.view(features, features), outputs.view(side, side)


def _add_squares(total: Tensor, values: Tensor) -> None:
    """Add Σ v vᵀ over places.

    The products are made in the precision of the weights, of some thousands of places at a time,
    which is twice as fast: their errors are those of the gradients themselves.
    """
    for some in values.flatten(0, -2).split(_PLACES):
        total += some.T @ some


def _sizes(module: nn.Module, keys: Sequence[str]) -> tuple[int, int]:
    """The numbers of outputs and of inputs, with the one that the bias has."""
    weight = module.get_parameter("weight")
    features = weight[0].numel() if "weight" in keys else 0
    return len(weight), features + ("bias" in keys)
