r"""Kronecker factors (KFAC) of the curvature of linear and convolutional layers.

A layer gets inputs a (with a 1 for its bias), and its outputs get gradients b of a column of the
Hessian, at R places of each example (one, or the positions of a sequence or an image). Then

.. math:: H \approx \frac1{NR}\Big(\sum_{i,r} a a^\top\Big) \otimes
          \Big(\sum_{i,c,r} b b^\top\Big) = A \otimes B

for the weights and the bias of a layer together, and layers are independent. It is exact for a
single linear layer whose likelihood has the same Hessian for all examples, and for one example.
(Martens and Grosse, 2015, *Optimizing Neural Networks with Kronecker-factored Approximate
Curvature*; places as in Grosse and Martens, 2016, and the KFAC-expand of Eschenhagen et al., 2023.)

The prior's precision differs between weights and bias, but not between outputs: it is
:math:`D \otimes I`, and is added exactly. With :math:`D^{-1/2} A D^{-1/2} = U s U^\top` and
:math:`B = V t V^\top`,

.. math:: (A \otimes B + D \otimes I)^{-1} =
          (D^{-1/2} U \otimes V)\,(s \otimes t + 1)^{-1}\,(D^{-1/2} U \otimes V)^\top .
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bnn.curvature.base import Covariance, Curvature
from lightning_bnn.curvature.linear import LinearisedNetwork
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.selection import FlatLayout
from lightning_bnn.stacked import call_network

__all__ = ["Kron", "KronCovariance"]

_ADVICE = (
    "Pass structure='diagonal', or choose other weights, as with bayesian=[nn.Linear, nn.Conv2d] "
    "or bayesian=lightning_bnn.selection.last_layer."
)
_KEYS = ("weight", "bias")


class KronCovariance(Covariance):
    """The covariance of independent layers, each with Kronecker factors.

    A layer has ``left``, V, (out, out), ``right``, D^(-1/2) U, (in, in), and ``scale``,
    (s ⊗ t + 1)^(-1/2), (out, in).

    Example:
        >>> layout = FlatLayout({"weight": torch.zeros(2, 3)})
        >>> factors = {".left": torch.eye(2), ".right": torch.eye(3), ".scale": torch.ones(2, 3)}
        >>> KronCovariance(layout, factors).variance()
        tensor([1., 1., 1., 1., 1., 1.])
    """

    structure = "kron"

    def _layers(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
        for name, scale in self.tensors.items():
            layer, _, key = name.rpartition(".")
            if key == "scale":
                yield layer, self.tensors[f"{layer}.left"], self.tensors[f"{layer}.right"], scale

    def deviation(self, like: Tensor, generator: torch.Generator | None) -> Tensor:
        """A draw of N(0, Σ), layer by layer."""
        flat = like.new_empty(self.layout.size)
        for layer, left, right, scale in self._layers():
            noise = torch.empty_like(scale).normal_(generator=generator)
            _scatter(self.layout, flat, layer, left @ (noise * scale) @ right.T)
        return flat

    def variance(self) -> Tensor:
        """The diagonal of Σ."""
        scales = list(self._layers())
        flat = scales[0][3].new_empty(self.layout.size)
        for layer, left, right, scale in scales:
            variance = left.square() @ scale.square() @ right.T.square()
            _scatter(self.layout, flat, layer, variance)
        return flat

    def project(self, rows: Tensor) -> Tensor:
        """In the eigenbasis of each layer, times the scales."""
        parts = []
        for layer, left, right, scale in self._layers():
            joined = _gather(self.layout, rows, layer)
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

    def __init__(self, net: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__(net, weights)
        self.layers = _layers(net, self.layout.names)
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
    def check(cls, net: nn.Module, names: Sequence[str]) -> int:
        """Two matrices for each layer, their eigenvectors, and room to compute them."""
        numbers = 0
        for layer, keys in _layers(net, names).items():
            outputs, features = _sizes(net.get_submodule(layer), keys)
            numbers += outputs**2 + features**2 + outputs * features
        return 4 * 8 * numbers

    def add(self, linear: LinearisedNetwork, inputs: Any, columns: Iterable[Tensor]) -> None:
        """One forward pass, and one backward pass for each column."""
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        with torch.enable_grad(), ExitStack() as stack:
            for layer in self.layers:
                module = linear.net.get_submodule(layer)
                stack.enter_context(_watched(module, self._watch(layer, seen)))
            outputs = call_network(linear.net, linear.tensors, linear.prepared(inputs))
        for layer in self.layers:
            if layer not in seen:
                raise ConfigurationError(
                    f"The layer {layer!r} was not called: the network uses its weights in another "
                    f"way, for which there are no Kronecker factors. {_ADVICE}"
                )
        for layer, (activations, _) in seen.items():
            places = activations.flatten(0, -2).to(self.dtype)
            self.inputs[layer].addmm_(places.T, places)
            self.counts[layer] += len(places)
        probes = [probe for _, probe in seen.values()]
        for column in columns:
            gradients = torch.autograd.grad(
                outputs, probes, column.to(outputs.dtype), retain_graph=True, materialize_grads=True
            )
            for (layer, (activations, _)), gradient in zip(seen.items(), gradients, strict=True):
                module = linear.net.get_submodule(layer)
                if isinstance(module, nn.Conv2d):
                    gradient = gradient.movedim(1, -1)
                places = gradient.reshape(-1, gradient.shape[-1]).to(self.dtype)
                assert len(places) == activations.shape[:-1].numel()
                self.gradients[layer].addmm_(places.T, places)

    def _watch(self, layer: str, seen: dict[str, tuple[Tensor, Tensor]]) -> Callable[..., Any]:
        """A forward hook that keeps a layer's inputs, and lets its outputs have a gradient."""
        keys = self.layers[layer]

        def hook(module: nn.Module, arguments: tuple[Any, ...], outputs: Tensor) -> Tensor:
            if layer in seen:
                raise ConfigurationError(
                    f"The layer {layer!r} is called several times in a pass, for which there are "
                    f"no Kronecker factors. {_ADVICE}"
                )
            activations = _activations(module, arguments[0].detach(), keys)
            probe = torch.zeros_like(outputs, requires_grad=True)
            seen[layer] = activations, probe
            return outputs + probe  # new: what follows may change it in place

        return hook

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
            _scatter(self.layout, flat, layer, torch.outer(b.diagonal(), a.diagonal()))
        return flat

    def _root(self, layer: str, precisions: Sequence[float]) -> Tensor:
        """D^(-1/2), in the order of a layer's inputs."""
        by_name = dict(zip(self.layout.names, precisions, strict=True))
        features = len(self.inputs[layer])
        own = [by_name[_named(layer, key)] for key in self.layers[layer]]
        counts = [features - 1, 1] if len(own) == 2 else [features]
        each = [value for value, count in zip(own, counts, strict=True) for _ in range(count)]
        return torch.tensor(each, dtype=self.dtype, device=self.device).rsqrt()

    def spectrum(self, precisions: Sequence[float]) -> Tensor:
        """The products of the eigenvalues of both factors of each layer."""
        parts = []
        for layer in self.layers:
            a, b = self._factors(layer)
            root = self._root(layer, precisions)
            s = torch.linalg.eigvalsh(root[:, None] * a * root).clamp(min=0)
            parts.append(torch.outer(torch.linalg.eigvalsh(b).clamp(min=0), s).flatten())
        return torch.cat(parts)

    def covariance(self, precisions: Sequence[float]) -> KronCovariance:
        """(A ⊗ B + D ⊗ I)⁻¹ of each layer."""
        tensors = {}
        for layer in self.layers:
            a, b = self._factors(layer)
            root = self._root(layer, precisions)
            s, right = torch.linalg.eigh(root[:, None] * a * root)
            t, left = torch.linalg.eigh(b)
            tensors[f"{layer}.left"] = left
            tensors[f"{layer}.right"] = root[:, None] * right
            tensors[f"{layer}.scale"] = (torch.outer(t.clamp(min=0), s.clamp(min=0)) + 1).rsqrt()
        return KronCovariance(self.layout, tensors)


def _named(layer: str, key: str) -> str:
    return f"{layer}.{key}" if layer else key


def _layers(net: nn.Module, names: Sequence[str]) -> dict[str, list[str]]:
    """By the name of a layer, which of its tensors are chosen; raises if it cannot be."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer, _, key = name.rpartition(".")
        module, weight = net.get_submodule(layer), net.get_parameter(name)
        owners = [m for m in net.modules() if any(p is weight for p in m._parameters.values())]
        where = f"{name!r} is a weight of {layer or 'net'!r} ({type(module).__name__})"
        # also of a class of the user's own, if it computes the same
        plain = type(module).forward in (nn.Linear.forward, nn.Conv2d.forward) and key in _KEYS
        if not plain:
            raise ConfigurationError(
                f"structure='kron' is for the weights of Linear and Conv2d layers; {where}. "
                f"{_ADVICE}"
            )
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            raise ConfigurationError(
                f"structure='kron' is for convolutions without groups; {where}, with "
                f"{module.groups} of them. {_ADVICE}"
            )
        if len(owners) > 1:
            raise ConfigurationError(
                f"structure='kron' is for weights of one layer; {where}, and shared by "
                f"{len(owners)} layers. {_ADVICE}"
            )
        layers.setdefault(layer, []).append(key)
    return {layer: [key for key in _KEYS if key in keys] for layer, keys in layers.items()}


def _sizes(module: nn.Module, keys: Sequence[str]) -> tuple[int, int]:
    """The numbers of outputs and of inputs, with the one that the bias has."""
    weight = module.get_parameter("weight")
    features = weight[0].numel() if "weight" in keys else 0
    return len(weight), features + ("bias" in keys)


def _activations(module: nn.Module, inputs: Tensor, keys: Sequence[str]) -> Tensor:
    """What a layer's weights are multiplied by at each place, (batch, places ..., features)."""
    if isinstance(module, nn.Conv2d):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
        inputs = F.unfold(
            padded, module.kernel_size, dilation=module.dilation, stride=module.stride
        ).mT
    parts = [inputs] if "weight" in keys else []
    if "bias" in keys:
        parts.append(inputs.new_ones(*inputs.shape[:-1], 1))
    return torch.cat(parts, -1)


@contextmanager
def _watched(module: nn.Module, hook: Callable[..., Any]) -> Iterator[None]:
    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _gather(layout: FlatLayout, flat: Tensor, layer: str) -> Tensor:
    """Of flat vectors, the weights and the bias of a layer side by side, (..., out, in)."""
    views = layout.views(flat)
    lead = flat.dim() - 1
    parts = [views[name] for key in _KEYS if (name := _named(layer, key)) in views]
    columns = [
        part.flatten(lead + 1) if part.dim() > lead + 1 else part.unsqueeze(-1) for part in parts
    ]
    return torch.cat(columns, -1)


def _scatter(layout: FlatLayout, flat: Tensor, layer: str, joined: Tensor) -> None:
    """The inverse of :func:`_gather` into one flat vector."""
    views, start = layout.views(flat), 0
    for key in _KEYS:
        if (view := views.get(_named(layer, key))) is not None:
            width = view[0].numel()
            view.copy_(joined[:, start : start + width].reshape(view.shape))
            start += width
