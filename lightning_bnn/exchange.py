"""Run a network with other tensors in the place of its own parameters and buffers.

The same as :func:`torch.func.functional_call`, which looks through the whole network in each call
and costs more than a small network itself. Here the places of all tensors are found once and kept
for as long as the network has the same modules. A weight that several layers share (tied weights)
is exchanged in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

__all__ = ["call_with"]

Place = tuple[dict[str, Any], str]


class _Places:
    """Where a network keeps its tensors, by name, and the modules it had when that was found."""

    def __init__(self, net: nn.Module) -> None:
        places: dict[str, Place] = {}
        self._children: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for prefix, module in net.named_modules(remove_duplicate=False):
            self._children.append((module._modules, dict(module._modules)))
            for owner in (module._parameters, module._buffers):
                for key, tensor in owner.items():
                    if tensor is not None:
                        places[f"{prefix}.{key}" if prefix else key] = (owner, key)
        same: dict[int, list[Place]] = {}
        for owner, key in places.values():
            same.setdefault(id(owner[key]), []).append((owner, key))
        self.of = {name: same[id(owner[key])] for name, (owner, key) in places.items()}

    def hold(self) -> bool:
        """Whether the network still has the same modules."""
        return all(
            len(now) == len(before) and all(now.get(k) is child for k, child in before.items())
            for now, before in self._children
        )


_KNOWN: WeakKeyDictionary[nn.Module, _Places] = WeakKeyDictionary()


def _places(net: nn.Module) -> _Places:
    places = _KNOWN.get(net)
    if places is None or not places.hold():
        places = _KNOWN[net] = _Places(net)
    return places


def call_with(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
) -> Any:
    """What the network gives with ``tensors`` in place of its own; it is left as it was.

    Names that the network does not have are passed over.

    Args:
        net: The network.
        tensors: Parameters and buffers, by name; a tied weight goes by any of its names.
        arguments: Positional arguments of the network.
        keywords: Keyword arguments of the network.

    Example:
        >>> import torch
        >>> net = nn.Linear(2, 1, bias=False)
        >>> call_with(net, {"weight": torch.ones(1, 2)}, [torch.tensor([[1.0, 2.0]])])
        tensor([[3.]])
    """
    found = _places(net).of
    own: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, tensor in tensors.items():
            for owner, key in found.get(name, ()):
                own.append((owner, key, owner[key]))
                owner[key] = tensor
        return net(*arguments, **(keywords or {}))
    finally:
        for owner, key, before in reversed(own):
            owner[key] = before
