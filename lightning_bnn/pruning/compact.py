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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_bnn.network import network_tensors
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.pruning.chains import Chain, Reader, find_chains
from lightning_bnn.pruning.functions import support
from lightning_bnn.pruning.tracing import check_same_graph
from lightning_bnn.resize import resized

__all__ = ["compact"]

AnyPosterior = TypeVar("AnyPosterior", bound=WeightPosterior)


def compact(posterior: AnyPosterior) -> AnyPosterior:
    """The same posterior of a smaller network, without the units that have no effect.

    Its network is an ordinary module of the same class with smaller layers, and it is saved and
    loaded like any other: ``Posterior.load(directory, net)`` takes the network of the original
    size. Where nothing can go, it is equal to the original. Stored draws stay on the disk.

    A ``BatchNorm1d`` after a ``Linear`` is taken as one of features, of inputs with two axes,
    unless the network's graph tells that there are three.

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
    net = posterior.net
    chains = list(find_chains(net).followed.values())
    somewhere = {name: mask.cpu() for name, mask in support(posterior).items()}
    change = _Selected(_indices(net, chains, _alive(chains, somewhere)))
    own = network_tensors(net)
    smaller = resized(net, {name: change(name, tensor).shape for name, tensor in own.items()})
    with torch.no_grad():
        for name, tensor in network_tensors(smaller).items():
            tensor.copy_(change(name, own[name]))
    if change.indices:
        layers = dict.fromkeys(name.rpartition(".")[0] for name in change.indices)
        check_same_graph(net, smaller, list(layers))
    return posterior.map(change, smaller)


@dataclass(frozen=True)
class _Selected:
    """A change that can travel to another process: what remains, along axes counted from the end.

    Attributes:
        indices: For each tensor: axes, as negative numbers, and the places that remain.
    """

    indices: dict[str, list[tuple[int, Tensor]]]

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        for axis, index in self.indices.get(name, []):
            tensor = tensor.index_select(axis, index.to(tensor.device))
        return tensor


def _alive(chains: list[Chain], support: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Which units of each producer stay, by its name."""
    alive = {chain.producer: torch.ones(chain.units, dtype=torch.bool) for chain in chains}
    weights = {name: _matrix(support, name) for chain in chains for name in _layers(chain)}
    while True:
        before = sum(int(units.sum()) for units in alive.values())
        for chain in chains:
            felt = torch.zeros(chain.units, dtype=torch.bool)
            bias = _vector(support, chain.producer, "bias", chain.units, default=False)
            rows = weights[chain.producer].any(1) | bias
            for reader in chain.readers:
                read = weights[reader.name].any(0).view(chain.units, -1).any(1)
                felt |= read & _reaches(support, rows, reader)
            felt &= alive[chain.producer]
            if not felt.any():
                felt[alive[chain.producer].nonzero()[0]] = True  # a layer needs one unit
            alive[chain.producer] = felt
            weights[chain.producer] = weights[chain.producer] & felt[:, None]
            for reader in chain.readers:
                inputs = felt.repeat_interleave(reader.per_unit)
                weights[reader.name] = weights[reader.name] & inputs
        if sum(int(units.sum()) for units in alive.values()) == before:
            return alive


def _reaches(support: Mapping[str, Tensor], rows: Tensor, reader: Reader) -> Tensor:
    """Which units are not exactly zero where a layer reads them."""
    nonzero = rows[:, None]
    for name, per_unit in ((one.name, one.per_unit) for one in reader.through):
        size = len(rows) * per_unit
        # a BatchNorm: (x - running mean) / sd · weight + bias; a depthwise convolution has no mean,
        # and without running statistics the mean of zeros is zero
        mean = _vector(support, name, "running_mean", size, default=False).view(-1, per_unit)
        weight = _vector(support, name, "weight", size, default=True).view(-1, per_unit)
        bias = _vector(support, name, "bias", size, default=False).view(-1, per_unit)
        nonzero = ((nonzero | mean) & weight) | bias
    return nonzero.any(1)


def _indices(
    net: nn.Module, chains: list[Chain], alive: Mapping[str, Tensor]
) -> dict[str, list[tuple[int, Tensor]]]:
    """What remains of each tensor that gets smaller, along axes counted from the end."""
    own = network_tensors(net)
    indices: dict[str, list[tuple[int, Tensor]]] = {}
    for chain in chains:
        units = alive[chain.producer]
        if bool(units.all()):
            continue
        followers = [(one.name, one.per_unit) for one in chain.companions]
        for name, per_unit in [(chain.producer, 1), *followers]:
            places = units.repeat_interleave(per_unit).nonzero().view(-1)
            for key in ("weight", "bias", "running_mean", "running_var"):
                if f"{name}.{key}" in own:
                    axis = -own[f"{name}.{key}"].ndim  # the first, whatever axes come in front
                    indices.setdefault(f"{name}.{key}", []).append((axis, places))
        for reader in chain.readers:
            places = units.repeat_interleave(reader.per_unit).nonzero().view(-1)
            weight = f"{reader.name}.weight"
            indices.setdefault(weight, []).append((1 - own[weight].ndim, places))
    return indices


def _layers(chain: Chain) -> list[str]:
    return [chain.producer, *(reader.name for reader in chain.readers)]


def _matrix(support: Mapping[str, Tensor], layer: str) -> Tensor:
    """Whether each unit of a layer reads each of its inputs, at any place of the kernel."""
    weight = support[f"{layer}.weight"]
    return weight.flatten(2).any(2) if weight.ndim > 2 else weight


def _vector(
    support: Mapping[str, Tensor], layer: str, key: str, size: int, default: bool
) -> Tensor:
    """Where a layer's tensor is not zero, one number for each entry; a default if it has none."""
    tensor = support.get(f"{layer}.{key}")
    if tensor is None:
        return torch.full((size,), default)
    return tensor.flatten(1).any(1) if tensor.ndim > 1 else tensor
