r"""An average over models: posteriors of different networks, each with a weight.

.. math:: p(y\mid x) = \sum_i \varepsilon_i\, p_i(y\mid x),\qquad \sum_i\varepsilon_i = 1.

Each draw of model i weighs :math:`\varepsilon_i` over the number of its draws, so that the weights
are exact whatever that number is: more draws only make :math:`p_i` better. A model that predicts in
closed form stays so. :func:`lightning_bnn.average` finds the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from typing_extensions import Self

from lightning_bnn.checks import check_whole, numbers_of
from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import describe
from lightning_bnn.posteriors.base import (
    Blobs,
    Posterior,
    likelihood_entry,
    read_posterior,
    stored_blobs,
    stored_entry,
)
from lightning_bnn.posteriors.mixture import MixturePosterior
from lightning_bnn.posteriors.weights import WeightPosterior
from lightning_bnn.predictive import Predictive
from lightning_bnn.random import seeded_generator
from lightning_bnn.storage.manifest import MANIFEST, Form, checked
from lightning_bnn.storage.store import Stored

__all__ = ["AveragePosterior", "mixture_of"]


class AveragePosterior(Posterior):
    """A weighted mixture of posteriors of any kinds and networks.

    Without ``draws=`` each model takes as many as suit its kind. Of n draws, each model of a
    positive weight has at least one, and the rest by their weights; if there are fewer draws than
    such models, models are chosen at random, with these probabilities.

    Args:
        components: At least one posterior; all of one task and kind of predictions.
        weights: How much each weighs, from 0 on, with the sum 1; by default all the same.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.posteriors import DrawsPosterior
        >>> nets = [nn.Linear(1, 1, bias=False), nn.Sequential(nn.Linear(1, 1, bias=False))]
        >>> parts = [DrawsPosterior(net, Gaussian(0.1), [{name: torch.full((1, 1), value)}])
        ...          for net, name, value in zip(nets, ("weight", "0.weight"), (1.0, 3.0))]
        >>> average = AveragePosterior(parts, weights=[0.75, 0.25])
        >>> predictive = average.predict(torch.ones(1, 1))
        >>> predictive.mean, predictive.epistemic                      # 0.75 · 0.25 · 2²
        (tensor([[1.5000]]), tensor([[0.7500]]))
    """

    kind = "average"
    form: ClassVar[Form] = {"components": [dict], "weights": [float]}

    def __init__(
        self, components: Sequence[Posterior], weights: Sequence[float] | None = None
    ) -> None:
        several = isinstance(components, Sequence) and len(components) > 0
        if not several or not all(isinstance(one, Posterior) for one in components):
            raise ConfigurationError(
                f"An average is of a list of posteriors, at least one; got {components!r:.80}."
            )
        first = components[0].likelihood
        for index, other in enumerate(components):
            if other.likelihood.predictive_type is not first.predictive_type:
                raise ConfigurationError(
                    "An average is of posteriors of one task and one kind of targets; component 0 "
                    f"has {type(first).__name__} ({first.task}), component {index} has "
                    f"{type(other.likelihood).__name__} ({other.likelihood.task})."
                )
        super().__init__(first)
        self._components = list(components)
        count = len(components)
        self.weights = check_weights([1 / count] * count if weights is None else weights, count)

    @property
    def components(self) -> Sequence[Posterior]:
        """The posteriors that it averages over."""
        return self._components

    def facts(self) -> list[str]:
        """How many models there are, and what they weigh."""
        shown = ", ".join(f"{weight:.3g}" for weight in self.weights[:8])
        more = ", ..." * (len(self.weights) > 8)
        return [f"{len(self._components)} components of the weights {shown}{more}"]

    @property
    def default_draws(self) -> int:
        """As many as the components take by themselves, together."""
        return sum(component.default_draws for component in self._components)

    @property
    def device(self) -> torch.device:
        """Where the posterior lies."""
        return self._components[0].device

    def predict(self, inputs: Any, draws: int | None = None, seed: int = 0) -> Predictive:
        """The weighted mixture of what the components predict, each with its own likelihood."""
        generator = seeded_generator(seed)
        chosen = [(i, w, None) for i, w in enumerate(self.weights) if w > 0]
        shares: Sequence[tuple[int, float, int | None]] = chosen
        if draws is not None:
            count = check_whole("draws", draws, 1)
            shares = _share([w for _, w, _ in chosen], count, generator)
            shares = [(chosen[place][0], weight, number) for place, weight, number in shares]
        # a seed for each: with one for all, models would be moved by the same noise
        seeds = torch.randint(2**62, (len(self._components),), generator=generator).tolist()
        return Predictive.mix(
            [self._components[i].predict(inputs, number, seeds[i]) for i, _, number in shares],
            weights=[weight for _, weight, _ in shares],
        )

    # ---------------------------------------------------------------- saving, loading

    def entry(self) -> dict[str, Any]:
        """The weights, and what there is to say of each component, its network too."""
        parts = [{**stored_entry(one), **one.manifest_fields()} for one in self._components]
        return {"components": parts, "weights": self.weights}

    def blobs(self) -> Blobs:
        """The tensors to save of each component."""
        return {
            f"{index}.{name}": blob
            for index, component in enumerate(self._components)
            for name, blob in stored_blobs(component).items()
        }

    @classmethod
    def from_stored(
        cls, stored: Stored, entry: Mapping[str, Any], net: Any,
        likelihood: Likelihood, prefix: str,
    ) -> Self:  # fmt: skip
        """The inverse of :meth:`blobs` and :meth:`entry`."""
        parts, where = entry["components"], f"{stored.files}: {MANIFEST}"
        if isinstance(net, Sequence) and len(net) != len(parts):
            raise ConfigurationError(
                f"net= is one network, or a list of one or None for each of the {len(parts)} "
                f"models of the average; got {len(net)}."
            )
        own = "." in likelihood_entry(likelihood)["name"]  # of the user's own: not in the files
        components = []
        for index, part in enumerate(parts):
            kind = checked(part, {"kind": str, "network?": list}, where, "components")["kind"]
            given = net[index] if isinstance(net, Sequence) else net
            if isinstance(net, nn.Module):  # it is that of components of its architecture
                described = [[name, list(shape)] for name, shape in describe(net)]
                given = net if described in (part.get("network"), part.get("original")) else None
            held = stored.part(f"{prefix}{index}.", kind, part)
            components.append(read_posterior(held, given, likelihood if own else None))
        try:
            return cls(components, entry["weights"])
        except ConfigurationError as error:
            raise PosteriorFormatError(f"{where} contradicts itself: {error}") from error


def mixture_of(components: Sequence[Posterior]) -> MixturePosterior | AveragePosterior:
    """Posteriors with equal weights: a posterior over weights, if all of them are.

    Args:
        components: At least one, such as the members of an ensemble.
    """
    over_weights = [one for one in components if isinstance(one, WeightPosterior)]
    if len(over_weights) == len(components):
        return MixturePosterior(over_weights)
    return AveragePosterior(components)


def check_weights(weights: Any, count: int) -> list[float]:
    """The weights, if they are as many numbers from 0 on whose sum is 1.

    Example:
        >>> check_weights([0.5, 0.4], 2)
        Traceback (most recent call last):
        lightning_bnn.errors.ConfigurationError: weights= are 2 numbers from 0 on ... [0.5, 0.4].
    """
    values = numbers_of(weights)
    good = len(values) == count and all(math.isfinite(one) and one >= 0 for one in values)
    if not good or not math.isclose(sum(values), 1, abs_tol=1e-6):
        raise ConfigurationError(
            f"weights= are {count} numbers from 0 on whose sum is 1; got {weights!r:.200}."
        )
    return [one / sum(values) for one in values]


def _share(
    weights: Sequence[float], count: int, generator: torch.Generator
) -> list[tuple[int, float, int]]:
    """Which components have how many of the draws, and what they weigh then."""
    models = len(weights)
    if count < models:  # systematic resampling
        edges = np.cumsum(weights)
        points = (float(torch.rand((), generator=generator)) + np.arange(count)) / count
        places = np.minimum(np.searchsorted(edges, points * edges[-1]), models - 1)
        found = zip(*np.unique(places, return_counts=True), strict=True)
        return [(int(i), int(number) / count, int(number)) for i, number in found]
    wanted = np.maximum(count * np.array(weights) - 1, 0)
    exact = wanted * (count - models) / max(wanted.sum(), 1e-300)
    numbers = np.floor(exact)
    rest = int(count - models - numbers.sum())
    numbers[np.argsort(numbers - exact, kind="stable")[:rest]] += 1
    return [(i, weights[i], 1 + int(number)) for i, number in enumerate(numbers)]
