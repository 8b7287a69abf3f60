r"""Structured pruning: whole output channels and neurons go, by the signal-to-noise of the group.

The ratio of unit u, with means :math:`\mu_i` and variances :math:`\sigma_i^2` of its incoming
weights, and of its bias where that varies too, is

.. math::
    \mathrm{SNR}_u = \sqrt{\frac{\sum_{i\in u}\mu_i^2}{\sum_{i\in u}\sigma_i^2}},

the length of the unit's mean weight vector against the root mean square length of its noise. It is
the ratio of a single weight where a unit has one. 0/0 is 0: already removed.

A removed unit gives exactly zero in every draw: its row of weights, its bias, and its entries in
the BatchNorms and depthwise convolutions that follow are zero (weight, bias and running mean).
:meth:`~lightning_bnn.posteriors.Posterior.compact` then takes it out of the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import network_tensors
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.pruning.candidates import candidates, protected_names, refuse_computed
from lightning_bnn.pruning.chains import Chain, Chains, Obstacle, find_chains
from lightning_bnn.selection import Choice

if TYPE_CHECKING:
    from lightning_bnn.pruning.masks import Rest, Scope

__all__ = ["channel_and_weight_ratios", "channel_masks", "channel_signal_to_noise"]

_SHOWN = 4


def channel_signal_to_noise(
    posterior: WeightPosterior, protect: Choice = None, rest: Rest = "raise"
) -> dict[str, Tensor]:
    """The signal-to-noise ratio of each unit that can be removed.

    Args:
        posterior: What is to be pruned.
        protect: Layers whose units stay, by their weights, or by anything that would go with them.
        rest: What to do about layers that cannot be followed; only ``"raise"`` refuses them.

    Returns:
        One number for each unit, by the name of its layer's weight, in the network's order.

    Raises:
        ConfigurationError: A prunable layer cannot be followed, or none can.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.posteriors import GaussianPosterior
        >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1))
        >>> mean = {"0.weight": torch.tensor([[3.0, 4.0], [0.0, 0.0]])}
        >>> sd = {"0.weight": torch.ones(2, 2)}
        >>> channel_signal_to_noise(GaussianPosterior(net, Gaussian(0.1), mean, sd))
        {'0.weight': tensor([3.5355, 0.0000], dtype=torch.float64)}
    """
    return _ratios(posterior, _Plan(posterior, protect, rest))


def channel_and_weight_ratios(
    posterior: WeightPosterior, protect: Choice = None, rest: Rest = "raise"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The ratios of all that structured pruning may remove: of units, and of single weights.

    Each of the two loses the same fraction by itself. There are single weights only with
    ``rest="weight"``, where layers cannot be followed. The arguments are those of
    :func:`channel_signal_to_noise`.
    """
    plan = _Plan(posterior, protect, rest)
    return _ratios(posterior, plan), _single_ratios(posterior, plan, rest)


def channel_masks(
    posterior: WeightPosterior,
    fraction: float,
    scope: Scope = "global",
    protect: Choice = None,
    rest: Rest = "raise",
) -> dict[str, Tensor]:
    """The masks that remove a fraction of all removable units, the lowest ratios first.

    Args:
        posterior: What is to be pruned.
        fraction: The share of the removable units, in [0, 1).
        scope: ``"global"`` over all layers together, or ``"layer"`` for each by itself.
        protect: Layers whose units stay, by their weights, or by anything that would go with them.
        rest: What to do about layers that cannot be followed: ``"raise"`` an error, ``"keep"``
            them, or prune their single weights by the same fraction (``"weight"``).

    Returns:
        By the name of a weight, bias or BatchNorm tensor: False where a removed unit has it.

    Raises:
        ConfigurationError: A prunable layer cannot be followed, none can, or the fraction is too
            large to leave one unit in each layer.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.posteriors import GaussianPosterior
        >>> net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> mean = {"0.weight": torch.tensor([[3.0], [1.0]])}
        >>> sd = {"0.weight": torch.ones(2, 1)}
        >>> channel_masks(GaussianPosterior(net, Gaussian(0.1), mean, sd), fraction=0.5)
        {'0.weight': tensor([[ True], [False]]), '0.bias': tensor([ True, False])}
    """
    from lightning_bnn.pruning.masks import check_fraction, keep_masks

    check_fraction(fraction)
    plan = _Plan(posterior, protect, rest)
    kept = keep_masks(_ratios(posterior, plan), fraction, scope)
    own = network_tensors(posterior.net)
    masks: dict[str, Tensor] = {}
    for weight, chain in plan.chains.items():
        masks |= _of_units(own, chain, kept[weight])
    masks |= keep_masks(_single_ratios(posterior, plan, rest), fraction, scope)
    return {name: masks[name] for name in own if name in masks}


class _Plan:
    """What can be removed of a posterior.

    Attributes:
        chains: The layers whose units can go, by the names of their weights.
        unfollowed: The prunable weights of layers that cannot be followed.
    """

    def __init__(self, posterior: WeightPosterior, protect: Choice, rest: Rest) -> None:
        net, varying = posterior.net, posterior.varying
        if rest != "keep":
            refuse_computed(net, varying, protect)
        prunable = candidates(net, varying, protect)
        found = find_chains(net)
        layers = {name: name.rpartition(".")[0] for name in prunable}
        own, protected = network_tensors(net), protected_names(net, varying, protect)
        self.chains: dict[str, Chain] = {}
        whole: dict[str, str] = {}
        for name, layer in layers.items():
            if layer in found.followed and name == _join(layer, "weight"):
                chain = found.followed[layer]
                companions = [one for one in _entries(own, chain) if one in protected]
                if companions:  # a unit takes its entries in them with it
                    whole[layer] = companions[0]
                else:
                    self.chains[name] = chain
        self.unfollowed = [name for name, layer in layers.items() if layer in found.obstacles]
        obstacles = list(dict.fromkeys(found.obstacles[layers[name]] for name in self.unfollowed))
        if obstacles and rest == "raise":
            _refuse(obstacles)
        if not self.chains and not (self.unfollowed and rest == "weight"):
            _refuse_all(prunable, layers, found, obstacles, whole)


def _refuse(obstacles: list[Obstacle]) -> None:
    patterns = [f"{obstacle.layer}.*" if obstacle.layer else "*" for obstacle in obstacles]
    raise ConfigurationError(
        f"The units of {_count(len(obstacles), 'layer')} cannot be removed: {_list(obstacles)}. "
        f"Protect {'it' if len(obstacles) == 1 else 'them'}, with protect={patterns[:_SHOWN]}"
        f"{' and so on' if len(patterns) > _SHOWN else ''}; or prune the other layers and leave "
        'the rest as it is, with rest="keep", or prune single weights of it, with rest="weight".'
    )


def _refuse_all(
    prunable: list[str],
    layers: Mapping[str, str],
    found: Chains,
    obstacles: list[Obstacle],
    whole: Mapping[str, str],
) -> None:
    outputs = [layers[name] for name in prunable if layers[name] in found.outputs]
    reasons = [f"{layer!r} gives the network's outputs" for layer in outputs]
    reasons += [f"{layer!r} would take {name!r} along, which is protected"
                for layer, name in whole.items()]  # fmt: skip
    reasons += [str(obstacle) for obstacle in obstacles]
    why = "; ".join(reasons[:_SHOWN]) or "no weight with two or more axes varies"
    raise ConfigurationError(
        f"No layer of the network has units that can be removed: {why}. Prune single weights, with "
        'unit="weight".'
    )


def _ratios(posterior: WeightPosterior, plan: _Plan) -> dict[str, Tensor]:
    """The ratio of each unit, summed in float64."""
    from lightning_bnn.pruning.signal import check_varies

    if not plan.chains:
        return {}
    found = posterior.moments()
    check_varies(posterior, {name: found.variance[name] for name in plan.chains}, "removable unit")
    ratios = {}
    for weight, chain in plan.chains.items():
        bias = _join(chain.producer, "bias")
        names = [name for name in (weight, bias) if name in found.mean]
        signal = sum(_per_row(found.mean[name].double().square()) for name in names)
        noise = sum(_per_row(found.variance[name].double()) for name in names)
        assert isinstance(signal, Tensor)  # the weight is one of the names
        dead = (signal == 0) & (noise == 0)
        ratios[weight] = (signal / noise).sqrt().masked_fill(dead, 0.0)
    return ratios


def _single_ratios(posterior: WeightPosterior, plan: _Plan, rest: Rest) -> dict[str, Tensor]:
    """The ratio of each weight of the layers that cannot be followed, if these are pruned."""
    from lightning_bnn.pruning.signal import signal_to_noise

    if rest != "weight" or not plan.unfollowed:
        return {}
    ratios = signal_to_noise(posterior)
    return {name: ratios[name] for name in plan.unfollowed}


def _entries(own: Mapping[str, Tensor], chain: Chain) -> dict[str, int]:
    """The tensors that lose entries with a unit of a chain, and how many for each unit."""
    followers = [(one.name, one.per_unit) for one in chain.companions]
    return {
        full: per_unit
        for name, per_unit in [(chain.producer, 1), *followers]
        for full in (_join(name, key) for key in ("weight", "bias", "running_mean"))
        if full in own
    }


def _of_units(own: Mapping[str, Tensor], chain: Chain, kept: Tensor) -> dict[str, Tensor]:
    """The masks of one chain: everything that makes a removed unit exactly zero."""
    masks: dict[str, Tensor] = {}
    for name, per_unit in _entries(own, chain).items():
        entries, shape = kept.repeat_interleave(per_unit), own[name].shape
        masks[name] = entries.view(-1, *[1] * (len(shape) - 1)).expand(shape).clone()
    return masks


def _per_row(tensor: Tensor) -> Tensor:
    return tensor.flatten(1).sum(1) if tensor.ndim > 1 else tensor


def _join(layer: str, key: str) -> str:
    return f"{layer}.{key}" if layer else key


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _list(obstacles: list[Obstacle]) -> str:
    more = len(obstacles) - _SHOWN
    listed = "; ".join(str(obstacle) for obstacle in obstacles[:_SHOWN])
    return f"{listed}; and {_count(more, 'more')}" if more > 0 else listed
