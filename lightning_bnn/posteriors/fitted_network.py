"""The network of a compact posterior, made from the one that it was pruned from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_bnn.errors import ConfigurationError, PosteriorFormatError

__all__ = ["fitted_network"]

Description = Sequence[Sequence[Any]]


def fitted_network(
    net: nn.Module,
    own: Description,
    stored: Description,
    where: str,
    original: Description | None = None,
) -> nn.Module:
    """The network with the sizes of a compact posterior, if it is the one that was made smaller.

    Any other network, also one that has these sizes already, comes back as it is: the reader
    compares it with the posterior anyway.

    Args:
        net: The original network, or the small one.
        own: The name and the shape of each of its tensors, in order.
        stored: The same of the posterior.
        where: How to name the posterior in errors.
        original: The same of the network that the posterior was pruned from. Early versions did
            not keep it; then any network that is nowhere smaller is taken for it.

    Raises:
        PosteriorFormatError: The network has layers that cannot be made smaller.

    Example:
        >>> net = nn.Linear(2, 3)
        >>> own = [["weight", [3, 2]], ["bias", [3]]]
        >>> fitted_network(net, own, own, "here") is net
        True
    """
    shapes = {name: tuple(shape) for name, shape in stored}
    given = {name: tuple(shape) for name, shape in own}
    if list(shapes) != list(given) or shapes == given:
        return net
    if original is not None and given != {name: tuple(shape) for name, shape in original}:
        return net
    if not all(_fits(shapes[name], shape) for name, shape in given.items()):
        return net
    from lightning_bnn.pruning.resize import resized

    try:
        return resized(net, shapes)
    except ConfigurationError as error:
        raise PosteriorFormatError(
            f"The posterior in {where} is a compact one, and the given network cannot be brought "
            f"to its sizes: {error} Pass the network that it was pruned from, or the small one."
        ) from error


def _fits(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    """Whether one shape is a part of the other."""
    return len(small) == len(large) and all(a <= b for a, b in zip(small, large, strict=True))
