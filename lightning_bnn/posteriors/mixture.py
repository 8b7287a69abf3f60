"""A mixture of posteriors, which is again a posterior: ensembles, chains, model averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import describe, first_difference, network_tensors
from lightning_bnn.posteriors.base import Blobs, restore, stored_blobs, stored_entry
from lightning_bnn.posteriors.moments import Moments, RunningMoments
from lightning_bnn.posteriors.weights import (
    CHUNK,
    Change,
    Description,
    WeightPosterior,
    Weights,
)
from lightning_bnn.predictive import Predictive
from lightning_bnn.random import seeded_generator
from lightning_bnn.storage.manifest import Form
from lightning_bnn.storage.store import Stored

__all__ = ["MixturePosterior"]


class MixturePosterior(WeightPosterior):
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
    form: ClassVar[Form] = {"components": [dict]}

    def __init__(self, components: Sequence[WeightPosterior]) -> None:
        several = isinstance(components, Sequence)
        if not several or not all(isinstance(one, WeightPosterior) for one in components):
            raise ConfigurationError(
                f"A mixture is of a list of posteriors over weights; got {components!r:.80}."
            )
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
        self._components = list(components)
        self._stacked = first._stacked  # what its first component has measured is its mode
        self.cache_share = 1.0  # which the components share

    @property
    def components(self) -> Sequence[WeightPosterior]:
        """The posteriors that it is a mixture of."""
        return self._components

    @property
    def pruned_from(self) -> Description | None:
        """The larger network of the components, if they are compact."""
        return self._components[0].pruned_from

    @pruned_from.setter
    def pruned_from(self, value: Description | None) -> None:
        for component in self._components:
            component.pruned_from = value

    @property
    def default_draws(self) -> int:
        """As many as the components take by themselves, together."""
        return sum(component.default_draws for component in self._components)

    @property
    def device(self) -> torch.device:
        """Where the posterior lies."""
        return self._components[0].device

    def draws(
        self, count: int, generator: torch.Generator | None = None, chunk: int = CHUNK
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
        generator = seeded_generator(seed, self.device)
        shares = self._share(self.number_of(draws), generator)
        # a seed for each: with one for all, members would be moved by the same noise
        seeds = torch.randint(2**62, (len(shares),), generator=generator, device=self.device)
        return Predictive.mix(
            [
                component.predict(inputs, number, component_seed)
                for (component, number), component_seed in zip(shares, seeds.tolist(), strict=True)
            ]
        )

    def _share(
        self, count: int, generator: torch.Generator | None
    ) -> list[tuple[WeightPosterior, int]]:
        """Each component that has a part in ``count`` draws, and its number of them."""
        members = len(self._components)
        share, rest = divmod(count, members)
        device = self.device if generator is None else generator.device
        extra = torch.randperm(members, generator=generator, device=device)[:rest].tolist()
        numbers = [share + (index in extra) for index in range(members)]
        return [(c, number) for c, number in zip(self._components, numbers, strict=True) if number]

    def moments(self) -> Moments:
        """By the law of total variance: the mean variance, and the variance of the means.

        A mixture of single draws (the members of an ensemble) is the same as these draws.
        """
        running = RunningMoments(self.varying)
        for component in self._components:
            moments = component.moments()
            running.add({**component.fixed, **moments.mean}, moments.variance)
        count = len(self._components)
        points = count > 1 and not any(component.has_variance for component in self._components)
        return running.result(count - 1 if points else count)

    def covariance_matrix(self) -> Tensor:
        """By the law of total covariance, as :meth:`moments`."""
        names, count = self.varying, len(self._components)
        means, inside = [], torch.zeros(())
        for component in self._components:
            values = {**component.fixed, **component.mean}
            means.append(torch.cat([values[name].double().cpu().flatten() for name in names]))
            inside = inside + component.covariance_of(names) / count
        centred = torch.stack(means) - torch.stack(means).mean(0)
        points = count > 1 and not any(component.has_variance for component in self._components)
        return inside + centred.T @ centred / (count - 1 if points else count)

    @property
    def mean(self) -> Weights:
        """The mean of every tensor; counters are those of the last component."""
        running = RunningMoments(self._names)
        for component in self._components:
            running.add({**component.fixed, **component.mean})
        return running.mean()

    @property
    def has_variance(self) -> bool:
        """Whether there are several components, or the only one has a variance."""
        return len(self._components) > 1 or self._components[0].has_variance

    @property
    def varying(self) -> list[str]:
        """Those that vary within a component, and those that differ between components."""
        inside = {name for component in self._components for name in component.varying}
        first, *others = (component.fixed for component in self._components)
        return [
            name
            for name, _ in self.net.named_parameters()
            if name in inside or any(not torch.equal(first[name], other[name]) for other in others)
        ]

    def map(self, change: Change, net: nn.Module | None = None) -> Self:
        """A mixture of the changed components."""
        return type(self)([component.map(change, net) for component in self._components])

    def entry(self) -> dict[str, Any]:
        """What there is to say of each component."""
        return {"components": [stored_entry(component) for component in self._components]}

    def blobs(self) -> Blobs:
        """The tensors to save of each component."""
        return {
            f"{index}.{name}": blob
            for index, component in enumerate(self._components)
            for name, blob in stored_blobs(component).items()
        }

    @classmethod
    def from_stored(
        cls, stored: Stored, entry: Mapping[str, Any], net: nn.Module,
        likelihood: Likelihood, prefix: str,
    ) -> Self:  # fmt: skip
        """The inverse of :meth:`blobs` and :meth:`entry`."""
        return cls(
            [
                restore(stored, component, net, likelihood, f"{prefix}{index}.")
                for index, component in enumerate(entry["components"])
            ]
        )
