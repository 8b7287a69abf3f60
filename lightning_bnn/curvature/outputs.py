r"""The covariances :math:`J\Sigma J^\top` of the outputs of a linearised network, for each example.

The rows of J are as long as the weights, and there is one for each output. Where the covariance
keeps layers apart, in a basis of products of a layer's outputs and inputs (diagonal, Kronecker), a
layer with one place has

.. math:: (J\Sigma J^\top)_{fg} = \sum_o (V^\top b_f)_o (V^\top b_g)_o \sum_i \sigma_{oi}^2
          (U^\top a)_i^2 ,

with a what goes in and :math:`b_f` the gradient of output f that comes back; no J is made. One
with several places makes its own part of J, some of its outputs at a time. Other covariances get
rows of J, some outputs of the network at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_bnn.curvature.base import Covariance, check_room
from lightning_bnn.curvature.linear import LinearisedNetwork, some_examples

__all__ = ["output_covariances"]

_NUMBERS = 2**25  # that are held at a time: 128 MB


def output_covariances(
    covariance: Covariance,
    linear: LinearisedNetwork,
    inputs: Any,
    outputs: Tensor,
    whole: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """J Σ Jᵀ of each example, (B, F, F), with F outputs.

    Args:
        covariance: Σ.
        linear: The network.
        inputs: A batch, of at least one example.
        outputs: What the network gives for it, (B, ...).
        whole: Makes of rows of the network's weights rows of those of the covariance, where some
            weights were taken out.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn.curvature.diagonal import DiagonalCovariance
        >>> net = nn.Linear(2, 1, bias=False).eval()
        >>> linear = LinearisedNetwork(net, dict(net.named_parameters()), {})
        >>> covariance = DiagonalCovariance(linear.layout, {"sd": torch.tensor([1.0, 2.0])})
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> output_covariances(covariance, linear, x, linear.outputs(x)).round()  # 3² + 4² · 2²
        tensor([[[73.]]])
    """
    inputs = linear.prepared(inputs)
    if covariance.layered and whole is None:
        first = linear.recorded_if_plain(some_examples(inputs, slice(2)))
        if first is not None:
            numbers = first.numbers(outputs[0].numel())
            # a trainer evaluates in inference mode, whose tensors know no derivatives
            with torch.inference_mode(False), torch.no_grad():
                return _by_layers(covariance, linear, inputs, outputs, numbers)
    return _by_rows(covariance, linear, inputs, outputs, whole)


def _by_layers(
    covariance: Covariance, linear: LinearisedNetwork, inputs: Any, outputs: Tensor, numbers: int
) -> Tensor:
    count = outputs[0].numel()
    check_room(
        f"The linearised predictive of {count:,} outputs", numbers * outputs.element_size(),
        outputs.device, "Pass predictive='draws', or fewer weights with bayesian=.",
    )  # fmt: skip
    total = outputs.new_zeros(len(outputs), count, count)
    step = max(1, _NUMBERS // numbers)
    for start in range(0, len(outputs), step):
        some = slice(start, start + step)
        run = linear.recorded(some_examples(inputs, some))
        eye = torch.eye(count).to(outputs)
        found = [
            run.gradients(row.expand(len(run.outputs), -1).reshape(run.outputs.shape))
            for row in eye
        ]
        for layer, activations in run.inputs_of.items():
            gradients = torch.stack([each[layer] for each in found], 1)  # (b, F, places, outputs)
            total[some] += _of_layer(covariance, layer, gradients, activations)
    return total


def _of_layer(covariance: Covariance, layer: str, gradients: Tensor, activations: Tensor) -> Tensor:
    left, right, scale = covariance.factors(layer)
    if left is not None:
        gradients = gradients @ left
    if right is not None:
        activations = activations @ right
    if activations.shape[1] == 1:
        weights = activations[:, 0].square() @ scale.square().T
        half = gradients[:, :, 0] * weights.sqrt().unsqueeze(1)
        return half @ half.mT
    examples, count, _, width = gradients.shape
    total = gradients.new_zeros(examples, count, count)
    step = max(1, _NUMBERS // max(1, examples * count * activations.shape[-1]))
    for start in range(0, width, step):
        some = slice(start, start + step)
        joined = gradients[..., some].mT.flatten(1, 2) @ activations
        half = (joined.unflatten(1, (count, -1)) * scale[some]).flatten(2)
        total += half @ half.mT
    return total


def _by_rows(
    covariance: Covariance,
    linear: LinearisedNetwork,
    inputs: Any,
    outputs: Tensor,
    whole: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    count = outputs[0].numel()
    size = max(linear.layout.size, covariance.layout.size)
    total = outputs.new_zeros(len(outputs), count, count)
    width = min(count, max(1, _NUMBERS // size))
    step = max(1, _NUMBERS // (width * size))
    blocks = [slice(start, start + width) for start in range(0, count, width)]
    for start in range(0, len(outputs), step):
        some = slice(start, start + step)
        part, shape = some_examples(inputs, some), outputs[some].shape

        def half(block: slice, part: Any = part, shape: torch.Size = shape) -> Tensor:
            rows = torch.eye(count).to(outputs)[block]
            columns = rows[:, None].expand(-1, shape[0], -1).reshape(-1, *shape)
            found = torch.cat([each for _, each in linear.rows(part, columns)])
            found = found if whole is None else whole(found)
            return covariance.project(found.flatten(0, 1)).unflatten(0, found.shape[:2])

        for index, one in enumerate(blocks):
            first = half(one)
            total[some, one, one] = first @ first.mT
            for other in blocks[index + 1 :]:
                mixed = first @ half(other).mT
                total[some, one, other], total[some, other, one] = mixed, mixed.mT
    return total
