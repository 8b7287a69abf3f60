r"""Adversarial training of ensembles, by the fast gradient sign method.

Each member is trained on the mean of the loss at the inputs and at inputs moved against it,

.. math::
    \tfrac12\left[\ell(x) + \ell(x')\right], \qquad
    x' = x + \epsilon\, r \odot \mathrm{sign}\,\nabla_x \ell(x),

with :math:`\ell = -\log p(y\mid x, w)` and r the range of each input dimension over the training
data (Lakshminarayanan, Pritzel and Blundell, 2017, *Simple and Scalable Predictive Uncertainty
Estimation using Deep Ensembles*; they take ε = 0.01). Every member has an x' of its own, which is
held constant in the gradient. The range is that of all training inputs seen so far, over all
ranks; with batches of their own, that of the inputs which the member has seen.

Where a network has BatchNorm, x' is normalised by the statistics of its own batch, and the running
statistics, which prediction uses, are those of the real inputs only.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.errors import ConfigurationError, DataError

__all__ = ["InputRange", "check_adversarial", "check_inputs", "fast_gradient_sign"]


def check_adversarial(epsilon: float) -> None:
    """Raise unless it is a positive share of the inputs' range.

    Example:
        >>> check_adversarial(0.01)
    """
    real = isinstance(epsilon, Real) and not isinstance(epsilon, bool)
    if not real or not (math.isfinite(epsilon) and 0 < epsilon <= 1):
        raise ConfigurationError(
            "adversarial= is a share of each input's range, above 0 and at most 1, such as 0.01; "
            f"got {epsilon!r}. Leave it out for none."
        )


def check_inputs(inputs: Any) -> Tensor:
    """The inputs, if they are one tensor of real numbers that can be moved."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        what = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
        raise DataError(
            "adversarial= moves the inputs along a gradient and needs one floating-point tensor; "
            f"got {what}. Token ids and several inputs cannot be moved: leave adversarial= out."
        )
    return inputs


def fast_gradient_sign(inputs: Tensor, gradient: Tensor, epsilon: float, extent: Tensor) -> Tensor:
    """Inputs moved by a share of their range to where the loss grows, without a graph.

    Args:
        inputs: (..., D).
        gradient: The gradient of the loss by the inputs.
        epsilon: The share.
        extent: The range of each input dimension; it is broadcast to the inputs.

    Example:
        >>> gradient, extent = torch.tensor([2.0, -0.1, 0.0]), torch.tensor([1.0, 10.0, 1.0])
        >>> fast_gradient_sign(torch.zeros(3), gradient, 0.01, extent)
        tensor([ 0.0100, -0.1000,  0.0000])
    """
    return inputs.detach() + epsilon * extent.to(inputs.dtype) * gradient.sign()


class InputRange(nn.Module):
    """The smallest and largest value of each input dimension so far, the same on all ranks.

    Args:
        axis: The axis of examples: 0, or 1 where each member has a range of its own.

    Example:
        >>> seen = InputRange()
        >>> seen.update(torch.tensor([[0.0, 5.0], [1.0, 7.0]]))
        >>> seen.update(torch.tensor([[-1.0, 6.0]]))
        >>> seen.extent
        tensor([2., 2.])
    """

    low: Tensor | None
    high: Tensor | None

    def __init__(self, axis: int = 0) -> None:
        super().__init__()
        self.axis = axis
        # Their shape is known with the first batch, so the state is saved as a whole.
        self.register_buffer("low", None, persistent=False)
        self.register_buffer("high", None, persistent=False)

    @property
    def extent(self) -> Tensor:
        """The range of each input dimension, in the shape of the inputs but for the axis."""
        if self.low is None or self.high is None:
            raise ConfigurationError("The range of the inputs is known after the first batch.")
        return self.high - self.low

    @torch.no_grad()
    def update(self, examples: Tensor) -> None:
        """Take in a batch of examples; under DDP those of all ranks."""
        low, high = examples.detach().aminmax(dim=self.axis)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            both = torch.stack([-low, high])
            torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX)
            low, high = -both[0], both[1]
        if self.low is not None and self.high is not None:
            if self.low.shape != low.shape:
                raise DataError(
                    "adversarial= takes shares of each input dimension's range and needs inputs of "
                    f"one shape; got {tuple(low.shape)} after {tuple(self.low.shape)}."
                )
            low = torch.minimum(self.low.to(low), low)
            high = torch.maximum(self.high.to(high), high)
        self.low, self.high = low, high

    def get_extra_state(self) -> dict[str, Tensor]:
        """Both ends of the range, if they are known."""
        if self.low is None or self.high is None:
            return {}
        return {"low": self.low, "high": self.high}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Go on with a saved range."""
        self.low, self.high = state.get("low"), state.get("high")
