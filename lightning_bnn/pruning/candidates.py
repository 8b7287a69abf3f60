"""Which parameters pruning may touch.

Weights with two or more axes: those of linear and convolutional layers, embeddings, attention and
recurrent layers. Biases and normalisation stay: they are few, each moves a whole unit, and their
size says little about their worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.selection import Choice, choose, normalisation

__all__ = ["candidates"]


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
    own, varying, normalised = dict(net.named_parameters()), set(names), normalisation(net)
    found = [
        name
        for name, parameter in own.items()
        if name in varying
        and parameter.ndim > 1
        and parameter.numel()
        and name not in normalised
        and not name.rpartition(".")[2].startswith("bias")  # those of attention have three axes
    ]
    if protect is None:
        return found
    with _as_trainable(net, varying):
        protected = set(choose(net, list(own), protect, "protected", "parameter"))
    left = [name for name in found if name not in protected]
    if found and not left:
        raise ConfigurationError(
            f"protect={protect!r} leaves nothing to prune: it takes all of the {len(found)} "
            f"tensors that may be pruned, which begin with {found[:3]}. Protect fewer."
        )
    return left


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
