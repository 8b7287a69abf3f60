"""Run a network with other tensors in the place of its own parameters and buffers.

The same as :func:`torch.func.functional_call`, which looks through the whole network in each call
and costs more than a small network itself. Here the places of all tensors are found once and kept
for as long as the network has the same modules and tensors. A weight that several layers share
(tied weights) is exchanged in all of them. A buffer that the network replaces instead of changing
it in place is written into the given tensor all the same.

Threads do not meet: while one runs a network, another gets a spare, a copy of its modules around
the same tensors (:func:`exclusive`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.network import copy_network

__all__ = ["call_with", "exclusive"]

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
        self.lock = threading.RLock()  # of the thread that runs the network
        self.depth = 0  # how often that thread is within call_with
        self._spares: list[nn.Module] = []

    def belong_to(self, net: nn.Module) -> bool:
        """Whether these are the network's: a shallow copy, as for data parallelism, has others."""
        return self._seen[0][0] is net._modules

    def hold(self) -> bool:
        """Whether the network still has the same modules, parameters and buffers.

        While tensors are exchanged, it has others in the same places.
        """
        if self.depth:
            return True
        for now, before in self._seen:
            if len(now) != len(before):
                return False
            for key, value in before.items():
                if now.get(key) is not value:
                    return False
        return True

    def spare(self, net: nn.Module) -> nn.Module:
        """A copy of the modules around the same tensors, for a thread that finds the network busy.

        It is to be given back.
        """
        try:
            spare = self._spares.pop()
        except IndexError:
            with self.lock:  # nobody runs the network now, so that its tensors are its own
                held = (value for _, kept in self._seen for value in kept.values())
                spare = copy_network(net, [value for value in held if isinstance(value, Tensor)])
        for module, own in zip(spare.modules(), net.modules(), strict=True):
            module.training = own.training
        return spare

    def give_back(self, spare: nn.Module) -> None:
        """Keep a spare for the next thread that needs one."""
        self._spares.append(spare)

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing: a copied or pickled network has tensors of its own."""
        return type(None), ()


_finding = threading.Lock()


def _acquire(net: nn.Module) -> tuple[_Places, bool]:
    """Where the network has its tensors, and whether this thread may exchange them now."""
    with _finding:  # so that who finds it busy knows that it was looked at before
        places: _Places | None = net.__dict__.get(_KEPT_AS)
        if places is not None and places.belong_to(net):
            if not places.lock.acquire(blocking=False):
                return places, False
            if places.hold():
                return places, True
            places.lock.release()  # the network was changed since
        places = net.__dict__[_KEPT_AS] = _Places(net)
        places.lock.acquire()
        return places, True


@contextmanager
def exclusive(net: nn.Module) -> Iterator[nn.Module]:
    """A network that no other thread runs: itself, or a spare with the same tensors."""
    places, mine = _acquire(net)
    own = net if mine else places.spare(net)
    try:
        yield own
    finally:
        if mine:
            places.lock.release()
        else:
            places.give_back(own)


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
    places, mine = _acquire(net)
    if not mine:
        spare = places.spare(net)
        try:
            return call_with(spare, tensors, arguments, keywords)
        finally:
            places.give_back(spare)
    own: list[tuple[dict[str, Any], str, Any, Tensor]] = []
    places.depth += 1
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
        for owner, key, before, _ in reversed(own):
            owner[key] = before
        places.depth -= 1
        places.lock.release()


def _keep(replaced: Any, given: Tensor) -> None:
    """Write what the network put in the place of a given tensor into that tensor.

    What has another shape is no running value but something that is computed again when needed.
    """
    if isinstance(replaced, Tensor) and replaced.shape == given.shape:
        with torch.no_grad():
            given.copy_(replaced)
