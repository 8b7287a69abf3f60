r"""Per-example noise for linear and convolutional layers: flipout and local reparameterisation.

With one draw for a whole batch the noise of its examples is shared, and the variance of the
gradient does not fall with the batch size. Two estimators give each example noise of its own.
A layer runs on its mean weights, as it is; then its output receives, with
:math:`\circ` the product of elements,

* ``flipout`` (Wen et al., 2018): :math:`r \circ \mathrm{layer}(s \circ x;\ \sigma\varepsilon)`,
  with random signs r, s for each example and one :math:`\varepsilon` for the batch. Each example
  sees a true draw of the weights, in convolutions and along further axes too;
* ``local`` (Kingma et al., 2015): :math:`\sqrt{\mathrm{layer}(x^2;\ \sigma^2)} \circ \xi`, fresh
  noise for each output. Exact where a weight meets an example once (a Linear on (batch,
  features)); where it is used at several positions, in convolutions and sequences, the noise of
  those positions is drawn apart though the weights would tie them.

Both reach Linear, Conv1d–3d and ConvTranspose1d–3d. Other weights, tied ones, and layers whose
weights a module reads without calling them (attention's projections) keep one draw a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["PerExampleNoise"]

_LINEAR = (nn.Linear,)
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
        uses: dict[int, int] = {}
        for module in net.modules():
            for parameter in module.parameters(recurse=False):
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        self._layers: dict[str, nn.Module] = {}
        for prefix, module in net.named_modules():
            # exact types: a subclass may compute something else
            if type(module) not in _LINEAR + _CONVOLUTION:
                continue
            tied = any(uses[id(parameter)] > 1 for parameter in module.parameters(recurse=False))
            if f"{prefix}.weight".lstrip(".") in bayesian and not tied:
                self._layers[prefix] = module
        self._bayesian = bayesian
        self._reached: set[str] = set()
        self._inside = False

    @property
    def covered(self) -> set[str]:
        """The names of the parameters whose noise is per example."""
        return {
            name
            for prefix in self._layers
            for part in ("weight", "bias")
            if (name := f"{prefix}.{part}".lstrip(".")) in self._bayesian
        }

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
        for prefix, layer in self._layers.items():
            tensors = {
                part: (sd[name], noise[name])
                for part in ("weight", "bias")
                if (name := f"{prefix}.{part}".lstrip(".")) in self._bayesian
            }

            def hook(
                module: nn.Module, inputs: tuple[Any, ...], output: Tensor,
                prefix: str = prefix, tensors: dict[str, tuple[Tensor, Tensor]] = tensors,
            ) -> Tensor | None:  # fmt: skip
                if self._inside:
                    return None
                self._reached.add(prefix)
                self._inside = True
                try:
                    return output + self._noise(module, inputs, output, tensors, generator)
                finally:
                    self._inside = False

            handles.append(layer.register_forward_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def drop_unreached(self) -> bool:
        """Stop covering layers that the last forward pass did not call; was there any?

        Their weights may still have been used, read by another module, and a mean without
        noise would be wrong. From now on they take the draw of the batch.
        """
        missing = set(self._layers) - self._reached
        for prefix in missing:
            del self._layers[prefix]
        return bool(missing)

    def _noise(
        self,
        layer: nn.Module,
        inputs: tuple[Any, ...],
        output: Tensor,
        tensors: Mapping[str, tuple[Tensor, Tensor]],
        generator: torch.Generator,
    ) -> Tensor:
        values, *rest = inputs
        if self.kind == "local":
            spread = {part: sd**2 for part, (sd, _) in tensors.items()}
            variance = _run(layer, spread, (values**2, *rest))
            # the root has no slope at 0, where an input of zeros puts it
            scale = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
            return scale * torch.empty_like(scale).normal_(generator=generator)
        step = {part: sd * noise for part, (sd, noise) in tensors.items()}
        convolution = isinstance(layer, _CONVOLUTION)
        signs = _signs(values, convolution, layer, generator)
        changed = _run(layer, step, (values * signs, *rest))
        return changed * _signs(output, convolution, layer, generator)


def _run(layer: nn.Module, tensors: dict[str, Tensor], inputs: tuple[Any, ...]) -> Tensor:
    """The layer with other weights; a bias that does not vary adds nothing."""
    if layer.bias is not None and "bias" not in tensors:
        tensors = {**tensors, "bias": torch.zeros_like(layer.bias)}  # type: ignore[arg-type]
    return functional_call(layer, tensors, inputs)  # type: ignore[no-any-return]


def _signs(
    values: Tensor, convolution: bool, layer: nn.Module, generator: torch.Generator
) -> Tensor:
    """Random signs for each example and channel, the same at every position."""
    shape = list(values.shape)
    if convolution:
        positions = len(layer.kernel_size)  # type: ignore[arg-type]
        shape[-positions:] = [1] * positions
    else:
        shape[1:-1] = [1] * (len(shape) - 2)
    signs = torch.empty(shape, dtype=values.dtype, device=values.device)
    return signs.bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
