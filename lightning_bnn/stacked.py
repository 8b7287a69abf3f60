"""M sets of weights, one network.

The weights carry a leading axis of length M. They run either *stacked*, as one program
(``torch.func.vmap`` over ``functional_call``), or as a *loop* over the same tensors: where an
operator has no batching rule (LSTM), or where stacking is slower (convolutions on a CPU). Both
give the same numbers to rounding. Ordinary backward works through both, and buffers with a
leading axis (BatchNorm's running statistics) are updated in place, each member its own.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_bnn.errors import ConfigurationError

__all__ = ["StackedModule", "call_network"]

Mode = Literal["auto", "stacked", "loop"]


def call_network(net: nn.Module, tensors: Mapping[str, Tensor], inputs: Any) -> Tensor:
    """Run ``net`` with ``tensors`` in place of its own parameters and buffers.

    ``inputs`` is a tensor, a tuple or list of positional arguments, or a mapping of keyword
    arguments, as the batch of a data loader gives it.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> call_network(net, {"weight": torch.ones(1, 2)}, torch.tensor([[1.0, 2.0]]))
        tensor([[3.]])
    """
    if isinstance(inputs, Mapping):
        outputs = functional_call(net, dict(tensors), (), dict(inputs))
    elif isinstance(inputs, Tensor):
        outputs = functional_call(net, dict(tensors), (inputs,))
    elif isinstance(inputs, Sequence):
        outputs = functional_call(net, dict(tensors), tuple(inputs))
    else:
        raise ConfigurationError(
            "A batch's inputs are a tensor, a list of them, or a mapping of keyword arguments; "
            f"got {type(inputs).__name__}."
        )
    if not isinstance(outputs, Tensor):
        raise ConfigurationError(
            f"The network must return one tensor; {type(net).__name__} returned "
            f"{type(outputs).__name__}. Wrap it in a module that returns the tensor which the "
            "likelihood needs (for nn.LSTM, the head's output)."
        )
    return outputs


class StackedModule:
    """Runs one network with M sets of weights.

    Args:
        net: The network; its own values serve for every name that is not passed.
        mode: ``"stacked"``, ``"loop"``, or ``"auto"``: measure both on the first call and keep
            the faster one.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> weights = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])      # two members
        >>> StackedModule(net)({"weight": weights}, torch.tensor([[3.0, 4.0]])).flatten()
        tensor([3., 4.])
    """

    def __init__(self, net: nn.Module, mode: Mode = "auto") -> None:
        if mode not in ("auto", "stacked", "loop"):
            raise ConfigurationError(f"mode= is 'auto', 'stacked' or 'loop'; got {mode!r}.")
        self.net = net
        self.mode: Mode = mode

    def __call__(
        self,
        stacked: Mapping[str, Tensor],
        inputs: Any,
        shared: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The outputs of all members, (M, batch, ...).

        Args:
            stacked: Parameters and buffers with a leading axis of length M.
            inputs: One batch, which every member sees.
            shared: Parameters and buffers that all members have in common.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in stacked.items()}
        lengths = {shape[:1] for shape in shapes.values()}
        if len(lengths) != 1 or lengths & {(), (0,)}:
            raise ConfigurationError(
                "Stacked tensors need one common leading axis, the number of members; got the "
                f"shapes {shapes}."
            )
        shared = shared or {}
        if self.mode == "auto" and lengths != {(1,)}:
            self.mode = self._faster(stacked, inputs, shared)
        if self.mode == "stacked":
            return self._stacked(stacked, inputs, shared)
        return self._loop(stacked, inputs, shared)

    def _stacked(
        self, stacked: Mapping[str, Tensor], inputs: Any, shared: Mapping[str, Tensor]
    ) -> Tensor:
        def member(weights: dict[str, Tensor]) -> Tensor:
            return call_network(self.net, {**shared, **weights}, inputs)

        with warnings.catch_warnings(), _attention_that_stacks(stacked):
            # a missing batching rule falls back to a slow loop inside vmap: take ours instead
            warnings.filterwarnings("error", message=".*batching rule.*")
            try:
                return vmap(member, randomness="different")(dict(stacked))
            except (RuntimeError, UserWarning) as error:
                text = str(error)
                if "batching rule" not in text.lower() and "vmap" not in text:
                    raise
                raise ConfigurationError(
                    f"{type(self.net).__name__} cannot run stacked: {text.splitlines()[0]} "
                    "Use mode='loop' or 'auto'."
                ) from error

    def _loop(
        self, stacked: Mapping[str, Tensor], inputs: Any, shared: Mapping[str, Tensor]
    ) -> Tensor:
        count = next(iter(stacked.values())).shape[0]
        return torch.stack(
            [
                call_network(
                    self.net, {**shared, **{k: v[index] for k, v in stacked.items()}}, inputs
                )
                for index in range(count)
            ]
        )

    def _faster(
        self, stacked: Mapping[str, Tensor], inputs: Any, shared: Mapping[str, Tensor]
    ) -> Literal["stacked", "loop"]:
        """Time both ways, with copies of all buffers, so that the trial leaves no trace.

        Where gradients are wanted, the backward pass is timed too.
        """
        buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers()}
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in stacked.values())

        def copy(name: str, tensor: Tensor) -> Tensor:
            if name in buffers:
                return tensor.clone()
            return tensor.detach().requires_grad_(wanted and tensor.requires_grad)

        trial = {name: copy(name, tensor) for name, tensor in stacked.items()}
        common = {**buffers, **{name: copy(name, tensor) for name, tensor in shared.items()}}
        leaves = [tensor for tensor in trial.values() if tensor.requires_grad]

        def run(way: Callable[..., Tensor]) -> None:
            outputs = way(trial, inputs, common)
            if leaves and outputs.requires_grad:
                torch.autograd.grad(outputs.sum(), leaves, allow_unused=True)

        with torch.set_grad_enabled(wanted), _untouched_rng():
            try:
                by_stacking = _seconds(lambda: run(self._stacked))
            except Exception:
                # no batching rule, control flow that depends on values, too little memory. If
                # the network itself is at fault, the loop raises the network's own error.
                return "loop"
            by_looping = _seconds(lambda: run(self._loop))
        return "stacked" if by_stacking < by_looping else "loop"


@contextmanager
def _attention_that_stacks(stacked: Mapping[str, Tensor]) -> Iterator[None]:
    """Keep attention from kernels that have no batching rule: the plain ones have.

    These are the transformer layers' shortcut for inference and, on a CPU, fused attention.
    """
    on_cpu = next(iter(stacked.values())).device.type == "cpu"
    shortcut = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(shortcut)


def _seconds(run: Any) -> float:
    """The best of some runs after one to warm up, with the device's queue emptied.

    Quick ones are run more often: the more they differ by chance.
    """
    times: list[float] = []
    while len(times) < 3 or (len(times) < 20 and sum(times) < 0.05):
        _synchronise()
        start = time.perf_counter()
        run()
        _synchronise()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _synchronise() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _untouched_rng() -> Any:
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))
