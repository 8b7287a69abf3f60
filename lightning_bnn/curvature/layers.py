"""Gradients of linear and convolutional layers from what goes in and what comes back.

The gradient of a layer's weights and bias is Σ b aᵀ over the places of an example (one, or the
positions of a sequence or an image): a are its inputs, with a 1 for the bias, and b the gradients
of its outputs. So one forward pass of a batch, and one backward pass for each column, give the
gradients of every example, or the Kronecker factors of their squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.selection import FlatLayout
from lightning_bnn.stacked import call_network

__all__ = ["KEYS", "RecordedPass", "named", "plain_layers", "scatter", "side_by_side"]

KEYS = ("weight", "bias")
_ADVICE = (
    "Pass structure='diagonal', or choose other weights, as with bayesian=[nn.Linear, nn.Conv2d] "
    "or bayesian=lightning_bnn.selection.last_layer."
)
_KINDS = (nn.Linear, nn.Conv2d)


def named(layer: str, key: str) -> str:
    """The name of a layer's tensor.

    Example:
        >>> named("fc", "weight"), named("", "weight")
        ('fc.weight', 'weight')
    """
    return f"{layer}.{key}" if layer else key


def plain_layers(net: nn.Module, names: Sequence[str]) -> dict[str, list[str]]:
    """By the name of a layer, which of its tensors are chosen.

    Raises:
        ConfigurationError: A tensor is of another kind of layer, or of several.

    Example:
        >>> plain_layers(nn.Sequential(nn.Linear(2, 1)), ["0.weight", "0.bias"])
        {'0': ['weight', 'bias']}
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        layer, _, key = name.rpartition(".")
        module, weight = net.get_submodule(layer), net.get_parameter(name)
        owners = [m for m in net.modules() if any(p is weight for p in m._parameters.values())]
        where = f"{name!r} is a weight of {layer or 'net'!r} ({type(module).__name__})"
        # also of a class of the user's own, if it computes the same
        if type(module).forward not in [kind.forward for kind in _KINDS] or key not in KEYS:
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
    return {layer: [key for key in KEYS if key in keys] for layer, keys in layers.items()}


class RecordedPass:
    """A forward pass of a batch, in which layers keep what goes in.

    Args:
        net: The network; hooks are taken off again.
        tensors: All its parameters and buffers.
        layers: The layers, and which of their tensors count (:func:`plain_layers`).
        inputs: A batch.
        check: Whether it is checked that the network uses the weights in these layers only.

    Attributes:
        outputs: What the network gave, (B, ...).
        inputs_of: By layer, a, (B, places, features).

    Raises:
        ConfigurationError: A layer is not called once.

    Example:
        >>> net, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> run = RecordedPass(net, dict(net.named_parameters()), {"": ["weight"]}, x)
        >>> run.inputs_of, run.gradients(torch.ones(1, 1))
        ({'': tensor([[[3., 4.]]])}, {'': tensor([[[1.]]])})
    """

    def __init__(
        self,
        net: nn.Module,
        tensors: Mapping[str, Tensor],
        layers: Mapping[str, list[str]],
        inputs: Any,
        check: bool = True,
    ) -> None:
        self._net, self._layers = net, layers
        self.inputs_of: dict[str, Tensor] = {}
        self._probes: dict[str, Tensor] = {}
        names = [named(layer, key) for layer, keys in layers.items() for key in keys]
        leaves = {k: tensors[k].detach().clone().requires_grad_() for k in names} if check else {}
        # a trainer evaluates in inference mode, whose tensors know no derivatives
        with torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
            for layer in layers:
                stack.enter_context(_watched(net.get_submodule(layer), self._hook(layer)))
            self.outputs = call_network(net, {**tensors, **leaves}, inputs)
        for layer in layers:
            if layer not in self._probes:
                self._refuse(layer, "is not called, and its weights are used in another way")
        if check:
            self._check(leaves)

    def gradients(self, column: Tensor) -> dict[str, Tensor]:
        """By layer, b, (B, places, outputs), of the sum of outputs times a column."""
        found = torch.autograd.grad(
            self.outputs, list(self._probes.values()), column.to(self.outputs.dtype),
            retain_graph=True, allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        gradients = {}
        for layer, gradient in zip(self._probes, found, strict=True):
            if isinstance(self._net.get_submodule(layer), nn.Conv2d):
                gradient = gradient.movedim(1, -1)
            gradients[layer] = gradient.reshape(len(gradient), -1, gradient.shape[-1])
        return gradients

    def numbers(self, count: int) -> int:
        """How many an example needs for the gradients of some columns, layer by layer."""
        total = 0
        for layer, activations in self.inputs_of.items():
            places, features = activations.shape[1:]
            outputs = self._net.get_submodule(layer).get_parameter("weight").shape[0]
            total += places * (features + 2 * count * outputs)
            total += 0 if places == 1 else count * features
        return total

    def rows(self, columns: Tensor, layout: FlatLayout) -> Tensor:
        """The gradients of each example, (B, C, P), for columns (C, B, ...)."""
        flat = self.outputs.new_empty(columns.shape[1], len(columns), layout.size)
        for index, column in enumerate(columns):
            for layer, gradient in self.gradients(column).items():
                joined = gradient.mT @ self.inputs_of[layer]
                start = 0
                for key, part in layout.views(flat[:, index]).items():
                    if key.rpartition(".")[0] == layer:
                        width = part[0, 0].numel()
                        part.copy_(joined[..., start : start + width].reshape(part.shape))
                        start += width
        return flat

    def check_examples(self, check: bool) -> None:
        """Raise unless the first axis of every layer is that of the examples.

        Gradients of a batch do not need it, those of each example do. In a layout such as
        (time, batch, features) it is another axis.

        Args:
            check: Whether it is checked that examples do not change places, too.
        """
        column = _uneven(self.outputs)
        column[::2] = 0
        found = self.gradients(column) if check else {}
        for layer, activations in self.inputs_of.items():
            if len(activations) != len(self.outputs) or (
                layer in found and bool(found[layer][::2].any())
            ):
                self._refuse(layer, "has inputs whose first axis is not that of the examples")

    def _check(self, leaves: Mapping[str, Tensor]) -> None:
        """Raise unless the gradient of the weights is what the layers make of it."""
        column = _uneven(self.outputs)
        whole = torch.autograd.grad(
            self.outputs, list(leaves.values()), column, retain_graph=True,
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
        truth = dict(zip(leaves, whole, strict=True))
        for layer, gradient in self.gradients(column).items():
            joined = (gradient.mT @ self.inputs_of[layer]).sum(0)
            own = [truth[named(layer, key)] for key in self._layers[layer]]
            parts = [part.flatten(1) if part.dim() > 1 else part[:, None] for part in own]
            expected = torch.cat(parts, 1)
            size = expected.norm() + joined.norm()
            if not bool((joined - expected).norm() <= 1e-2 * size) and bool(size.isfinite()):
                self._refuse(layer, "has weights that are used in another way, too")

    def _hook(self, layer: str) -> Callable[..., Any]:
        """A forward hook that keeps a layer's inputs, and lets its outputs have a gradient."""

        def hook(module: nn.Module, arguments: tuple[Any, ...], outputs: Tensor) -> Tensor:
            if layer in self._probes:
                self._refuse(layer, "is called several times in a pass")
            self.inputs_of[layer] = _activations(module, arguments[0].detach(), self._layers[layer])
            self._probes[layer] = torch.zeros_like(outputs, requires_grad=True)
            return outputs + self._probes[layer]  # new: what follows may change it in place

        return hook

    @staticmethod
    def _refuse(layer: str, why: str) -> None:
        raise ConfigurationError(
            f"The layer {layer or 'net'!r} {why}, for which there are no Kronecker factors. "
            f"Leave it out, as with bayesian=[nn.Linear, '!{named(layer, '*')}'], or pass "
            "structure='diagonal'."
        )


def _uneven(like: Tensor) -> Tensor:
    """Numbers that no sum of outputs which is constant, as that of a softmax, makes invisible."""
    return torch.arange(like.numel(), device=like.device).cos().view_as(like).to(like.dtype)


def side_by_side(layout: FlatLayout, flat: Tensor, layer: str) -> Tensor:
    """Of flat vectors, views of a layer's weights and bias joined, (..., outputs, features).

    Example:
        >>> layout = FlatLayout({"weight": torch.zeros(1, 2), "bias": torch.zeros(1)})
        >>> side_by_side(layout, torch.tensor([1.0, 2.0, 3.0]), "")
        tensor([[1., 2., 3.]])
    """
    views, lead = layout.views(flat), flat.dim() - 1
    parts = [views[name] for key in KEYS if (name := named(layer, key)) in views]
    columns = [
        part.flatten(lead + 1) if part.dim() > lead + 1 else part.unsqueeze(-1) for part in parts
    ]
    return torch.cat(columns, -1)


def scatter(layout: FlatLayout, flat: Tensor, layer: str, joined: Tensor) -> None:
    """The inverse of :func:`side_by_side`, into one flat vector.

    Example:
        >>> layout, flat = FlatLayout({"weight": torch.zeros(1, 2)}), torch.zeros(2)
        >>> scatter(layout, flat, "", torch.tensor([[1.0, 2.0]]))
        >>> flat
        tensor([1., 2.])
    """
    views, start = layout.views(flat), 0
    for key in KEYS:
        if (view := views.get(named(layer, key))) is not None:
            width = view[0].numel()
            view.copy_(joined[:, start : start + width].reshape(view.shape))
            start += width


def _activations(module: nn.Module, inputs: Tensor, keys: Sequence[str]) -> Tensor:
    """What a layer's weights are multiplied by at each place, (B, places, features)."""
    if isinstance(module, nn.Conv2d):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
        inputs = F.unfold(
            padded, module.kernel_size, dilation=module.dilation, stride=module.stride
        ).mT
    inputs = inputs.reshape(len(inputs), -1, inputs.shape[-1])
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
