"""Many draws of the last layers on one pass of the rest.

Where only the last part of a network is Bayesian (a last layer on a deep body), the outputs of all
that comes before it are the same for every draw. They are computed once for a batch: the *head*,
the smallest module that holds everything that varies, is then run with the stacked weights on what
the body gave it. This is done only where a pass shows that it is right:

- the head is called once, and what it returns is returned by the network as it is;
- nothing else looks at the weights that vary, also where they are tied to others;
- no random numbers are drawn on the way, and the head leaves its inputs as they are.

In that pass the weights that vary, and what the head returns, are tensors that raise at any use. So
whatever else a network does with them is noticed, and it runs as a whole for every draw.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.exchange import exclusive
from lightning_bnn.stacked import StackedModule, call_network

__all__ = ["SharedPart"]

# Looking at these says nothing about values: networks ask a weight for its dtype and device.
_HARMLESS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")),
    *(Tensor.size, Tensor.dim, Tensor.is_floating_point),
}


class _Touched(Exception):
    """The network does something else with what varies than to call the head."""


class _Untouchable(Tensor):
    """A tensor that has a shape, but whose values nobody may use."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _HARMLESS:
            raise _Touched
        return super().__torch_function__(func, types, args, dict(kwargs or {}))


class SharedPart:
    """Runs draws of a network's weights, what all of them share only once for a batch.

    Args:
        stacked: Runs the network, or its head, with several sets of weights.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))
        >>> fixed = {"0.weight": torch.zeros(3, 2), "0.bias": torch.full((3,), 99.0)}
        >>> draws = {"2.weight": torch.tensor([[[1.0, 1.0, 1.0]], [[2.0, 2.0, 2.0]]])}
        >>> run = SharedPart(StackedModule(net))
        >>> run.outputs([draws], torch.zeros(1, 2), fixed).flatten()  # tanh(99) is 1
        tensor([3., 6.])
    """

    def __init__(self, stacked: StackedModule) -> None:
        self._whole = stacked
        self._buffers = {name for name, _ in stacked.net.named_buffers()}
        # the name of the head: not yet looked for, or empty if there is none
        self._prefix: str | None = None
        # until it is known how the network runs, one thread at a time
        self._first = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedPart, (self._whole,)

    def outputs(
        self,
        chunks: Iterable[Mapping[str, Tensor]],
        inputs: Any,
        shared: Mapping[str, Tensor],
        single: bool = False,
    ) -> Tensor:
        """The outputs of all draws, (draws, batch, ...).

        Args:
            chunks: Sets of weights with a leading axis of draws.
            inputs: One batch.
            shared: The parameters and buffers that all draws have in common.
            single: Whether it is one draw, with which there is nothing to measure.
        """
        known = (single or self._whole.mode != "auto") and self._prefix is not None
        with nullcontext() if known else self._first, exclusive(self._whole.net) as net:
            mine = net is self._whole.net
            whole = self._whole if mine else StackedModule(net, self._whole.mode)
            outputs: list[Tensor] = []
            run: Callable[[Mapping[str, Tensor]], Tensor] | None = None
            shared = self._copied(shared)
            for weights in chunks:
                weights = self._copied(weights)
                if run is None:
                    run, first = self._choose(whole, weights, inputs, shared)
                    outputs.append(first)
                else:
                    outputs.append(run(weights))
                del weights  # before the next are made
            if self._whole.mode == "auto":
                self._whole.mode = whole.mode
        return torch.cat(outputs)

    def _copied(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """With copies of buffers, which a network may change when it is run."""
        if self._buffers.isdisjoint(tensors):
            return tensors
        return {k: t.clone() if k in self._buffers else t for k, t in tensors.items()}

    def _choose(
        self,
        whole: StackedModule,
        weights: Mapping[str, Tensor],
        inputs: Any,
        shared: Mapping[str, Tensor],
    ) -> tuple[Callable[[Mapping[str, Tensor]], Tensor], Tensor]:
        """How this batch is run, and the outputs of its first draws."""

        def run_whole(weights: Mapping[str, Tensor]) -> Tensor:
            return whole(weights, inputs, shared)

        if self._prefix is None:
            self._prefix = _head_of(weights) if shared else ""
        prefix = self._prefix
        if not prefix:
            return run_whole, run_whole(weights)
        features = _features(whole.net, prefix, weights, inputs, shared)
        if features is not None:
            head = StackedModule(whole.net.get_submodule(prefix), whole.mode)
            within = _within(prefix, shared)

            def run_head(weights: Mapping[str, Tensor]) -> Tensor:
                return head(_within(prefix, weights), features, within)

            before = [leaf.clone() for leaf in tree_leaves(features) if isinstance(leaf, Tensor)]
            try:
                outputs = run_head(weights)
            except ConfigurationError:  # it changes its inputs, or returns something else
                outputs = None
            after = [leaf for leaf in tree_leaves(features) if isinstance(leaf, Tensor)]
            if outputs is not None and all(map(torch.equal, before, after)):
                whole.mode = head.mode
                return run_head, outputs
        self._prefix = ""  # for good: it would be found out again with each batch
        return run_whole, run_whole(weights)


def _within(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a module, by their names in it."""
    start = f"{prefix}."
    return {name[len(start) :]: t for name, t in tensors.items() if name.startswith(start)}


def _head_of(varying: Iterable[str]) -> str:
    """The name of the smallest module that holds all of these; empty for the network itself."""
    paths = [name.split(".")[:-1] for name in varying]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return ".".join(parts[0] for parts in common)


def _features(
    net: nn.Module,
    prefix: str,
    weights: Mapping[str, Tensor],
    inputs: Any,
    shared: Mapping[str, Tensor],
) -> Any:
    """What the head gets as its inputs, or None if it is not the last that happens."""
    guarded = {name: tensor[0].as_subclass(_Untouchable) for name, tensor in weights.items()}
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    result = torch.empty(0).as_subclass(_Untouchable)

    def record(*arguments: Any, **keywords: Any) -> Tensor:
        calls.append((arguments, keywords))
        return result

    with _NoRandomNumbers(), _forward(net.get_submodule(prefix), record):
        try:
            outputs = call_network(net, {**shared, **guarded}, inputs)
        except Exception:  # of a network's own code: any. Run as a whole, it raises its own.
            return None
    if outputs is not result or len(calls) != 1 or _is_kept_on(net):
        return None
    arguments, keywords = calls[0]
    if arguments and keywords:
        return None
    return keywords or (arguments[0] if len(arguments) == 1 else arguments)


class _NoRandomNumbers(TorchDispatchMode):
    """Raises before a random number is drawn, in this thread."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _Touched
        return func(*args, **(kwargs or {}))


def _is_kept_on(net: nn.Module) -> bool:
    """Whether a module has kept what the head returned, to be looked at later."""
    kept = (value for module in net.modules() for value in vars(module).values())
    return any(isinstance(value, _Untouchable) for value in kept)


@contextmanager
def _forward(module: nn.Module, function: Callable[..., Tensor]) -> Iterator[None]:
    """Put a function in the place of a module's ``forward``."""
    before = vars(module).get("forward")
    vars(module)["forward"] = function
    try:
        yield
    finally:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before
