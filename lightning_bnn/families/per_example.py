r"""Per-example noise for linear and convolutional layers: flipout and local reparameterisation.

With one draw for a whole batch the noise of its examples is shared, and the variance of the
gradient does not fall with the batch size. Two estimators give each example its own noise.
A layer runs on its mean weights, as it is; then its output receives, with
:math:`\circ` the product of elements,

* ``flipout`` (Wen et al., 2018): :math:`r \circ \mathrm{layer}(s \circ x;\ \sigma\varepsilon)`,
  with random signs r, s for each example and one :math:`\varepsilon` for the batch. Each example
  sees a true draw of the weights, in convolutions, along further axes, and where one layer is
  called several times;
* ``local`` (Kingma et al., 2015): :math:`\sqrt{\mathrm{layer}(x^2;\ \sigma^2)} \circ \xi`, fresh
  noise for each output. Exact where a weight meets an example once (a Linear on (batch,
  features)); where it is used at several positions, in convolutions and sequences, the noise of
  those positions is drawn apart though the weights would tie them.

Both reach Linear, Conv1d–3d and ConvTranspose1d–3d, whose examples lie along the first axis.
Other weights, tied ones, and layers whose weights a module reads without calling them
(attention's projections) keep one draw a batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["PerExampleNoise"]

_CONVOLUTION = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class PerExampleNoise:
    """Adds per-example noise to the layers of a network that can take it.

    A layer whose weights are used both by calling it and by another module that reads them is
    not recognised: what is read are the means. Leave such weights to the ``weight`` estimator.

    Args:
        net: The network.
        names: The names of its Bayesian parameters.
        kind: ``"flipout"`` or ``"local"``.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
        >>> sorted(PerExampleNoise(net, ["0.weight", "0.bias", "1.weight"], "local").covered)
        ['0.bias', '0.weight']
    """

    def __init__(
        self, net: nn.Module, names: Iterable[str], kind: Literal["flipout", "local"]
    ) -> None:
        self.kind = kind
        bayesian = set(names)
        uses = Counter(id(p) for module in net.modules() for p in module.parameters(recurse=False))
        self._layers: dict[str, _WithoutHooks] = {}
        for prefix, module in net.named_modules():
            # exact types: a subclass may compute something else
            if type(module) not in (nn.Linear, *_CONVOLUTION):
                continue
            full = {part: f"{prefix}.{part}".lstrip(".") for part in ("weight", "bias")}
            tied = any(uses[id(parameter)] > 1 for parameter in module.parameters(recurse=False))
            if full["weight"] in bayesian and not tied:
                full = {part: name for part, name in full.items() if name in bayesian}
                self._layers[prefix] = _WithoutHooks(module, full)
        self._reached: set[str] = set()

    @property
    def covered(self) -> set[str]:
        """The names of the parameters whose noise is per example."""
        return {name for layer in self._layers.values() for name in layer.names.values()}

    @contextmanager
    def active(
        self, sd: Mapping[str, Tensor], noise: Mapping[str, Tensor], generator: torch.Generator
    ) -> Iterator[None]:
        """Inside, every covered layer that is called adds noise to its output.

        Args:
            sd: Standard deviations by parameter name.
            noise: Standard normal noise of the batch by parameter name, for flipout.
            generator: For the noise of each example.
        """
        self._reached.clear()
        handles = []
        for prefix, bare in self._layers.items():
            tensors = {part: (sd[name], noise[name]) for part, name in bare.names.items()}
            hook = partial(self._add_noise, prefix, tensors, {}, generator)
            # first: hooks of the user's own see the noisy output
            handles.append(bare.layer.register_forward_hook(hook, prepend=True, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _add_noise(
        self,
        prefix: str,
        tensors: Mapping[str, tuple[Tensor, Tensor]],
        signs: dict[tuple[int, ...], Tensor],
        generator: torch.Generator,
        layer: nn.Module,
        inputs: tuple[Any, ...],
        options: dict[str, Any],
        output: Tensor,
    ) -> Tensor:
        self._reached.add(prefix)
        run = partial(self._layers[prefix].run, inputs=inputs, options=options)
        if self.kind == "local":
            return output + _local(run, tensors, generator)
        positions = len(layer.kernel_size) if isinstance(layer, _CONVOLUTION) else 0
        return output + _flipout(run, tensors, generator, positions, signs)

    @property
    def layers(self) -> list[str]:
        """The names of the layers that take noise for each example."""
        return sorted(self._layers)

    def keep(self, names: Iterable[str]) -> None:
        """Take noise for each example in these layers only."""
        kept = set(names)
        self._layers = {name: layer for name, layer in self._layers.items() if name in kept}

    def drop_unreached(self) -> bool:
        """Stop covering layers that the last forward pass did not call; was there any?

        Their weights may still have been used, read by another module, and a mean without
        noise would be wrong. From now on they take the draw of the batch.
        """
        missing = set(self._layers) - self._reached
        for prefix in missing:
            del self._layers[prefix]
        return bool(missing)


class _WithoutHooks(nn.Module):
    """Runs a layer with other weights, and none of the hooks that it has."""

    layer: Any

    def __init__(self, layer: nn.Module, names: Mapping[str, str]) -> None:
        super().__init__()
        self.layer = layer
        self.names = names  # of its Bayesian parameters in the network, by those in the layer

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        return self.layer.forward(*inputs, **options)

    def run(
        self,
        tensors: Mapping[str, Tensor],
        change: Callable[[Tensor], Tensor],
        inputs: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> Tensor:
        """The output at the changed input; a bias that does not vary adds nothing."""
        named = {f"layer.{part}": tensor for part, tensor in tensors.items()}
        if self.layer.bias is not None and "bias" not in tensors:
            named["layer.bias"] = torch.zeros_like(self.layer.bias)
        if inputs:
            inputs = (change(inputs[0]), *inputs[1:])
        else:
            options = {**options, "input": change(options["input"])}
        return functional_call(self, named, inputs, dict(options))


def _local(
    run: Callable[..., Tensor],
    tensors: Mapping[str, tuple[Tensor, Tensor]],
    generator: torch.Generator,
) -> Tensor:
    """Noise with the variance of each output, drawn afresh for each."""
    variance = run({part: sd**2 for part, (sd, _) in tensors.items()}, torch.square)
    # the root has no slope at 0, where an input of zeros puts it
    scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
    return scale * torch.empty_like(scale).normal_(generator=generator)


def _flipout(
    run: Callable[..., Tensor],
    tensors: Mapping[str, tuple[Tensor, Tensor]],
    generator: torch.Generator,
    positions: int,
    signs: dict[tuple[int, ...], Tensor],
) -> Tensor:
    """What the batch's step of the weights does to each output, with signs of each example.

    ``signs`` keeps them, so that a layer which is called again meets the same weights.
    """

    def flip(values: Tensor, end: int) -> Tensor:
        """Change signs by example and channel, alike at every position."""
        shape = list(values.shape)
        if positions:
            shape[-positions:] = [1] * positions
        else:
            shape[1:-1] = [1] * (len(shape) - 2)
        key = (end, *shape)
        if key not in signs:
            empty = torch.empty(shape, dtype=values.dtype, device=values.device)
            signs[key] = empty.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        return values * signs[key]

    step = {part: sd * noise for part, (sd, noise) in tensors.items()}
    return flip(run(step, lambda values: flip(values, 0)), 1)
