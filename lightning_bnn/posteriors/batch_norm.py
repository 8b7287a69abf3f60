r"""BatchNorm's running statistics for draws: recomputed from data, for each draw its own.

The statistics that a chain carries are an exponential average over its past weights, not those of
the weights of a draw. Here they become, for each draw, the mean over B batches of the batch's own
mean and (unbiased) variance,

.. math:: \mu = \frac1B\sum_b \mu_b, \qquad \sigma^2 = \frac1B\sum_b \sigma_b^2,

which is what a BatchNorm layer with ``momentum=None`` accumulates in training mode. Only these
layers train; dropout and all else is as in evaluation. (Izmailov et al., 2018, *Averaging Weights
Leads to Wider Optima and Better Generalization*, for the need of it.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.stacked import StackedModule

__all__ = ["batch_norm_layers", "has_batch_norm", "recompute_batch_norm"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def batch_norm_layers(net: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers of a network that keep running statistics, by name.

    Raises:
        ConfigurationError: There are none.

    Example:
        >>> list(batch_norm_layers(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))))
        ['1']
    """
    layers = _layers(net)
    if not layers:
        raise ConfigurationError(
            f"{type(net).__name__} has no BatchNorm layer with running statistics, so there is "
            "nothing to recompute. Leave refresh_batch_norm out."
        )
    return layers


def has_batch_norm(net: nn.Module) -> bool:
    """Whether a network has a BatchNorm layer that keeps running statistics.

    Example:
        >>> has_batch_norm(nn.BatchNorm1d(3)), has_batch_norm(nn.LayerNorm(3))
        (True, False)
    """
    return bool(_layers(net))


def _layers(net: nn.Module) -> dict[str, _BatchNorm]:
    return {
        name: module
        for name, module in net.named_modules()
        if isinstance(module, _BatchNorm) and isinstance(module.running_mean, Tensor)
    }


@torch.no_grad()
def recompute_batch_norm(
    net: nn.Module,
    weights: Mapping[str, Tensor],
    batches: Iterable[Any],
) -> dict[str, Tensor]:
    """The same weights with running statistics that are the mean over batches of the inputs.

    Neither the network nor the given weights are changed. Statistics are not gathered over
    processes, by ``SyncBatchNorm`` neither.

    Args:
        net: The network; its own values serve for what is not in ``weights``.
        weights: Parameters and buffers with a leading axis of draws.
        batches: Batches of inputs, at least one; each draw sees all of them.

    Returns:
        The given tensors, and for each BatchNorm layer new statistics with a leading axis.

    Example:
        >>> net = nn.BatchNorm1d(1, affine=False)
        >>> batches = [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])]
        >>> recompute_batch_norm(net, {"running_mean": torch.zeros(1, 1)}, batches)["running_mean"]
        tensor([[3.]])
    """
    layers = batch_norm_layers(net)
    fresh = dict(weights)
    first = next(iter(weights.values()))
    for prefix, layer in layers.items():
        for statistic in _STATISTICS:
            own = getattr(layer, statistic)
            name = f"{prefix}.{statistic}" if prefix else statistic
            fresh[name] = own.new_zeros(len(first), *own.shape, device=first.device)
    # one draw after another: in a stack the layers' counters are vectors, and cannot be read
    run = StackedModule(net, "loop")
    count = 0
    with _only_these_train(net, list(layers.values())):
        for inputs in batches:
            run(fresh, inputs)
            count += 1
    if not count:
        raise ConfigurationError("BatchNorm's statistics need at least one batch; got none.")
    return fresh


@contextmanager
def _only_these_train(net: nn.Module, layers: list[_BatchNorm]) -> Iterator[None]:
    """Put a network into evaluation mode but for layers that average over all their calls."""
    training = [(module, module.training) for module in net.modules()]
    momenta = [layer.momentum for layer in layers]
    try:
        net.eval()
        for layer in layers:
            layer.train()
            layer.momentum = None  # the average over all calls, by the layer's own counter
            if isinstance(layer, nn.SyncBatchNorm):
                vars(layer)["forward"] = MethodType(_BatchNorm.forward, layer)
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
            vars(layer).pop("forward", None)
        for module, mode_before in training:
            module.training = mode_before
