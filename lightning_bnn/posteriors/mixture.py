"""A mixture of posteriors, which is again a posterior: ensembles, chains, model averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import Self

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import describe, first_difference, network_tensors
from lightning_bnn.posteriors.base import _CHUNK, Blobs, Posterior, Weights, restore
from lightning_bnn.posteriors.prunable import Change, mean_of
from lightning_bnn.posteriors.store import Stored
from lightning_bnn.predictive import Predictive
from lightning_bnn.selection import Choice
from lightning_bnn.stacked import Mode

if TYPE_CHECKING:
    from lightning_bnn.pruning.masks import Rest, Scope, Unit

__all__ = ["MixturePosterior"]


class MixturePosterior(Posterior):
    """Posteriors of one network, with equal weights.

    Draws are shared out evenly: of n draws each of the K components gives n/K, and a rest is
    given to components chosen at random.

    Args:
        components: At least one posterior; all of the same architecture and likelihood.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.posteriors import DrawsPosterior
        >>> net = nn.Linear(1, 1, bias=False)
        >>> parts = [DrawsPosterior(net, Gaussian(0.1), [{"weight": torch.full((1, 1), value)}])
        ...          for value in (1.0, 3.0)]
        >>> MixturePosterior(parts).predict(torch.ones(1, 1), draws=2).epistemic
        tensor([[1.]])
    """

    kind = "mixture"

    def __init__(self, components: Sequence[Posterior]) -> None:
        if not components:
            raise ConfigurationError("A mixture needs at least one posterior; got none.")
        first = components[0]
        for index, component in enumerate(components[1:], start=1):
            difference = first_difference(describe(first.net), describe(component.net))
            if difference:
                raise ConfigurationError(
                    "The components of a mixture need one architecture; in component 0 "
                    f"{difference} in component {index}."
                )
            if type(component.likelihood) is not type(first.likelihood):
                raise ConfigurationError(
                    "The components of a mixture need one likelihood; component 0 has "
                    f"{type(first.likelihood).__name__}, component {index} has "
                    f"{type(component.likelihood).__name__}."
                )
        self._names = list(network_tensors(first.net))
        # what is fixed within a component varies between components
        super().__init__(first.net, first.likelihood, self._names)
        self.components = list(components)
        self._compact = any(component._compact for component in components)

    @property
    def mode(self) -> Mode:
        """How draws run through the network: that of the first component."""
        return self.components[0].mode

    @mode.setter
    def mode(self, value: Mode) -> None:
        for component in self.components:
            component.mode = value

    @property
    def default_draws(self) -> int:
        """As many as the components take by themselves, together."""
        return sum(component.default_draws for component in self.components)

    @property
    def device(self) -> torch.device:
        """Where the posterior lies."""
        return self.components[0].device

    def draws(
        self, count: int, generator: torch.Generator | None = None, chunk: int = _CHUNK
    ) -> Iterator[Weights]:
        """Yield ``count`` draws, stacked, at most ``chunk`` at a time."""
        for component, number in self._share(count, generator):
            for weights in component.draws(number, generator, chunk):
                size = next(iter(weights.values())).shape[0]
                fixed = {k: v.expand(size, *v.shape) for k, v in component.fixed.items()}
                tensors = {**weights, **fixed}
                yield {name: tensors[name] for name in self._names}

    def predict(self, inputs: Any, draws: int | None = None, seed: int = 0) -> Predictive:
        """The mixture of what the components predict, each with its own likelihood.

        Members of an ensemble may have learned different noise, so their outputs alone do not
        tell what they predict.
        """
        count = self.default_draws if draws is None else draws
        if count < 1:
            raise ConfigurationError(f"draws= is at least 1; got {count}.")
        generator = torch.Generator(self.device).manual_seed(seed)
        shares = self._share(count, generator)
        # a seed for each: with one for all, members would be moved by the same noise
        seeds = torch.randint(2**62, (len(shares),), generator=generator, device=self.device)
        return Predictive.mix(
            [
                component.predict(inputs, number, one)
                for (component, number), one in zip(shares, seeds.tolist(), strict=True)
            ]
        )

    def _share(self, count: int, generator: torch.Generator | None) -> list[tuple[Posterior, int]]:
        """Each component that has a part in ``count`` draws, and its number of them."""
        members = len(self.components)
        share, rest = divmod(count, members)
        device = self.device if generator is None else generator.device
        lucky = torch.randperm(members, generator=generator, device=device)[:rest].tolist()
        numbers = [share + (index in lucky) for index in range(members)]
        return [(c, number) for c, number in zip(self.components, numbers, strict=True) if number]

    def to(self, device: torch.device | str) -> Self:
        """Move everything to a device, in place."""
        for component in self.components:
            component.to(device)
        return super().to(device)

    def pruned(
        self, fraction: float, *, unit: Unit = "weight", scope: Scope = "global",
        protect: Choice = None, rest: Rest = "raise",
    ) -> Self:  # fmt: skip
        """A new mixture without the weights of the lowest signal-to-noise ratio.

        Where every component has variances of its own (MultiSWAG), each is pruned by its own; else
        (the members of an ensemble, each a single draw) one ratio of the whole mixture decides for
        all. See :meth:`Posterior.pruned` for the arguments.
        """
        from lightning_bnn.pruning.signal import separate

        if len(separate(self)) == 1:
            return super().pruned(fraction, unit=unit, scope=scope, protect=protect, rest=rest)
        return type(self)(
            [
                component.pruned(fraction, unit=unit, scope=scope, protect=protect, rest=rest)
                for component in self.components
            ]
        )

    @property
    def sparsity(self) -> float:
        """The mean over the components, which may have lost different weights."""
        return sum(component.sparsity for component in self.components) / len(self.components)

    def support(self) -> Weights:
        """For every tensor: False where it is zero in all draws of all components."""
        found = self.components[0].support()
        for component in self.components[1:]:
            found = {name: found[name] | mask for name, mask in component.support().items()}
        return found

    def _mapped(self, net: nn.Module, change: Change) -> Self:
        return type(self)([component._mapped(net, change) for component in self.components])

    def _mean_weights(self) -> Weights:
        return mean_of({**part.fixed, **part._mean_weights()} for part in self.components)

    def _varying(self) -> list[str]:
        """Those that vary within a component, and those that differ between components."""
        inside = {name for component in self.components for name in component._varying()}
        first = self.components[0].fixed
        return [
            name
            for name, _ in self.net.named_parameters()
            if name in inside
            or any(not torch.equal(first[name], part.fixed[name]) for part in self.components[1:])
        ]

    def _own_blobs(self) -> Blobs:
        return {
            f"{index}.{name}": blob
            for index, component in enumerate(self.components)
            for name, blob in component._blobs().items()
        }

    def _entry(self) -> dict[str, Any]:
        components = [component._entry() for component in self.components]
        return {**super()._entry(), "components": components}

    @classmethod
    def _from_stored(
        cls, stored: Stored, entry: Mapping[str, Any], net: nn.Module,
        likelihood: Likelihood, prefix: str,
    ) -> MixturePosterior:  # fmt: skip
        return cls(
            [
                restore(stored, component, net, likelihood, f"{prefix}{index}.")
                for index, component in enumerate(entry["components"])
            ]
        )
