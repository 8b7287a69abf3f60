r"""What a dropout layer does with noise.

A dropout layer multiplies what it gets by noise :math:`m` of mean 1 (and adds a number, to keep the
moments of a SELU network). All noise is made of uniform numbers u by

=============  =============================================================  ====================
noise          m                                                              variance of m
=============  =============================================================  ====================
``bernoulli``  :math:`[u \ge p] / (1-p)`                                      :math:`p/(1-p)`
``gaussian``   :math:`1 + \sqrt{\alpha}\,\Phi^{-1}(u)`, α = p/(1 − p)         :math:`p/(1-p)`
``alpha``      as ``nn.AlphaDropout``: dropped numbers go to SELU's limit     of the output: 1
=============  =============================================================  ====================

p is the chance that a number is dropped. (Srivastava et al., 2014, *Dropout*; Klambauer et al.,
2017, *Self-Normalizing Neural Networks*.) Noise acts on what a module gets as its input: on that
of a network's own dropout layers, or on that of chosen layers with weights. There m is one number
for each input feature, at all positions of an image or a sequence alike: a layer with weights W
then is one with weights W diag(m), a draw of a distribution over weights (Gal and Ghahramani, 2016,
*Dropout as a Bayesian Approximation*).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["NOISES", "SHARING", "DropoutLayer", "Factors", "Noise", "multiply", "noise_shape"]

Noise = Literal["bernoulli", "gaussian", "alpha"]
Factors = tuple[Tensor, ...]  # what inputs are multiplied by, and what is added then

# SELU's limit at minus infinity
_ALPHA = -1.7580993408473766


def _bernoulli(u: Tensor, rate: float) -> Factors:
    return ((u >= rate).to(u.dtype).div_(1 - rate),)


def _gaussian(u: Tensor, rate: float) -> Factors:
    noise = torch.special.ndtri(u.clamp(2.0**-54 if u.dtype == torch.float64 else 2.0**-25))
    return (noise.mul_((rate / (1 - rate)) ** 0.5).add_(1),)


def _alpha(u: Tensor, rate: float) -> Factors:
    kept = (u >= rate).to(u.dtype)
    scale = ((1 - rate) * (1 + rate * _ALPHA**2)) ** -0.5
    return kept * scale, (1 - kept - rate) * (scale * _ALPHA)


# from uniform numbers and the rate: what inputs are multiplied by, and what is added then
NOISES: Mapping[str, Callable[[Tensor, float], Factors]] = {
    "bernoulli": _bernoulli,
    "gaussian": _gaussian,
    "alpha": _alpha,
}

# the axes along which the noise of an example differs; None is all
SHARING: Mapping[str, tuple[int, ...] | None] = {
    "elements": None,
    "channels": (0, 1),
    "examples": (),
    "features": (-1,),
    "channels 1d": (-2,),
    "channels 2d": (-3,),
    "channels 3d": (-4,),
}


@dataclass(frozen=True)
class DropoutLayer:
    """A place in a network where noise acts on the input of a module.

    Attributes:
        name: The module's name.
        rate: p, the chance that a number is dropped.
        noise: One of :data:`NOISES`.
        shared: One of :data:`SHARING`.
        weight: For dropout before a layer with weights, the name of these weights.
        units: For such dropout, the number of input features.

    Example:
        >>> layer = DropoutLayer("1", 0.5, "bernoulli", "elements")
        >>> multiply(torch.ones(3), *layer.factors(torch.tensor([0.1, 0.5, 0.9])))
        tensor([0., 2., 2.])
    """

    name: str
    rate: float
    noise: str
    shared: str
    weight: str | None = None
    units: int = 0

    def factors(self, uniform: Tensor) -> Factors:
        """What inputs are multiplied by, and what is added then, from uniform numbers."""
        return NOISES[self.noise](uniform, self.rate)


def multiply(inputs: Tensor, factor: Tensor, *added: Tensor) -> Tensor:
    """Inputs with noise, in their own precision."""
    noisy = inputs * factor.to(inputs.dtype)
    return noisy + added[0].to(inputs.dtype) if added else noisy


def noise_shape(layer: DropoutLayer, shape: Sequence[int], axis: int | None) -> list[int]:
    """The shape of the noise of one example, with 1 where it is shared.

    Args:
        layer: The layer.
        shape: That of its inputs.
        axis: The axis of examples, along which all have the same.

    Example:
        >>> noise_shape(DropoutLayer("1", 0.5, "bernoulli", "channels"), (8, 3, 5, 5), 0)
        [1, 3, 1, 1]
    """
    axes = SHARING[layer.shared]
    own = range(len(shape)) if axes is None else [each % len(shape) for each in axes]
    return [n if i in own and i != axis else 1 for i, n in enumerate(shape)]
