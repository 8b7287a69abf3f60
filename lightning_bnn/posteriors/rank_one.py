r"""A posterior of rank-1 factors: shared weights times random factors for their rows and columns.

A weight matrix of component k is :math:`W = \bar W \circ r s^\top`, with independent Gaussian
factors r of its rows and s of its columns; a vector is :math:`\bar w \circ r`. The components have
factors of their own and are equally likely. So K components cost K vectors for each side of each
weight, and one copy of the weights. Of n draws each component gives n/K.

Dusenberry et al. (2020), *Efficient and Scalable Bayesian Neural Nets with Rank-1 Factors*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn.checks import check_tensors
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import in_network_order
from lightning_bnn.posteriors.base import Blobs
from lightning_bnn.posteriors.matrices import factor_sides, places_left, scaled
from lightning_bnn.posteriors.moments import Moments, at_least_float32
from lightning_bnn.posteriors.weights import CHUNK, Change, WeightPosterior, Weights, changed
from lightning_bnn.selection import FlatLayout
from lightning_bnn.storage.store import Stored

__all__ = ["RankOnePosterior"]


class RankOnePosterior(WeightPosterior):
    """Shared weights times Gaussian factors of their rows and columns, in K components.

    Args:
        net: The network; the posterior keeps a copy.
        likelihood: How outputs of the network give targets.
        shared: The weights that all components share, by name.
        factors: The means of the factors, (K, rows) as ``"<name>.rows"`` of every weight, and
            (K, columns) as ``"<name>.columns"`` of those with two or more axes.
        factor_sd: Their standard deviations, in the same names and shapes.
        fixed: Other parameters and buffers; the network's own values serve for those left out.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Linear(1, 1, bias=False)
        >>> rows, ones = torch.tensor([[1.0], [3.0]]), torch.ones(2, 1)
        >>> factors = {"weight.rows": rows, "weight.columns": ones}
        >>> nothing = {name: 0 * ones for name in factors}
        >>> one = {"weight": torch.ones(1, 1)}
        >>> two = RankOnePosterior(net, Gaussian(0.1), one, factors, nothing)
        >>> sorted(two.sample(2)["weight"].flatten().tolist())
        [1.0, 3.0]
    """

    kind = "rank_one"

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        shared: Mapping[str, Tensor],
        factors: Mapping[str, Tensor],
        factor_sd: Mapping[str, Tensor],
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
        shared = in_network_order(net, shared, "shared")
        super().__init__(net, likelihood, shared, fixed)
        check_tensors("factors", factors)
        check_tensors("factor_sd", factor_sd)
        sides = {k: n for name, one in shared.items() for k, n in factor_sides(name, one.shape)}
        shapes = [
            {name: list(one.shape) for name, one in each.items()} for each in (factors, factor_sd)
        ]
        count = next((len(one) for one in factors.values() if one.ndim), 0)
        expected = {name: [count, side] for name, side in sides.items()}
        if not count or any(each != expected for each in shapes):
            raise ConfigurationError(
                f"factors and factor_sd need (components, length) of the lengths {sides!s:.200}; "
                f"got {shapes[0]!s:.200} and {shapes[1]!s:.200}."
            )
        self.shared = {name: one.detach().clone() for name, one in shared.items()}
        self._layout = FlatLayout({name: factors[name][0] for name in sides})
        self._centre, self._sd = (
            torch.cat([each[name].detach() for name in sides], 1) for each in (factors, factor_sd)
        )

    @property
    def factors(self) -> Weights:
        """The means of the factors, by name, with a leading axis of K."""
        return self._layout.views(self._centre)

    @property
    def factor_sd(self) -> Weights:
        """Their standard deviations."""
        return self._layout.views(self._sd)

    @property
    def count(self) -> int:
        """K, the number of components."""
        return len(self._centre)

    def facts(self) -> list[str]:
        """Those of any posterior over weights, and the number of components."""
        return [*super().facts(), f"{self.count} components"]

    def draws(
        self, count: int, generator: torch.Generator | None = None, chunk: int = CHUNK
    ) -> Iterator[Weights]:
        """Yield ``count`` draws, stacked, at most ``chunk`` at a time."""
        device = self.device if generator is None else generator.device
        order = torch.randperm(self.count, generator=generator, device=device).tolist()
        for start in range(0, count, chunk):
            stop = min(start + chunk, count)
            components = [order[index % self.count] for index in range(start, stop)]
            flat = self._centre.new_empty(stop - start, self._layout.size)
            for row in flat:  # one draw after another: the chunk does not change the numbers
                row.normal_(generator=generator)
            flat.mul_(self._sd[components]).add_(self._centre[components])
            factors = self._layout.views(flat)
            yield {name: scaled(name, weight, factors) for name, weight in self.shared.items()}

    def moments(self) -> Moments:
        """Mean and variance of each weight by itself, at least in float32."""
        first = {name: one.double() for name, one in self.factors.items()}
        second = {k: one.square() + self.factor_sd[k].double().square() for k, one in first.items()}
        mean, variance = {}, {}
        for name in self.varying:
            weight = self.shared[name].double()
            mean[name] = scaled(name, weight, first).mean(0)
            square = scaled(name, weight.square(), second).mean(0)
            variance[name] = (square - mean[name].square()).clamp(min=0)
        kind = at_least_float32(next(iter(self.shared.values()))).dtype
        given_back = [{k: one.to(kind) for k, one in each.items()} for each in (mean, variance)]
        return Moments(*given_back)

    def map(self, change: Change, net: nn.Module | None = None) -> Self:
        """The same with the shared weights changed, and what is left of the factors."""
        shared, fixed = changed(change, self.shared), changed(change, self.fixed)
        groups: list[Mapping[str, Tensor]] = [self.factors, self.factor_sd]
        if net is not None:
            left = {
                key: places.clamp(min=0)  # where a row is zero, its factor is of no matter
                for name, one in self.shared.items()
                for (key, _), places in zip(
                    factor_sides(name, one.shape),
                    places_left(change, name, one.shape),
                    strict=False,
                )
            }
            groups = [
                {key: one[:, left[key].to(one.device)] for key, one in group.items()}
                for group in groups
            ]
        made = type(self)(net or self.net, self.likelihood, shared, groups[0], groups[1], fixed)
        return made.made_from(self, net)

    def blobs(self) -> Blobs:
        """The tensors to save."""
        groups = {"shared": self.shared, "factors": self.factors, "factor_sd": self.factor_sd}
        return {**groups, **super().blobs()}

    @classmethod
    def from_stored(
        cls, stored: Stored, entry: Mapping[str, Any], net: nn.Module,
        likelihood: Likelihood, prefix: str,
    ) -> Self:  # fmt: skip
        """The inverse of :meth:`blobs`."""
        shared, factors, factor_sd = (
            stored.load(f"{prefix}{name}") for name in ("shared", "factors", "factor_sd")
        )
        fixed = stored.load_if_present(f"{prefix}fixed")
        return cls(net, likelihood, shared, factors, factor_sd, fixed)
