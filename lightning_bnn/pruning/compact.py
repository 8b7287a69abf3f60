"""A pruned posterior as one of a smaller network: what is zero in every draw is taken out.

A unit (an output feature of a ``Linear``, an output channel of a convolution) can go if each layer
that reads it either gets an exact zero from it in every draw, or has zeros in every draw for all
the weights that would read it. The first is so when its weights and its bias are zero and no
BatchNorm on the way adds anything. A removed unit leaves others without inputs or without readers,
so this is repeated until nothing changes. One unit of each layer stays.

What remains computes the same numbers from the same weights: only zeros were added there. (A
Gaussian of fewer weights takes fewer random numbers, so that one seed gives other draws from the
same distribution than before.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_bnn.network import network_tensors
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.pruning.functions import support
from lightning_bnn.pruning.groups import Group, Source, check_same_graph, find_groups
from lightning_bnn.pruning.signal import check_posterior
from lightning_bnn.resize import resized

__all__ = ["compact"]

AnyPosterior = TypeVar("AnyPosterior", bound=WeightPosterior)


def compact(posterior: AnyPosterior) -> AnyPosterior:
    """The same posterior of a smaller network, without the units that have no effect.

    Its network is an ordinary module of the same class with smaller layers, and it is saved and
    loaded like any other: ``Posterior.load(directory, net)`` takes the network of the original
    size. Where nothing can go, it is equal to the original. Stored draws stay on the disk.

    A ``BatchNorm1d`` after a ``Linear`` is taken as one of features, of inputs with two axes.

    Args:
        posterior: Pruned by units, by single weights, or while it was trained.

    Raises:
        ConfigurationError: ``torch.fx`` cannot trace the network, or its ``forward`` computes with
            the size of a layer that would get smaller.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.posteriors import DrawsPosterior
        >>> from lightning_bnn.pruning import prune
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> draws = [{name: torch.randn_like(p) for name, p in net.named_parameters()}
        ...          for _ in range(3)]
        >>> posterior = prune(DrawsPosterior(net, Gaussian(0.1), draws), 0.5, unit="channel")
        >>> compact(posterior).net
        Sequential(
          (0): Linear(in_features=4, out_features=4, bias=True)
          (1): ReLU()
          (2): Linear(in_features=4, out_features=1, bias=True)
        )
    """
    check_posterior(posterior)
    net = posterior.net
    somewhere = {name: mask.cpu() for name, mask in support(posterior).items()}
    indices = _indices(net, _alive(find_groups(net).removable, somewhere))
    change = partial(_selected, indices)  # which can travel to another process
    tensors = network_tensors(net)
    smaller = resized(net, {name: change(name, tensor).shape for name, tensor in tensors.items()})
    with torch.no_grad():
        for name, tensor in network_tensors(smaller).items():
            tensor.copy_(change(name, tensors[name]))
    if indices:
        check_same_graph(net, smaller)
    return posterior.map(change, smaller)


def _selected(indices: Mapping[str, list[tuple[int, Tensor]]], name: str, tensor: Tensor) -> Tensor:
    """What remains of a tensor: for each name axes, as negative numbers, and places along them."""
    for axis, index in indices.get(name, []):
        tensor = tensor.index_select(axis, index.to(tensor.device))
    return tensor


def _alive(groups: Sequence[Group], support: Mapping[str, Tensor]) -> dict[Group, Tensor]:
    """Which units of each group stay."""
    alive = {group: torch.ones(group.units, dtype=torch.bool) for group in groups}
    # whether each unit of a layer reads each of its inputs, at any place of the kernel
    weights = {
        name: support[f"{name}.weight"].unsqueeze(2).flatten(2).any(2)
        for group in groups
        for name in (*group.producers, *(reader.name for reader in group.readers))
    }
    while True:
        before = sum(int(units.sum()) for units in alive.values())
        for group, units in alive.items():
            nonzero = _nonzero(support, weights, group.units)
            felt = torch.zeros_like(units)
            for reader in group.readers:
                read = weights[reader.name].any(0).view(group.units, -1).any(1)
                felt |= read & nonzero(reader.source).any(1)
            felt &= units
            if not felt.any():
                felt[units.nonzero()[0]] = True  # a layer needs one unit
            alive[group] = felt
            for name in group.producers:
                weights[name] = weights[name] & felt[:, None]
            for reader in group.readers:
                inputs = felt.repeat_interleave(reader.per_unit)
                weights[reader.name] = weights[reader.name] & inputs
        if sum(int(units.sum()) for units in alive.values()) == before:
            return alive


def _nonzero(
    support: Mapping[str, Tensor], weights: Mapping[str, Tensor], units: int
) -> Callable[[Source], Tensor]:
    """Which entries of each unit are not exactly zero at a source, (units, entries)."""

    def entries(source: Source, key: str, default: bool) -> Tensor:
        tensor = support.get(f"{source.layer}.{key}")
        if tensor is None:
            return torch.full((units, source.per_unit), default)
        return (tensor.flatten(1).any(1) if tensor.ndim > 1 else tensor).view(units, -1)

    @cache
    def nonzero(source: Source) -> Tensor:
        inputs = [nonzero(before) for before in source.inputs]
        if source.layer is None:
            return inputs[0] | inputs[1]
        bias = entries(source, "bias", default=False)
        if not inputs:
            return weights[source.layer].any(1, keepdim=True) | bias
        # a BatchNorm: (x - running mean) / sd · weight + bias; a depthwise convolution has no mean,
        # and without running statistics the mean of zeros is zero
        mean = entries(source, "running_mean", default=False)
        return ((inputs[0] | mean) & entries(source, "weight", default=True)) | bias

    return nonzero


def _indices(net: nn.Module, alive: Mapping[Group, Tensor]) -> dict[str, list[tuple[int, Tensor]]]:
    """What remains of each tensor that gets smaller, along axes counted from the end."""
    tensors = network_tensors(net)
    indices: dict[str, list[tuple[int, Tensor]]] = {}

    def shrink(name: str, axis: int, units: Tensor, per_unit: int) -> None:
        if name in tensors:
            places = units.repeat_interleave(per_unit).nonzero().view(-1)
            indices.setdefault(name, []).append((axis - tensors[name].ndim, places))

    for group, units in alive.items():
        if bool(units.all()):
            continue
        for layer, per_unit in group.entries.items():
            for key in ("weight", "bias", "running_mean", "running_var"):
                shrink(f"{layer}.{key}", 0, units, per_unit)
        for reader in group.readers:
            shrink(f"{reader.name}.weight", 1, units, reader.per_unit)
    return indices
