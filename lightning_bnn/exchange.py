"""Run a network with other tensors in the place of its own parameters and buffers.

The same as :func:`torch.func.functional_call`, which looks through the whole network in each call
and costs more than a small network itself. Here the places of all tensors are found once and kept
for as long as the network has the same modules and tensors. A weight that several layers share
(tied weights) is exchanged in all of them. A buffer that the network replaces instead of changing
it in place is written into the given tensor all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["call_with"]

Place = tuple[dict[str, Any], str]


# The places are kept on the network itself: they live as long as it does, and no longer.
_KEPT_AS = "_lightning_bnn_places"


class _Places:
    """Where a network keeps its tensors, by name, and what it had when that was found."""

    def __init__(self, net: nn.Module) -> None:
        places: dict[str, Place] = {}
        self._seen: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for prefix, module in net.named_modules(remove_duplicate=False):
            self._seen.append((module._modules, dict(module._modules)))
            for owner in (module._parameters, module._buffers):
                self._seen.append((owner, dict(owner)))
                for key, tensor in owner.items():
                    if tensor is not None:
                        places[f"{prefix}.{key}" if prefix else key] = (owner, key)
        same: dict[int, list[Place]] = {}
        for owner, key in places.values():
            same.setdefault(id(owner[key]), []).append((owner, key))
        self.of = {name: same[id(owner[key])] for name, (owner, key) in places.items()}
        self.in_use = 0

    def hold(self, net: nn.Module) -> bool:
        """Whether the network still has the same modules, parameters and buffers.

        While tensors are exchanged, it has others in the same places.
        """
        if self._seen[0][0] is not net._modules:
            return False  # a shallow copy, as data parallelism makes them, took this over
        if self.in_use:
            return True
        for now, before in self._seen:
            if len(now) != len(before):
                return False
            for key, value in before.items():
                if now.get(key) is not value:
                    return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing: a copied or pickled network has tensors of its own."""
        return type(None), ()


def _places(net: nn.Module) -> _Places:
    places: _Places | None = net.__dict__.get(_KEPT_AS)
    if places is None or not places.hold(net):
        places = net.__dict__[_KEPT_AS] = _Places(net)
    return places


def call_with(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    arguments: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
) -> Any:
    """What the network gives with ``tensors`` in place of its own; it is left as it was.

    Names that the network does not have are passed over. Buffers that it updates are updated in
    ``tensors``.

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
    places = _places(net)
    own: list[tuple[dict[str, Any], str, Any, Tensor]] = []
    places.in_use += 1
    try:
        for name, tensor in tensors.items():
            for owner, key in places.of.get(name, ()):
                own.append((owner, key, owner[key], tensor))
                owner[key] = tensor
        outputs = net(*arguments, **(keywords or {}))
        for owner, key, _, tensor in own:
            if owner.get(key) is not tensor:
                _keep(owner.get(key), tensor)
        return outputs
    finally:
        places.in_use -= 1
        for owner, key, before, _ in reversed(own):
            owner[key] = before


def _keep(replaced: Any, given: Tensor) -> None:
    """Write what the network put in the place of a given tensor into that tensor.

    What has another shape is no running value but something that is computed again when needed.
    """
    if isinstance(replaced, Tensor) and replaced.shape == given.shape:
        with torch.no_grad():
            given.copy_(replaced)
