"""Which parameters pruning may touch.

Weights with two or more axes: those of linear and convolutional layers, embeddings, attention and
recurrent layers. Biases and normalisation stay: they are few, each moves a whole unit, and their
size says little about their worth. Tensors from which a weight is only computed (a
parametrisation, such as weight normalisation) are no weights: with zeros in them the weight is
another one, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.selection import Choice, choose, normalisation

__all__ = ["candidates", "protected_names", "refuse_computed"]


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
    varying, excluded = set(names), normalisation(net) | set(_computed(net))
    found = [
        name
        for name, parameter in net.named_parameters()
        if name in varying
        and parameter.ndim > 1
        and parameter.numel()
        and name not in excluded
        and not name.rpartition(".")[2].startswith("bias")  # those of attention have three axes
    ]
    protected = protected_names(net, varying, protect)
    left = [name for name in found if name not in protected]
    if found and not left:
        raise ConfigurationError(
            f"protect={protect!r} leaves nothing to prune: it takes all of the {len(found)} "
            f"tensors that may be pruned, which begin with {found[:3]}. Protect fewer."
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
    own = [name for name, _ in net.named_parameters()]
    with _as_trainable(net, set(names)):
        return set(choose(net, own, protect, "protected", "parameter"))


def refuse_computed(net: nn.Module, names: Iterable[str], protect: Choice = None) -> None:
    """Raise if a weight that would be pruned is computed from other tensors.

    Args:
        net: The network.
        names: The parameters that vary between draws.
        protect: Weights to leave alone, as for :func:`candidates`.

    Raises:
        ConfigurationError: One is, and is not protected.

    Example:
        >>> from torch.nn.utils.parametrizations import weight_norm
        >>> refuse_computed(nn.Sequential(weight_norm(nn.Linear(2, 1))), [])
    """
    varying, own = set(names), dict(net.named_parameters())
    computed = {
        name: layer
        for name, layer in _computed(net).items()
        if name in varying and own[name].ndim > 1
    }
    if computed:
        protected = protected_names(net, varying, protect)
        computed = {name: layer for name, layer in computed.items() if name not in protected}
    if computed:
        layers = list(dict.fromkeys(computed.values()))
        patterns = [f"{layer}.*" if layer else "*" for layer in layers]
        raise ConfigurationError(
            f"The weights of {', '.join(map(repr, layers))} are computed from other tensors, such "
            f"as {next(iter(computed))!r} (a parametrisation: weight or spectral normalisation, or "
            "one of your own). Zeros in these are not zeros of the weights. Train without it; or "
            "make the weights plain ones first, with torch.nn.utils.parametrize."
            "remove_parametrizations (or remove_weight_norm, remove_spectral_norm); or leave these "
            f"layers alone, with protect={patterns}."
        )


def _computed(net: nn.Module) -> dict[str, str]:
    """The parameters from which weights are computed, each with the name of the layer."""
    layers: dict[int, str] = {}
    for layer, module in net.named_modules():
        if parametrize.is_parametrized(module):
            originals = module.parametrizations.parameters()
            layers |= {id(parameter): layer for parameter in originals}
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, (WeightNorm, SpectralNorm)):  # before there were parametrisations
                for ending in ("_g", "_v", "_orig"):
                    parameter = module._parameters.get(f"{hook.name}{ending}")
                    layers |= {} if parameter is None else {id(parameter): layer}
    return {name: layers[id(p)] for name, p in net.named_parameters() if id(p) in layers}


@contextmanager
def _as_trainable(net: nn.Module, names: set[str]) -> Iterator[None]:
    """Let the parameters that vary look trainable: the network of a posterior is frozen.

    A function that chooses, such as ``last_layer``, asks for trainable parameters.
    """
    frozen = [p for name, p in net.named_parameters() if name in names and not p.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
