"""Plain layers on stacked tensors: the quick way through a perceptron of M sets of weights.

``torch.func.vmap`` runs any network, but on a small one its bookkeeping costs more than the
arithmetic. A network that is nothing but (nested) ``nn.Sequential`` of linear layers, layer
normalisation, dropout, flattening and elementwise activations needs no bookkeeping: with a
leading axis of members, a linear layer is one batched product,

    hᵐ = Wᵐ xᵐᵀ + bᵐ        (features, batch), seen as its transpose,

and the others are what they are for one network. Activations lie in memory as (M, features,
batch): the gradient of W then comes out in W's own order, without a pass that transposes it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["plain_layers", "run_layers"]

Layers = list[tuple[str, nn.Module]]

# One number in, one number out, whatever the axes.
_ELEMENTWISE = {
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU,
    nn.Mish, nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink, nn.Softshrink, nn.Hardshrink,
}  # fmt: skip
_KNOWN = _ELEMENTWISE | {nn.Linear, nn.LayerNorm, nn.Dropout, nn.Flatten}


def plain_layers(net: nn.Module, stacked: Mapping[str, Tensor]) -> Layers | None:
    """The layers of ``net`` in their order, with the prefix of their names; or None.

    None is the answer unless every module is of a known type, none has a hook or a ``forward``
    put in its place, and every parameter is among the stacked tensors under its own name.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        >>> weights = {name: tensor[None] for name, tensor in net.named_parameters()}
        >>> [prefix for prefix, _ in plain_layers(net, weights)]
        ['0.', '1.']
        >>> plain_layers(nn.Sequential(nn.Conv2d(1, 2, 3)), {}) is None
        True
    """
    layers: Layers = []
    if not _collect(net, "", layers):
        return None
    seen: set[int] = set()
    for prefix, layer in layers:
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            if prefix + name not in stacked or id(parameter) in seen:
                return None  # shared by all members, or tied to another layer
            seen.add(id(parameter))
    return layers


def _collect(module: nn.Module, prefix: str, layers: Layers) -> bool:
    if _is_changed(module):
        return False
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        return all(
            _collect(child, f"{prefix}{name}.", layers)
            for name, child in module._modules.items()
            if child is not None
        )
    layers.append((prefix, module))
    return type(module) in _KNOWN


def _is_changed(module: nn.Module) -> bool:
    """Whether calling the module does more, or other, than its type says."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def run_layers(
    layers: Layers, stacked: Mapping[str, Tensor], inputs: Tensor, own_inputs: bool
) -> Tensor:
    """The outputs of all members, (M, batch, ...), of a network that :func:`plain_layers` takes.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> weights = {"weight": torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])}
        >>> run_layers(plain_layers(net, weights), weights, torch.tensor([[3.0, 4.0]]), False)
        tensor([[[3.]],
        <BLANKLINE>
                [[4.]]])
    """
    members = next(iter(stacked.values())).shape[0]
    hidden, own = inputs, own_inputs
    for prefix, layer in layers:
        kind = type(layer)
        if kind is nn.Linear:
            hidden = _linear(hidden, own, stacked[f"{prefix}weight"], stacked.get(f"{prefix}bias"))
            own = True
        elif kind is nn.LayerNorm:
            assert isinstance(layer, nn.LayerNorm)
            hidden = F.layer_norm(hidden, layer.normalized_shape, eps=layer.eps)
            if layer.weight is not None:
                hidden, own = hidden if own else hidden[None], True
                hidden = hidden * _beside(stacked[f"{prefix}weight"], hidden)
                if layer.bias is not None:
                    hidden = hidden + _beside(stacked[f"{prefix}bias"], hidden)
        elif kind is nn.Flatten:
            assert isinstance(layer, nn.Flatten)
            first, last = layer.start_dim, layer.end_dim
            hidden = hidden.flatten(first + (own and first >= 0), last + (own and last >= 0))
        else:
            if kind is nn.Dropout and layer.training and not own:
                # every member drops other numbers
                hidden, own = hidden.repeat(members, *[1] * hidden.ndim), True
            hidden = layer(hidden)
    return hidden if own else hidden.expand(members, *hidden.shape)


def _linear(inputs: Tensor, own: bool, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One linear layer of all members; ``inputs`` are (M, ..., features) if ``own``."""
    lead = inputs.shape[own:-1]
    if inputs.shape[-1:] != weight.shape[-1:]:
        # the two do not fit: PyTorch says so, of one member's shapes
        F.linear(inputs[0] if own else inputs, weight[0])
    columns = inputs
    if len(lead) != 1:
        columns = inputs.reshape(*inputs.shape[:own], -1, inputs.shape[-1])
    columns = columns.mT
    if not own:
        columns = columns.expand(weight.shape[0], *columns.shape)
    if bias is None:
        outputs = torch.bmm(weight, columns).mT
    else:
        outputs = torch.baddbmm(bias[:, :, None], weight, columns).mT
    return outputs if len(lead) == 1 else outputs.unflatten(1, lead) if lead else outputs[:, 0]


def _beside(parameter: Tensor, values: Tensor) -> Tensor:
    """A (M, *shape) parameter with axes of length 1, so that it fits (M, ..., *shape)."""
    between = values.ndim - parameter.ndim
    return parameter.reshape(parameter.shape[0], *[1] * between, *parameter.shape[1:])
