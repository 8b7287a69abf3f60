"""A mean-field Gaussian posterior: a mean and a standard deviation for each weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import in_network_order
from lightning_bnn.posteriors.base import _CHUNK, Blobs, Posterior, Weights, load_if_stored
from lightning_bnn.posteriors.prunable import Change
from lightning_bnn.posteriors.store import Stored
from lightning_bnn.selection import FlatLayout

__all__ = ["GaussianPosterior"]


class GaussianPosterior(Posterior):
    """Independent Gaussians over the weights.

    Args:
        net: The network; the posterior keeps a copy.
        likelihood: How outputs of the network give targets.
        mean: The means of the Bayesian weights, by name.
        sd: Their standard deviations; 0 for a weight that does not vary, as a pruned one.
        fixed: Other parameters and buffers; the network's own values serve for those left out.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Linear(1, 1, bias=False)
        >>> posterior = GaussianPosterior(
        ...     net, Gaussian(0.1), {"weight": torch.ones(1, 1)}, {"weight": torch.ones(1, 1)})
        >>> posterior.sample(5)["weight"].shape
        torch.Size([5, 1, 1])
    """

    kind = "gaussian"

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        mean: Mapping[str, Tensor],
        sd: Mapping[str, Tensor],
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
        mean, sd = in_network_order(net, mean, "mean"), in_network_order(net, sd, "sd")
        if not mean or list(mean) != list(sd):
            raise ConfigurationError(
                "mean and sd need the same names, at least one; got "
                f"{list(mean)[:3]} and {list(sd)[:3]}."
            )
        dtypes = {tensor.dtype for tensor in (*mean.values(), *sd.values())}
        if len(dtypes) > 1 or not dtypes.pop().is_floating_point:
            raise ConfigurationError("mean and sd need one floating-point dtype in all tensors.")
        super().__init__(net, likelihood, mean, fixed)
        self._layout = FlatLayout(mean)
        self._mean = self._layout.flatten(mean)
        self._sd = self._layout.flatten(sd)

    @property
    def mean(self) -> Weights:
        """The means of the Bayesian weights, by name."""
        return self._layout.views(self._mean)

    @property
    def sd(self) -> Weights:
        """Their standard deviations, by name."""
        return self._layout.views(self._sd)

    @property
    def device(self) -> torch.device:
        """Where the posterior lies."""
        return self._mean.device

    def draws(
        self, count: int, generator: torch.Generator | None = None, chunk: int = _CHUNK
    ) -> Iterator[Weights]:
        """Yield ``count`` draws, stacked, at most ``chunk`` at a time."""
        for start in range(0, count, chunk):
            yield self._together(min(chunk, count - start), generator)

    def _together(self, count: int, generator: torch.Generator | None) -> Weights:
        flat = self._mean.new_empty(count, self._layout.size)
        for row in flat:  # one draw after another: the chunk does not change the numbers
            row.normal_(generator=generator)
        return self._layout.views(flat.mul_(self._sd).add_(self._mean))

    def to(self, device: torch.device | str) -> Self:
        """Move everything to a device, in place."""
        self._mean, self._sd = self._mean.to(device), self._sd.to(device)
        return super().to(device)

    def _mapped(self, net: nn.Module, change: Change) -> Self:
        mean, sd, fixed = (
            {name: change(name, tensor) for name, tensor in part.items()}
            for part in (self.mean, self.sd, self.fixed)
        )
        return self._as_before(type(self)(net, self.likelihood, mean, sd, fixed))

    def _mean_weights(self) -> Weights:
        return self.mean

    def _own_blobs(self) -> Blobs:
        return {"mean": self.mean, "sd": self.sd}

    @classmethod
    def _from_stored(
        cls, stored: Stored, entry: Mapping[str, Any], net: nn.Module,
        likelihood: Likelihood, prefix: str,
    ) -> GaussianPosterior:  # fmt: skip
        mean, sd = stored.load(f"{prefix}mean"), stored.load(f"{prefix}sd")
        return cls(net, likelihood, mean, sd, load_if_stored(stored, f"{prefix}fixed"))
