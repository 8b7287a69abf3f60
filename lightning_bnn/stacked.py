"""M sets of weights, one network.

The weights carry a leading axis of length M. They run either *stacked*, as one program
(``torch.func.vmap``; for a plain perceptron
:mod:`~lightning_bnn.stacked_layers`), or as a *loop* over the same tensors: where an operator has
no batching rule (LSTM), or where stacking is slower (convolutions on a CPU). Both give the same
numbers to rounding. Ordinary backward works through both, and buffers with a leading axis
(BatchNorm's running statistics) are updated in place, each member its own.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from lightning_bnn.checks import check_option
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.exchange import call_with
from lightning_bnn.lightning import rank_zero_debug, rank_zero_info
from lightning_bnn.stacked_layers import plain_layers, run_layers

__all__ = ["StackedModule", "batching", "call_network", "with_output"]

Mode = Literal["auto", "stacked", "loop"]

_NODES = 20_000  # of a graph that are looked at: enough for hundreds of layers


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
        outputs = call_with(net, tensors, (), inputs)
    elif isinstance(inputs, Tensor):
        outputs = call_with(net, tensors, (inputs,))
    elif isinstance(inputs, Sequence):
        outputs = call_with(net, tensors, inputs)
    else:
        raise ConfigurationError(
            "A batch's inputs are a tensor, a list of them, or a mapping of keyword arguments; "
            f"got {type(inputs).__name__}."
        )
    if not isinstance(outputs, Tensor):
        logits = getattr(outputs, "logits", None)  # as models of transformers have it
        if isinstance(logits, Tensor):
            return logits
        raise ConfigurationError(
            f"The network must return one tensor; {type(net).__name__} returned "
            f"{type(outputs).__name__}. Name the part that the likelihood needs with output=, such "
            "as output=0 for the first of a tuple, or call with_output(net, 0)."
        )
    return outputs


class _Part:
    """A forward hook that gives a part of what a network returns."""

    def __init__(self, output: Callable[[Any], Tensor] | str | int) -> None:
        self.output = output

    def __call__(self, net: nn.Module, arguments: Any, outputs: Any) -> Any:
        if callable(self.output):
            return self.output(outputs)
        try:
            if isinstance(self.output, str) and not isinstance(outputs, Mapping):
                return getattr(outputs, self.output)
            return outputs[self.output]
        except (AttributeError, LookupError, TypeError):
            kind = list(outputs) if isinstance(outputs, Mapping) else type(outputs).__name__
            raise ConfigurationError(
                f"output={self.output!r} names no part of what {type(net).__name__} returns: "
                f"{kind}."
            ) from None


def with_output(net: nn.Module, output: Callable[[Any], Tensor] | str | int) -> nn.Module:
    """The network itself, which from now on returns only a part of what it returned.

    Args:
        net: A network that returns a tuple, a mapping or an object with several tensors.
        output: A place, a key or an attribute; or a function of what the network returns.

    Example:
        >>> net = with_output(nn.LSTM(2, 3), 0)
        >>> net(torch.zeros(5, 2)).shape
        torch.Size([5, 3])
    """
    net.register_forward_hook(_Part(output))
    return net


class StackedModule:
    """Runs one network with M sets of weights.

    Args:
        net: The network; its own values serve for every name that is not passed.
        mode: ``"stacked"``, ``"loop"``, or ``"auto"``: measure both on the first call, keep the
            faster one and say so in the log.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> weights = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])      # two members
        >>> StackedModule(net)({"weight": weights}, torch.tensor([[3.0, 4.0]])).flatten()
        tensor([3., 4.])
    """

    def __init__(self, net: nn.Module, mode: Mode = "auto") -> None:
        check_option("mode", mode, ("auto", "stacked", "loop"))
        self.net = net
        self.mode: Mode = mode
        self._looked_at_graph = False
        self._measuring = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return StackedModule, (self.net, self.mode)

    def __call__(
        self,
        stacked: Mapping[str, Tensor],
        inputs: Any,
        shared: Mapping[str, Tensor] | None = None,
        own_inputs: bool = False,
    ) -> Tensor:
        """The outputs of all members, (M, batch, ...).

        Args:
            stacked: Parameters and buffers with a leading axis of length M.
            inputs: One batch, which every member sees.
            shared: Parameters and buffers that all members have in common.
            own_inputs: Whether each member has inputs of its own: every tensor of ``inputs`` then
                has a leading axis of length M, too.
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
            with self._measuring:
                if self.mode == "auto":  # no other thread has measured it meanwhile
                    self.mode = self._faster(stacked, inputs, shared, own_inputs)
        way = self._stacked if self.mode == "stacked" else self._loop
        before = _versions(inputs)
        outputs = way(stacked, inputs, shared, own_inputs)
        self._refuse_changes(before)
        self._look_at_graph(outputs)
        return outputs

    def single(self, weights: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """The outputs of one member, (batch, ...), from weights without an axis of members.

        It saves the copies that stacking and unstacking make.
        """
        outputs = call_network(self.net, weights, inputs)
        self._look_at_graph(outputs)
        return outputs

    def _look_at_graph(self, outputs: Tensor) -> None:
        if outputs.grad_fn is not None and not self._looked_at_graph:
            self._looked_at_graph = True
            _refuse_checkpointing(self.net, outputs)

    def _stacked(
        self,
        stacked: Mapping[str, Tensor],
        inputs: Any,
        shared: Mapping[str, Tensor],
        own_inputs: bool,
    ) -> Tensor:
        layers = plain_layers(self.net, stacked) if isinstance(inputs, Tensor) else None
        if layers is not None:
            return run_layers(layers, stacked, inputs, own_inputs)

        def member(weights: dict[str, Tensor], inputs: Any) -> Tensor:
            return call_network(self.net, {**shared, **weights}, inputs)

        along = (0, 0 if own_inputs else None)
        on_cpu = next(iter(stacked.values())).device.type == "cpu"
        with batching(on_cpu):
            try:
                return vmap(member, along, randomness="different")(dict(stacked), inputs)
            except (RuntimeError, UserWarning) as error:
                text = str(error)
                if "batching rule" not in text.lower() and "vmap" not in text:
                    raise
                raise ConfigurationError(
                    f"{type(self.net).__name__} cannot run stacked: {text.splitlines()[0]} "
                    "Use mode='loop' or 'auto'."
                ) from error

    def _loop(
        self,
        stacked: Mapping[str, Tensor],
        inputs: Any,
        shared: Mapping[str, Tensor],
        own_inputs: bool,
    ) -> Tensor:
        # unbind, not tensor[index]: the backward of an index fills the whole stack with zeros
        rows = zip(*(tensor.unbind() for tensor in stacked.values()), strict=True)
        outputs = []
        for index, row in enumerate(rows):
            weights = dict(zip(stacked, row, strict=True))
            own = tree_map(lambda t, index=index: t[index], inputs) if own_inputs else inputs
            outputs.append(call_network(self.net, {**shared, **weights}, own))
        return torch.stack(outputs)

    def _refuse_changes(self, before: list[tuple[Tensor, int]]) -> None:
        if any(tensor._version != version for tensor, version in before):
            raise ConfigurationError(
                f"{type(self.net).__name__} changes its inputs in place, and all members share "
                "them. Write x = x - m instead of x -= m, or take inplace=True from the first "
                "layer."
            )

    def _faster(
        self,
        stacked: Mapping[str, Tensor],
        inputs: Any,
        shared: Mapping[str, Tensor],
        own_inputs: bool,
    ) -> Literal["stacked", "loop"]:
        """Time both ways, with copies of all buffers, so that the trial leaves no trace.

        Where gradients are wanted, the backward pass is timed too. What a training will do is
        said for all to see; for predictions, of which there are many, only to who looks closer.
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
        before = _versions(inputs)

        def run(way: Callable[..., Tensor]) -> None:
            outputs = way(trial, inputs, common, own_inputs)
            if leaves and outputs.requires_grad:
                torch.autograd.grad(outputs.sum(), leaves, allow_unused=True)

        def say(how: str) -> None:
            count = next(iter(stacked.values())).shape[0]
            log = rank_zero_info if wanted else rank_zero_debug
            log(f"{count} sets of weights of {type(self.net).__name__} run {how}.")

        with torch.set_grad_enabled(wanted), _untouched_rng():
            try:
                run(self._stacked)
            except Exception as error:
                # no batching rule, control flow that depends on values, too little memory. If
                # the network itself is at fault, the loop raises the network's own error.
                reason = str(error.__cause__ or error) or type(error).__name__
                say(f"as a loop, because stacked they fail: {reason.split('. ')[0]:.120}")
                return "loop"
            self._refuse_changes(before)
            by_stacking, by_looping = _seconds(lambda: run(self._stacked), lambda: run(self._loop))
        stacked_ms, loop_ms = 1e3 * by_stacking, 1e3 * by_looping
        if by_stacking < by_looping:
            say(f"stacked: {stacked_ms:.2f} ms a pass, {loop_ms:.2f} ms as a loop")
            return "stacked"
        say(f"as a loop: {loop_ms:.2f} ms a pass, {stacked_ms:.2f} ms stacked")
        return "loop"


def _versions(inputs: Any) -> list[tuple[Tensor, int]]:
    """Every tensor of the inputs, and how often it was changed in place; if it counts that."""
    leaves = tree_leaves(dict(inputs) if isinstance(inputs, Mapping) else inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
    return [(tensor, tensor._version) for tensor in tensors]


def _refuse_checkpointing(net: nn.Module, outputs: Tensor) -> None:
    """Refuse gradient checkpointing, which runs parts of the network again in the backward pass.

    By then the network has its own weights back, and the members' would get no gradient.
    """
    waiting = [outputs.grad_fn]
    seen: set[Any] = set()
    while waiting and len(seen) < _NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            raise ConfigurationError(
                f"{type(net).__name__} uses gradient checkpointing, which computes parts of it "
                "again in the backward pass, then with other weights. Switch it off; chunk= "
                "bounds the memory that members take."
            )
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)


class _ForAllThreads:
    """Settings of the process, made by the first thread that needs them and undone by the last.

    Args:
        make: Makes the settings and leaves in a stack how they are undone.
    """

    def __init__(self, make: Callable[[ExitStack], None]) -> None:
        self._make, self._undo = make, ExitStack()
        self._lock, self._users = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._make(self._undo)
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._undo.close()


def _refuse_slow_batching(undo: ExitStack) -> None:
    """Make an error of a missing batching rule, for which vmap has a slow loop: ours is faster.

    The transformer layers' shortcut for inference has none.
    """
    undo.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("error", message=".*batching rule.*")
    shortcut = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    undo.callback(torch.backends.mha.set_fastpath_enabled, shortcut)


def _plain_attention(undo: ExitStack) -> None:
    """Keep attention from the fused kernels, of which those of a CPU have no batching rule."""
    flags = torch.backends.cuda  # they are those of all devices
    for kind in ("flash", "mem_efficient", "cudnn"):
        enable = getattr(flags, f"enable_{kind}_sdp")
        undo.callback(enable, getattr(flags, f"{kind}_sdp_enabled")())
        enable(False)


_STACKING, _ON_CPU = _ForAllThreads(_refuse_slow_batching), _ForAllThreads(_plain_attention)


@contextmanager
def batching(on_cpu: bool) -> Iterator[None]:
    """Settings under which ``torch.func.vmap`` runs networks: quickly, or with an error."""
    with _STACKING, _ON_CPU if on_cpu else nullcontext():
        yield


def _seconds(*ways: Callable[[], None]) -> list[float]:
    """The best of some runs of each after one to warm up, with the device's queue emptied.

    They take turns, so that a busy moment of the machine is one for all. Quick ones are run more
    often: the more they differ by chance. A single thread is timed by what it computed, however
    long other programs kept it waiting.
    """
    alone = torch.get_num_threads() == 1 and not torch.accelerator.is_available()
    clock = time.thread_time if alone else time.perf_counter
    times: list[list[float]] = [[] for _ in ways]
    while len(times[0]) < 3 or (len(times[0]) < 20 and max(map(sum, times)) < 0.05):
        for run, found in zip(ways, times, strict=True):
            _synchronise()
            start = clock()
            run()
            _synchronise()
            found.append(clock() - start)
    return [min(found[1:]) for found in times]


def _synchronise() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _untouched_rng() -> Any:
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))
