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

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.stacked import StackedModule

__all__ = ["batch_norm_layers", "recompute_batch_norm", "training_batch_norm"]

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


def training_batch_norm(net: nn.Module) -> list[str]:
    """The names of the BatchNorm layers whose running statistics change as the network stands.

    One that was put into evaluation mode, as in fine-tuning, keeps those that it has.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3).eval(), nn.LayerNorm(3))
        >>> training_batch_norm(net)
        ['0']
    """
    return [name for name, layer in _layers(net).items() if layer.training]


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
    only: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """The same weights with running statistics that are the mean over batches of the inputs.

    A layer that the network itself runs as in evaluation keeps the statistics that it has. Neither
    the network nor the given weights are changed. Statistics are not gathered over processes, by
    ``SyncBatchNorm`` neither.

    Args:
        net: The network; its own values serve for what is not in ``weights``.
        weights: Parameters and buffers with a leading axis of draws.
        batches: Batches of inputs, at least one; each draw sees all of them.
        only: The names of the layers that get new statistics; by default all BatchNorm layers.

    Returns:
        The given tensors, and for each such layer its statistics with a leading axis.

    Example:
        >>> net = nn.BatchNorm1d(1, affine=False)
        >>> batches = [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])]
        >>> recompute_batch_norm(net, {"running_mean": torch.zeros(1, 1)}, batches)["running_mean"]
        tensor([[3.]])
    """
    layers = batch_norm_layers(net)
    if only is not None:
        layers = {name: layer for name, layer in layers.items() if name in only}
    fresh = dict(weights)
    first = next(iter(weights.values()))
    for prefix, layer in layers.items():
        for statistic in _STATISTICS:
            own = getattr(layer, statistic).to(first.device)
            name = f"{prefix}.{statistic}" if prefix else statistic
            given = weights.get(name, own.expand(len(first), *own.shape))
            # the first batch replaces what is there: its weight is 1, but 0 · inf would stay
            counts = statistic == _STATISTICS[-1]
            fresh[name] = torch.zeros_like(given) if counts else given.nan_to_num(0.0, 0.0, 0.0)
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
