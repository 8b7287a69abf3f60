r"""A network linearised in its weights: gradients of the outputs, for each example by itself.

.. math:: f(x, w) \approx f(x, w^*) + J(x)\,(w - w^*), \qquad J(x) = \partial f(x, w^*)/\partial w

The rows are products :math:`c^\top J(x_i)`, with any c for each example. Where the weights are
those of linear and convolutional layers, they are made of what goes into these and what comes back
(:mod:`lightning_bnn.curvature.layers`). Else they come from ``torch.func.vmap`` over the examples,
and where the network has no batching rules, from one example after another. In both the network
sees one example at a time, which must be what it gives in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils._pytree import tree_leaves

from lightning_bnn.curvature.layers import RecordedPass, plain_layers
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.lightning import rank_zero_debug
from lightning_bnn.mixtures import at_least_float32
from lightning_bnn.network import in_precision_of
from lightning_bnn.selection import FlatLayout
from lightning_bnn.stacked import batching, call_network
from lightning_bnn.target import each_tensor

__all__ = ["LinearisedNetwork", "Way", "some_examples"]

Way = Literal["unknown", "layers", "batched", "loop"]

_NUMBERS = 2**25  # of rows that are held at a time: 128 MB


def some_examples(inputs: Any, some: slice) -> Any:
    """Some examples of a batch's inputs or targets.

    Example:
        >>> some_examples({"x": torch.arange(3)}, slice(1))
        {'x': tensor([0])}
    """
    return each_tensor(lambda tensor: tensor[some], inputs)


def _normal(tensor: Tensor) -> Tensor:
    """A tensor that a graph may keep, which those made in inference mode cannot be."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


class LinearisedNetwork:
    """A network in evaluation mode at fixed weights, with derivatives in some of them.

    Args:
        net: The network, in evaluation mode; no other thread may run it meanwhile.
        weights: The weights that it is linearised in.
        fixed: The other parameters and buffers.
        way: How rows are known to be computed best, as :attr:`way` says it.

    Attributes:
        way: ``"layers"``, ``"batched"`` or ``"loop"``: the first that is not known to fail.

    Example:
        >>> net = nn.Linear(2, 1).eval()
        >>> linear = LinearisedNetwork(net, dict(net.named_parameters()), {})
        >>> [(start, rows)] = linear.rows(torch.tensor([[3.0, 4.0]]), torch.ones(1, 1, 1))
        >>> rows
        tensor([[[3., 4., 1.]]])
    """

    def __init__(
        self,
        net: nn.Module,
        weights: Mapping[str, Tensor],
        fixed: Mapping[str, Tensor],
        way: Way = "unknown",
    ) -> None:
        self.net = net
        self.weights = {name: at_least_float32(w.detach()) for name, w in weights.items()}
        self.fixed = {
            name: at_least_float32(t.detach()) if t.is_floating_point() else t.detach()
            for name, t in fixed.items()
        }
        self.layout = FlatLayout(self.weights)
        self.way: Way = way

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the network is run with."""
        return {**self.fixed, **self.weights}

    def prepared(self, inputs: Any) -> Any:
        """Inputs in the precision of the weights."""
        return in_precision_of(self.tensors, self.net, inputs)

    @torch.no_grad()
    def outputs(self, inputs: Any) -> Tensor:
        """What the network gives for a batch, (B, ...)."""
        return call_network(self.net, self.tensors, self.prepared(inputs))

    def rows(self, inputs: Any, columns: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of the first example and cᵀJ of some examples, (examples, C, P).

        Args:
            inputs: A batch.
            columns: c, (C, B, ...) with outputs like those of the network.
        """
        inputs = self.prepared(inputs)
        columns = columns.transpose(0, 1)
        step = max(1, _NUMBERS // max(1, columns.shape[1] * self.layout.size))
        for start in range(0, len(columns), step):
            some = slice(start, start + step)
            yield start, self._rows(some_examples(inputs, some), columns[some])

    def check(self, inputs: Any, outputs: Tensor) -> None:
        """Raise unless the network gives for an example alone what it gives in a batch."""
        first = some_examples(self.prepared(inputs), slice(1))
        try:
            with torch.no_grad():
                alone = call_network(self.net, self.tensors, first)
            same = alone.shape == outputs[:1].shape
            close = same and torch.allclose(alone, outputs[:1], rtol=1e-2, atol=1e-3)
        except (RuntimeError, IndexError, ValueError):
            close = False
        if not close:
            raise ConfigurationError(
                f"{type(self.net).__name__} gives for an example alone something else than in a "
                "batch, and this structure needs the gradient of each example. Give it inputs "
                "whose first axis is the batch, and outputs that do not depend on the other "
                "examples; BatchNorm layers need running statistics."
            )

    def _rows(self, inputs: Any, columns: Tensor) -> Tensor:
        ways: dict[Way, Callable[[Any, Tensor], Tensor]] = {
            "layers": self._by_layers,
            "batched": self._batched,
            "loop": self._loop,
        }
        if self.way != "unknown":
            return ways[self.way](inputs, columns)
        for way, rows in ways.items():
            try:
                made = rows(inputs, columns)
            except Exception as error:  # other layers, no batching rule, branches on values
                if way == "loop":
                    raise
                rank_zero_debug(f"Gradients cannot be taken by {way!r}: {error!s:.120}")
            else:
                self.way = way
                break
        return made

    def recorded(self, inputs: Any) -> RecordedPass:
        """A pass of a batch in which linear and convolutional layers keep what goes in.

        Args:
            inputs: The batch, in the precision of the weights.

        Raises:
            ConfigurationError: The weights are those of other layers, or used in another way.
        """
        layers = plain_layers(self.net, self.layout.names)
        tensors, inputs = each_tensor(_normal, self.tensors), each_tensor(_normal, inputs)
        check = self.way == "unknown"
        run = RecordedPass(self.net, tensors, layers, inputs, check)
        run.check_examples(check)
        return run

    def recorded_if_plain(self, inputs: Any) -> RecordedPass | None:
        """The same, or None where it would raise for this network."""
        if self.way not in ("unknown", "layers"):
            return None
        try:
            run = self.recorded(inputs)
        except Exception as error:  # other layers, or used in another way
            if self.way == "layers":
                raise
            rank_zero_debug(f"Gradients are not made layer by layer: {error!s:.120}")
            return None
        self.way = "layers"
        return run

    def _by_layers(self, inputs: Any, columns: Tensor) -> Tensor:
        return self.recorded(inputs).rows(_normal(columns).transpose(0, 1), self.layout)

    def _loop(self, inputs: Any, columns: Tensor) -> Tensor:
        rows = [
            self._of_example(some_examples(inputs, slice(i, i + 1)), columns[i])
            for i in range(len(columns))
        ]
        return torch.stack(rows)

    def _batched(self, inputs: Any, columns: Tensor) -> Tensor:
        def of_example(example: Any, own: Tensor) -> Tensor:
            alone = each_tensor(lambda t: t[None], example)

            def run(weights: dict[str, Tensor]) -> Tensor:
                return call_network(self.net, {**self.fixed, **weights}, alone)[0]

            pull: Any = vjp(run, self.weights)[1]
            (gradients,) = vmap(pull)(own)
            return torch.cat([gradients[name].flatten(1) for name in self.layout.names], 1)

        if isinstance(inputs, Mapping):
            inputs = dict(inputs)
        if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(inputs)):
            raise TypeError("the inputs are not tensors only")
        with batching(columns.device.type == "cpu"):
            return vmap(of_example, randomness="different")(inputs, columns)

    def _of_example(self, example: Any, columns: Tensor) -> Tensor:
        # a trainer evaluates in inference mode, whose tensors know no derivatives
        with torch.inference_mode(False), torch.enable_grad():
            weights = {name: w.clone().requires_grad_() for name, w in self.weights.items()}
            fixed = each_tensor(_normal, self.fixed)
            example, columns = each_tensor(_normal, example), _normal(columns)
            outputs = call_network(self.net, {**fixed, **weights}, example)[0]
            rows = []
            for column in columns:
                gradients = torch.autograd.grad(
                    outputs, list(weights.values()), column.to(outputs.dtype), retain_graph=True,
                    allow_unused=True, materialize_grads=True,
                )  # fmt: skip
                rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
            return torch.stack(rows)
