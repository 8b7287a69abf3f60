r"""Random prior functions: each member is a trained network plus a fixed random one.

.. math:: f(x) = g_w(x) + \beta\, p(x)

with a network p that keeps the random weights it was made with (Osband, Aslanides and Cassirer,
2018, *Randomized Prior Functions for Deep Reinforcement Learning*). Near the data the trained part
makes up for p; far from them p remains, another in each member, so that members disagree there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from lightning_bnn.checks import check_kind
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.network import copy_network

__all__ = ["RandomPriorFunction", "start_both", "with_prior_function"]


class RandomPriorFunction(nn.Module):
    """A network plus a multiple of a fixed network with random weights.

    The prior network is frozen, and always runs as in evaluation, so that it stays one function.
    The scale is a buffer: a posterior of such networks is saved with it, and ``Posterior.load``
    takes ``RandomPriorFunction(net, prior_net)`` of the same architectures, whatever their values.

    Args:
        net: The network that is trained.
        prior_net: The network that is not; its outputs have the same shape.
        scale: β, the size of the prior function.

    Example:
        >>> wrapped = RandomPriorFunction(nn.Linear(2, 1), nn.Linear(2, 1), scale=3.0)
        >>> [name for name, p in wrapped.named_parameters() if p.requires_grad]
        ['net.weight', 'net.bias']
        >>> x = torch.ones(4, 2)
        >>> torch.equal(wrapped(x), wrapped.net(x) + 3.0 * wrapped.prior_net(x))
        True
    """

    scale: Tensor

    def __init__(self, net: nn.Module, prior_net: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        real = isinstance(scale, Real) and not isinstance(scale, bool)
        if not real or not (math.isfinite(scale) and scale > 0):
            raise ConfigurationError(
                f"The scale of a prior function is a positive number; got {scale!r}. Leave the "
                "prior function out for none."
            )
        for name, value in (("net", net), ("prior_net", prior_net)):
            check_kind(name, value, nn.Module, "a torch.nn.Module")
        if set(map(id, net.parameters())) & set(map(id, prior_net.parameters())):
            raise ConfigurationError(
                "The prior network shares parameters with the trained one, and would change with "
                "it. Build it anew: RandomPriorFunction(make_net(), make_net(), scale)."
            )
        self.net = net
        self.prior_net = prior_net.requires_grad_(False)
        like = next((p for p in net.parameters() if p.is_floating_point()), torch.zeros(()))
        self.register_buffer("scale", torch.as_tensor(scale, dtype=like.dtype, device=like.device))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The trained network's outputs and the prior function's."""
        trained = self.net(*args, **kwargs)
        # only for the call: Lightning warns of modules that it finds in evaluation mode
        mode = self.prior_net.training
        self.prior_net.eval()
        try:
            fixed = self.prior_net(*args, **kwargs)
        finally:
            self.prior_net.train(mode)
        if trained.shape != fixed.shape:
            raise ConfigurationError(
                f"The network gives outputs of shape {tuple(trained.shape)}, the prior network "
                f"{tuple(fixed.shape)}; they are added and must agree."
            )
        return trained + self.scale * fixed


def with_prior_function(net: nn.Module, scale: float) -> RandomPriorFunction:
    """A network with a prior function of its own architecture; both are copies.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> wrapped = with_prior_function(net, 2.0)
        >>> wrapped.net is net, net.weight.requires_grad
        (False, True)
    """
    return RandomPriorFunction(copy_network(net), copy_network(net), scale)


def start_both(
    wrapped: RandomPriorFunction, trained: Mapping[str, Tensor], fixed: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Where members start: the trained networks and the prior functions, stacked.

    Args:
        wrapped: A :class:`RandomPriorFunction` of two networks of one architecture.
        trained: The stacked tensors of the trained networks.
        fixed: Those of the prior functions.

    Example:
        >>> wrapped = with_prior_function(nn.Linear(2, 1, bias=False), 2.0)
        >>> stacked = start_both(wrapped, {"weight": torch.zeros(3, 1, 2)},
        ...                      {"weight": torch.ones(3, 1, 2)})
        >>> sorted(stacked), stacked["scale"]
        (['net.weight', 'prior_net.weight', 'scale'], tensor([2., 2., 2.]))
    """
    members = len(next(iter(fixed.values())))
    return {
        **{f"net.{name}": tensor for name, tensor in trained.items()},
        **{f"prior_net.{name}": tensor for name, tensor in fixed.items()},
        "scale": wrapped.scale.repeat(members),
    }
