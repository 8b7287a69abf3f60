r"""What pruning may remove of a posterior, and the signal-to-noise ratio of each.

Single weights: those with two or more axes, of linear and convolutional layers, embeddings,
attention and recurrent layers. Biases and normalisation stay: they are few, each moves a whole
unit, and their size says little about their worth. Tensors from which a weight is only computed (a
parametrisation, such as weight normalisation) are no weights: with zeros in them the weight is
another one, or none.

Units: output channels and neurons (:mod:`lightning_bnn.pruning.groups`). The ratio of unit u, with
means :math:`\mu_i` and variances :math:`\sigma_i^2` of its incoming weights, and of its bias where
that varies too, is

.. math::
    \mathrm{SNR}_u = \sqrt{\frac{\sum_{i\in u}\mu_i^2}{\sum_{i\in u}\sigma_i^2}},

the length of the unit's mean weight vector against the root mean square length of its noise. It is
the ratio of a single weight where a unit has one. Where layers are added, the sums are over the
weights of all of them. 0/0 is 0: already removed.

A removed unit gives exactly zero in every draw: its rows of weights, its biases, and its entries in
the BatchNorms and depthwise convolutions that follow are zero (weight, bias and running mean).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import copy_network, network_tensors
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.posteriors.moments import Moments
from lightning_bnn.pruning.groups import Group, find_groups
from lightning_bnn.pruning.signal import check_varies, ratio
from lightning_bnn.selection import Choice, choose, normalisation

__all__ = ["Removable", "Rest", "Unit", "candidates", "find_removable", "protected_names"]

Unit = Literal["weight", "channel"]
Rest = Literal["raise", "keep", "weight"]

_SHOWN = 4


@dataclass(frozen=True)
class Removable:
    """What may be removed, with the signal-to-noise ratio of each.

    Attributes:
        weights: The ratios of single weights, by the name of their tensor.
        units: The ratio of each unit, by the name of the weight that it is a row of; where layers
            are added, that of the first.
        groups: The tensors that lose entries with the units, by the same names.
    """

    weights: dict[str, Tensor]
    units: dict[str, Tensor] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)

    @property
    def ratios(self) -> dict[str, Tensor]:
        """Of single weights and of units."""
        return {**self.weights, **self.units}

    def masks(self, net: nn.Module, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The masks of a network's tensors, from those of the ratios."""
        tensors = network_tensors(net)
        masks: dict[str, Tensor] = {}
        for name, keep in kept.items():
            if name not in self.groups:
                masks[name] = keep
                continue
            for entry, per_unit in _entries(tensors, self.groups[name]).items():
                shape = tensors[entry].shape
                rows = keep.repeat_interleave(per_unit).view(-1, *[1] * (len(shape) - 1))
                masks[entry] = rows.expand(shape).clone()
        return {name: masks[name] for name in tensors if name in masks}


def find_removable(
    posterior: WeightPosterior, unit: Unit = "weight", protect: Choice = None, rest: Rest = "raise"
) -> Removable:
    """What pruning may remove of a posterior, with the ratio of each.

    Args:
        posterior: What is to be pruned.
        unit: ``"weight"`` for single weights, or ``"channel"`` for units.
        protect: Weights to leave alone, as for :func:`candidates`. A unit also stays if something
            protected would go with it: a bias, a BatchNorm, a depthwise convolution.
        rest: For units, what to do about layers that cannot be followed: ``"raise"`` an error,
            ``"keep"`` them, or take their single weights (``"weight"``).

    Raises:
        ConfigurationError: There is nothing to remove, it does not vary, or a layer cannot be
            followed.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.posteriors import GaussianPosterior
        >>> net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1))
        >>> mean = {"0.weight": torch.tensor([[3.0, 4.0], [0.0, 0.0]])}
        >>> posterior = GaussianPosterior(net, Gaussian(0.1), mean, {"0.weight": torch.ones(2, 2)})
        >>> find_removable(posterior, "channel").units
        {'0.weight': tensor([3.5355, 0.0000], dtype=torch.float64)}
        >>> find_removable(posterior).weights
        {'0.weight': tensor([[3., 4.], [0., 0.]])}
    """
    net, varying = posterior.net, posterior.varying
    protected = protected_names(net, varying, protect)
    if unit == "weight" or rest != "keep":
        _refuse_computed(net, set(varying) - protected)
    names = candidates(net, varying, protect)
    groups: dict[str, Group] = {}
    if unit == "channel":
        groups, names = _groups(net, names, protected, rest)
    elif not names:
        raise ConfigurationError(
            f"There is nothing to prune: none of the parameters that vary, such as {varying[:3]}, "
            "is a weight with two or more axes outside of normalisation."
        )
    moments = posterior.moments()
    chosen = {name: moments.variance[name] for name in (*names, *groups)}
    check_varies(posterior, chosen, "prunable weight")
    weights = {name: ratio(moments.mean[name], moments.variance[name]) for name in names}
    units = {name: _unit_ratios(moments, group) for name, group in groups.items()}
    return Removable(weights, units, groups)


def candidates(net: nn.Module, names: Iterable[str], protect: Choice = None) -> list[str]:
    """The names of the parameters that may be pruned, in the network's own order.

    Args:
        net: The network.
        names: The parameters that vary between draws; the others are never pruned.
        protect: Weights to leave alone: a pattern of names (``"head.*"``), a submodule of ``net``,
            a function such as :func:`~lightning_bnn.selection.last_layer`, or a list, as
            :func:`~lightning_bnn.selection.select` takes them.

    Raises:
        ConfigurationError: ``protect`` matches nothing, or leaves nothing to prune.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
        >>> varying = [name for name, _ in net.named_parameters()]
        >>> candidates(net, varying), candidates(net, varying, protect="2.*")
        (['0.weight', '2.weight'], ['0.weight'])
    """
    varying, excluded = set(names), normalisation(net) | _computed(net)
    prunable = [
        name
        for name, parameter in net.named_parameters()
        if name in varying
        and parameter.ndim > 1
        and parameter.numel()
        and name not in excluded
        and not name.rpartition(".")[2].startswith("bias")  # those of attention have three axes
    ]
    protected = protected_names(net, varying, protect)
    left = [name for name in prunable if name not in protected]
    if prunable and not left:
        raise ConfigurationError(
            f"protect={protect!r} leaves nothing to prune of {prunable[:3]}. Protect fewer."
        )
    return left


def protected_names(net: nn.Module, names: Iterable[str], protect: Choice) -> set[str]:
    """The names of the parameters that a user wants to be left alone, as for :func:`candidates`.

    Example:
        >>> sorted(protected_names(nn.Linear(2, 3), ["weight"], "*"))
        ['bias', 'weight']
    """
    if protect is None:
        return set()
    if callable(protect) and not isinstance(protect, nn.Module):
        # it may ask for trainable parameters, as last_layer does; those of a posterior are frozen
        net, varying = copy_network(net), set(names)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name in varying)
    every = [name for name, _ in net.named_parameters()]
    return set(choose(net, every, protect, "protected", "parameter"))


# ------------------------------------------------------------------------------- computed weights


def _refuse_computed(net: nn.Module, prunable: set[str]) -> None:
    """Raise if a weight that would be pruned is computed from other tensors."""
    computed = sorted(_computed(net) & prunable)
    if computed:
        raise ConfigurationError(
            f"A weight is computed from {computed[0]!r}, and zeros in it are not zeros of the "
            "weight. Use torch.nn.utils.parametrize.remove_parametrizations (or "
            "remove_weight_norm, remove_spectral_norm) first, or leave the layers alone, with "
            f"protect={computed}."
        )


def _computed(net: nn.Module) -> set[str]:
    """The tensors, of two or more axes, of which weights are computed."""
    inside: set[int] = set()
    for module in net.modules():
        if parametrize.is_parametrized(module):
            inside |= {id(p) for p in module.get_submodule("parametrizations").parameters()}
        hooks = module._forward_pre_hooks.values()
        if any(isinstance(hook, (WeightNorm, SpectralNorm)) for hook in hooks):  # the older way
            inside |= {id(p) for p in module.parameters(recurse=False)}
    return {name for name, p in net.named_parameters() if id(p) in inside and p.ndim > 1}


# ------------------------------------------------------------------------------------------ units


def _groups(
    net: nn.Module, prunable: list[str], protected: set[str], rest: Rest
) -> tuple[dict[str, Group], list[str]]:
    """The groups that may lose units, and the tensors that may lose single weights instead."""
    layers = {name.rpartition(".")[0] for name in prunable}
    every = find_groups(net)
    groups: dict[str, Group] = {}
    reasons = [f"{name!r} gives the network's outputs" for name in every.outputs if name in layers]
    for group in every.removable:
        weights = [_join(layer, "weight") for layer in group.producers]
        fixed = [name for name in weights if name not in prunable]
        along = [name for name in _entries(network_tensors(net), group) if name in protected]
        if not along and not fixed:
            groups[weights[0]] = group
        elif len(fixed) < len(weights):  # a unit goes from all of its tensors, or from none
            reasons.append(
                f"{group.producers[0]!r} would take {(along or fixed)[0]!r} along, which is "
                f"protected{'' if along else ' or does not vary'}"
            )
    single = [name for name in prunable if name.rpartition(".")[0] in every.obstacles]
    obstacles = {layer: why for layer, why in every.obstacles.items() if layer in layers}
    if obstacles and rest == "raise":
        shown = "; ".join([*obstacles.values()][:_SHOWN])
        more = f"; and {len(obstacles) - _SHOWN} more" if len(obstacles) > _SHOWN else ""
        patterns = [f"{layer}.*" for layer in obstacles]
        raise ConfigurationError(
            f"The units of these layers cannot be removed: {shown}{more}. Protect them, with "
            f'protect={patterns}; or leave them as they are, with rest="keep"; or prune single '
            'weights of them, with rest="weight".'
        )
    if not groups and not (single and rest == "weight"):
        why = "; ".join([*reasons, *obstacles.values()][:_SHOWN])
        raise ConfigurationError(
            "No layer of the network has units that can be removed: "
            f"{why or 'no weight with two or more axes varies'}. Prune single weights, "
            'with unit="weight".'
        )
    return groups, single if rest == "weight" else []


def _entries(tensors: Mapping[str, Tensor], group: Group) -> dict[str, int]:
    """The tensors that lose entries with a unit of a group, and how many for each unit."""
    return {
        name: per_unit
        for layer, per_unit in group.entries.items()
        for name in (_join(layer, key) for key in ("weight", "bias", "running_mean"))
        if name in tensors
    }


def _unit_ratios(moments: Moments, group: Group) -> Tensor:
    """The ratio of each unit of a group, summed in float64."""
    names = [_join(layer, key) for layer in group.producers for key in ("weight", "bias")]
    names = [name for name in names if name in moments.mean]
    mean = torch.cat([_rows(moments.mean[name]) for name in names], dim=1)
    variance = torch.cat([_rows(moments.variance[name]) for name in names], dim=1)
    return ratio(mean.norm(dim=1), variance.sum(1))


def _rows(tensor: Tensor) -> Tensor:
    return tensor.double().reshape(len(tensor), -1)


def _join(layer: str, key: str) -> str:
    return f"{layer}.{key}" if layer else key
