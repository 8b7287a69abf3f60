"""A mean-field Gaussian posterior: a mean and a standard deviation for each weight."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import in_network_order
from lightning_bnn.posteriors.base import Blobs
from lightning_bnn.posteriors.moments import Moments, at_least_float32
from lightning_bnn.posteriors.weights import (
    CHUNK,
    Change,
    Correlations,
    WeightPosterior,
    Weights,
    changed,
)
from lightning_bnn.selection import FlatLayout
from lightning_bnn.storage.store import Stored

__all__ = ["FlatGaussian", "GaussianPosterior"]


class FlatGaussian(WeightPosterior):
    """A Gaussian over the weights, whose mean and variance are flat vectors.

    What a kind is made of are attributes of the names of its constructor's arguments: groups of
    tensors and other options. They are saved under these names.

    Args:
        net: The network; the posterior keeps a copy.
        likelihood: How outputs of the network give targets.
        mean: The means of the Bayesian weights, by name.
        spread: What the noise of each is scaled by, in the same names.
        fixed: Other parameters and buffers; the network's own values serve for those left out.

    Attributes:
        groups: The names of the groups of tensors, the mean and what its noise is scaled by first.
        options: The names of the options.
    """

    groups: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        mean: Mapping[str, Tensor],
        spread: Mapping[str, Tensor],
        fixed: Mapping[str, Tensor] | None,
    ) -> None:
        called = self.groups[1]
        mean, spread = in_network_order(net, mean, "mean"), in_network_order(net, spread, called)
        if not mean or list(mean) != list(spread):
            raise ConfigurationError(
                f"mean and {called} need the same names, at least one; got "
                f"{list(mean)[:3]} and {list(spread)[:3]}."
            )
        dtypes = {tensor.dtype for tensor in (*mean.values(), *spread.values())}
        if len(dtypes) > 1 or not dtypes.pop().is_floating_point:
            raise ConfigurationError(
                f"mean and {called} need one floating-point dtype in all tensors."
            )
        super().__init__(net, likelihood, mean, fixed)
        self._layout = FlatLayout(mean)
        self._mean, self._spread = self._layout.flatten(mean), self._layout.flatten(spread)

    @property
    def mean(self) -> Weights:
        """The means of the Bayesian weights, by name."""
        return self._layout.views(self._mean)

    @property
    def device(self) -> torch.device:
        """Where the posterior lies."""
        return self._mean.device

    @abstractmethod
    def _variance(self) -> Tensor:
        """The flat vector of all variances, at least in float32."""

    @abstractmethod
    def _sampler(self, generator: torch.Generator | None) -> Callable[[Tensor], Any]:
        """A function that fills a flat vector with a draw."""

    def draws(
        self, count: int, generator: torch.Generator | None = None, chunk: int = CHUNK
    ) -> Iterator[Weights]:
        """Yield ``count`` draws, stacked, at most ``chunk`` at a time."""
        fill = self._sampler(generator)
        for start in range(0, count, chunk):
            flat = self._mean.new_empty(min(chunk, count - start), self._layout.size)
            for row in flat:  # one draw after another: the chunk does not change the numbers
                fill(row)
            yield self._layout.views(flat)
            del flat, row  # before the next are made

    def moments(self) -> Moments:
        """Mean and variance of each weight by itself, at least in float32."""
        mean = self._layout.views(at_least_float32(self._mean))
        variance = self._layout.views(self._variance())
        names = self.varying
        return Moments({k: mean[k] for k in names}, {k: variance[k] for k in names})

    @property
    def has_variance(self) -> bool:
        """Whether a weight varies."""
        groups = (getattr(self, name) for name in self.groups[1:])
        return any(bool(tensor.any()) for group in groups for tensor in group.values())

    def map(self, change: Change, net: nn.Module | None = None) -> Self:
        """The same kind of posterior, with every stored tensor changed."""
        groups: dict[str, Any] = {
            name: changed(change, group) for name, group in self.blobs().items()
        }
        made = type(self)(net or self.net, self.likelihood, **groups, **self.entry())
        return made.made_from(self, net)

    def entry(self) -> dict[str, Any]:
        """The options."""
        return {name: getattr(self, name) for name in self.options}

    def blobs(self) -> Blobs:
        """The tensors to save."""
        groups = {name: getattr(self, name) for name in self.groups}
        return {**{name: group for name, group in groups.items() if group}, **super().blobs()}

    @classmethod
    def from_stored(
        cls, stored: Stored, entry: Mapping[str, Any], net: nn.Module,
        likelihood: Likelihood, prefix: str,
    ) -> Self:  # fmt: skip
        """The inverse of :meth:`blobs` and :meth:`entry`."""
        needed = {name: stored.load(f"{prefix}{name}") for name in cls.groups[:2]}
        others = (*cls.groups[2:], "fixed")
        more: dict[str, Any] = {name: stored.load_if_present(f"{prefix}{name}") for name in others}
        options = {name: entry[name] for name in cls.options}
        return cls(net, likelihood, **needed, **more, **options)


class GaussianPosterior(FlatGaussian):
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
    groups: ClassVar[tuple[str, ...]] = ("mean", "sd")

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        mean: Mapping[str, Tensor],
        sd: Mapping[str, Tensor],
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(net, likelihood, mean, sd, fixed)

    @property
    def sd(self) -> Weights:
        """The standard deviations of the Bayesian weights, by name."""
        return self._layout.views(self._spread)

    @property
    def correlations(self) -> Correlations:
        """None: weights are independent."""
        return "none"

    def covariance_matrix(self) -> Tensor:
        """The covariance of all weights that vary, (P, P), in float64."""
        return self._spread.double().cpu().square().diag()

    def _sampler(self, generator: torch.Generator | None) -> Callable[[Tensor], Any]:
        return lambda row: row.normal_(generator=generator).mul_(self._spread).add_(self._mean)

    def _variance(self) -> Tensor:
        return at_least_float32(self._spread).square()
