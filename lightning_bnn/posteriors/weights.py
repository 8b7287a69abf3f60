"""A posterior over the weights of a network.

It gives draws of the weights, predicts with them, and knows the mean and the variance of each. It
holds its own copy of the network, and every tensor of it that does not vary between draws (point
estimates, frozen weights, buffers) in ``fixed``. What else is done with weights (pruning,
compacting, diagnosis, export) are functions over :meth:`WeightPosterior.draws`,
:meth:`WeightPosterior.moments` and :meth:`WeightPosterior.map`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from lightning_bnn.checks import check_kind, check_whole
from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.lightning import move_data_to_device
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import (
    copy_network,
    describe,
    first_difference,
    in_network_order,
    in_precision_of,
    network_tensors,
)
from lightning_bnn.posteriors.base import Blobs, Posterior
from lightning_bnn.posteriors.moments import Moments
from lightning_bnn.predictive import Predictive
from lightning_bnn.random import isolated_random_state, seeded_generator
from lightning_bnn.recipes import bounded, make, network_recipe
from lightning_bnn.resize import resized
from lightning_bnn.shared_part import SharedPart
from lightning_bnn.stacked import Mode, StackedModule
from lightning_bnn.storage.manifest import MANIFEST, SHAPE, checked
from lightning_bnn.storage.store import Stored
from lightning_bnn.storage.stream import Change, Weights

__all__ = [
    "CACHE_BYTES", "CHUNK", "Change", "Correlations", "Description", "WeightPosterior", "Weights",
    "changed", "network_fields", "stored_network",
]  # fmt: skip

CHUNK = 8
_MOST_PER_BYTE = 256  # numbers: zeros are stored in less than a byte for each
_LEAST_BYTES = 40  # of a blob, to name a tensor
CACHE_BYTES = 2**29
_PER_WEIGHT = 100  # draws for a covariance

Correlations = Literal["none", "known", "estimated"]

Description = Sequence[Sequence[Any]]

_TENSORS = [(str, SHAPE)]
_FORM = {"network": _TENSORS, "recipe?": object, "original?": _TENSORS}


class WeightPosterior(Posterior):
    """A distribution over the weights of a network.

    Args:
        net: The network; the posterior keeps a copy.
        likelihood: How outputs of the network give targets.
        varying: The names of the parameters and buffers that a draw holds.
        fixed: The others, which are the same in every draw; the network's own values serve for
            those left out.

    Attributes:
        pruned_from: For a compact posterior, the names and shapes of the larger network that it
            was made of; otherwise None.
    """

    pruned_from: Description | None = None

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        varying: Iterable[str],
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__(likelihood)
        self.net = copy_network(net)
        self.net.eval()
        self.net.requires_grad_(False)
        excluded = set(varying)
        values = {**network_tensors(net)}
        if fixed is not None:
            values |= in_network_order(net, fixed, "fixed")
        self.fixed = {k: v.detach().clone() for k, v in values.items() if k not in excluded}
        self._stacked = StackedModule(self.net)
        self._shared = SharedPart(self._stacked)
        self._cache: tuple[tuple[int, int], list[Weights]] | None = None
        self._cache_share = 1.0

    # ---------------------------------------------------------------- what each kind adds

    @abstractmethod
    def draws(
        self, count: int, generator: torch.Generator | None = None, chunk: int = CHUNK
    ) -> Iterator[Weights]:
        """Yield ``count`` draws, stacked, at most ``chunk`` at a time."""

    @abstractmethod
    def moments(self) -> Moments:
        """Mean and variance of each weight by itself, at least in float32."""

    @abstractmethod
    def map(self, change: Change, net: nn.Module | None = None) -> Self:
        """The same kind of posterior, with every stored tensor changed.

        Args:
            change: From the name of a tensor and its values, which may have more axes in front, to
                new values.
            net: Where the shapes change, the smaller network that they are of. The new posterior is
                a compact one: it loads into the larger network, too.
        """

    @property
    def mean(self) -> Weights:
        """The mean of every tensor that varies, buffers too, by name."""
        return self.moments().mean

    @property
    def has_variance(self) -> bool:
        """Whether a weight varies; stored draws are not read for it."""
        return any(bool(variance.any()) for variance in self.moments().variance.values())

    @property
    def correlations(self) -> Correlations:
        """What :meth:`covariance_matrix` has beside the diagonal."""
        return "estimated"

    def covariance_matrix(self) -> Tensor:
        """The covariance of all weights that vary, side by side in their order, (P, P), in float64.

        By default that of draws: of all that there are, or of many more than there are weights.

        Example:
            >>> from lightning_bnn import DrawsPosterior
            >>> from lightning_bnn.likelihoods import Gaussian
            >>> draws = [{"weight": torch.tensor([[w, 2 * w]])} for w in (-1.0, 0.0, 1.0)]
            >>> posterior = DrawsPosterior(nn.Linear(2, 1), Gaussian(0.1), draws)
            >>> posterior.covariance_matrix()
            tensor([[1., 2.],
                    [2., 4.]], dtype=torch.float64)
        """
        names = self.varying
        sizes = {name: parameter.numel() for name, parameter in self.net.named_parameters()}
        size = sum(sizes[name] for name in names)
        count = len(self) if isinstance(self, Sized) else _PER_WEIGHT * size
        total = torch.zeros(size + 1, size + 1, dtype=torch.float64)
        means = self.mean
        mean = torch.cat([means[name].double().cpu().flatten() for name in names])
        for stacked in self.draws(count, seeded_generator(0, self.device)):
            flat = torch.cat([stacked[name].flatten(1) for name in names], dim=1)
            rows = F.pad(flat.double().cpu() - mean, (0, 1), value=1.0)
            total += rows.T @ rows
        shift = total[:-1, -1:] / count
        return (total[:-1, :-1] - count * shift @ shift.T) / max(1, count - 1)

    def covariance_of(self, names: Sequence[str]) -> Tensor:
        """The covariance of some parameters, in their order; 0 of those that do not vary."""
        sizes = {name: parameter.numel() for name, parameter in self.net.named_parameters()}
        varying = [sizes[name] for name in self.varying]
        places = dict(zip(self.varying, torch.arange(sum(varying)).split(varying), strict=True))
        nowhere = torch.tensor(sum(varying))  # a last row and column of zeros
        where = [places.get(name, nowhere.expand(sizes[name])) for name in names]
        matrix = F.pad(self.covariance_matrix(), (0, 1, 0, 1))
        return matrix[torch.cat(where)][:, torch.cat(where)]

    def weight_blobs(self) -> Iterable[Mapping[str, Tensor]]:
        """Groups of tensors by the names of the network's; what is 0 in all is 0 in every draw.

        A kind overrides it that is made of tensors of other names.
        """
        return self.blobs().values()

    # ---------------------------------------------------------------- what all kinds have

    @property
    def varying(self) -> list[str]:
        """The names of the parameters that are not the same in every draw."""
        return [name for name, _ in self.net.named_parameters() if name not in self.fixed]

    def facts(self) -> list[str]:
        """The network, how many of its parameters vary, and how many draws or components are held.

        Example:
            >>> from lightning_bnn import DrawsPosterior
            >>> from lightning_bnn.likelihoods import Categorical
            >>> net = nn.Linear(2, 3)
            >>> DrawsPosterior(net, Categorical(), [{"bias": torch.zeros(3)}] * 2)
            DrawsPosterior(Linear, 3 of 9 parameters inferred, 2 draws, Categorical())
        """
        sizes = {name: parameter.numel() for name, parameter in self.net.named_parameters()}
        inferred = sum(sizes[name] for name in self.varying)
        facts = [
            type(self.net).__name__,
            f"{inferred:,} of {sum(sizes.values()):,} parameters inferred",
        ]
        if self.pruned_from is not None:
            facts.append("compact")
        if isinstance(self, Sized):
            facts.append("1 draw" if len(self) == 1 else f"{len(self)} draws")
        if len(self.components) > 1:
            facts.append(f"{len(self.components)} components")
        return facts

    @property
    def components(self) -> Sequence[WeightPosterior]:
        """The posteriors that a mixture is of; any other is its only component."""
        return [self]

    @property
    def mode(self) -> Mode:
        """How draws run through the network: ``"stacked"``, ``"loop"``, or not yet measured."""
        return self._stacked.mode

    @mode.setter
    def mode(self, value: Mode) -> None:
        self._stacked.mode = value
        for component in self.components:
            if component is not self:
                component.mode = value

    @property
    def cache_share(self) -> float:
        """What part of the memory in which draws are kept for the next batch may be its own.

        A mixture gives each of its components the same part of its own: one limit is for all.
        """
        return self._cache_share

    @cache_share.setter
    def cache_share(self, value: float) -> None:
        self._cache_share = value
        for component in self.components:
            if component is not self:
                component.cache_share = value / len(self.components)

    def outputs(self, weights: Mapping[str, Tensor], inputs: Any) -> Tensor:
        """The network's outputs for a batch with stacked draws, (draws, batch, ...)."""
        return self._stacked(weights, inputs, self.fixed)

    def sample(self, count: int, generator: torch.Generator | None = None) -> Weights:
        """``count`` sets of weights, each tensor with a leading axis of draws.

        Only what varies is in it; the rest is in ``fixed``.
        """
        if generator is not None:
            check_kind("generator", generator, torch.Generator, "a torch.Generator")
        pieces = list(self.draws(self.number_of(count), generator))
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    @torch.no_grad()
    def predict(self, inputs: Any, draws: int | None = None, seed: int = 0) -> Predictive:
        """The predictive mixture of a batch of inputs.

        The same seed gives the same draws, so that batch after batch is seen by the same
        functions. At most eight draws are held at once, unless all of them are small enough
        to keep for the next batch. Floating-point inputs are converted to the network's precision.

        Args:
            inputs: A tensor, a tuple of positional or a mapping of keyword arguments.
            draws: How many sets of weights are mixed; by default what suits the kind.
            seed: Decides the draws.
        """
        count = self.number_of(draws)
        chunks = iter(self._chunks(count, seed))
        first = next(chunks)
        inputs = move_data_to_device(inputs, self.device)
        inputs = in_precision_of({**self.fixed, **first}, self.net, inputs)
        chunks = chain(iter([first]), chunks)
        del first  # before the next are made
        outputs = self._shared.outputs(chunks, inputs, self.fixed, single=count == 1)
        return self.likelihood.predictive(outputs)

    def number_of(self, draws: int | None) -> int:
        """The number of draws that are asked for, at least one."""
        count = self.default_draws if draws is None else draws
        return check_whole("draws", count, 1)

    def _chunks(self, count: int, seed: int) -> Iterable[Weights]:
        cache = self._cache  # looked at once: another thread may replace it
        if cache is not None and cache[0] == (count, seed):
            return cache[1]
        generator = seeded_generator(seed, self.device)
        chunks = self.draws(count, generator)
        first = next(chunks)
        members = next(iter(first.values())).shape[0]
        total = sum(t.numel() * t.element_size() for t in first.values()) * count / members
        if total > CACHE_BYTES * self._cache_share:
            return chain(iter([first]), chunks)
        kept = [first, *chunks]
        self._cache = ((count, seed), kept)
        return kept

    def to(self, device: torch.device | str) -> Self:
        """Move everything to a device, in place."""
        self._cache = None
        return super().to(device)

    def made_from(self, other: WeightPosterior, changed: nn.Module | None = None) -> Self:
        """Take over from another what no constructor takes; a kind's :meth:`map` ends with it.

        Args:
            other: The posterior that this one was made of.
            changed: The network that was given to :meth:`map`.
        """
        self.mode, self.pruned_from = other.mode, other.pruned_from
        if changed is not None:
            self.pruned_from = other.pruned_from or describe(other.net)
        return self

    # ---------------------------------------------------------------- saving, loading

    def blobs(self) -> Blobs:
        """The tensors to save; each kind adds its own."""
        return {"fixed": self.fixed} if self.fixed else {}

    def manifest_fields(self) -> dict[str, Any]:
        """The network's names and shapes, how to make it, and the larger one if it is compact."""
        fields = network_fields(self.net)
        if self.pruned_from is not None:
            fields |= {"compact": True, "original": self.pruned_from}
        return fields

    @classmethod
    def from_manifest(cls, stored: Stored, net: Any, likelihood: Likelihood | None) -> Posterior:
        """The posterior of a manifest, if the network is one of the same names and shapes."""
        net = stored_network(stored, net)
        posterior = super().from_manifest(stored, net, likelihood)
        assert isinstance(posterior, WeightPosterior)
        posterior.pruned_from = stored.fields.get("original")
        return posterior


def network_fields(net: nn.Module) -> dict[str, Any]:
    """What a manifest says of a network: names and shapes, and its recipe if it has one."""
    made = network_recipe(net)
    return {"network": describe(net), **({} if made is None else {"recipe": made})}


def stored_network(stored: Stored, net: Any) -> nn.Module:
    """The network of a manifest: the given one if it is of the same names and shapes, or made anew.

    Args:
        stored: What was saved, with :func:`network_fields` in its manifest.
        net: The given one; of a compact posterior it may be the larger network.
    """
    checked(stored.fields, _FORM, f"{stored.files}: {MANIFEST}", "fields")
    network, pruned_from = stored.fields["network"], stored.fields.get("original")
    size, held = sum(math.prod(shape) for _, shape in network), stored.files.size("blobs")
    # before time and memory are taken for it
    if size > _MOST_PER_BYTE * (held + 1000) or len(network) * _LEAST_BYTES > held + 1000:
        raise PosteriorFormatError(
            f"The network in {stored.files} has {len(network):,} tensors of {size:,} numbers, "
            f"its blobs only {held:,} bytes. Restore them from a copy."
        )
    if net is None:
        net = _made_again(stored, network)
    if describe(net) == pruned_from:
        net = resized(net, dict(network))
    difference = first_difference(network, describe(net))
    if difference:
        raise PosteriorFormatError(
            f"The posterior in {stored.files} is of another network: {difference} in the given "
            "one. Pass the architecture that the posterior was made with."
        )
    return net


def _made_again(stored: Stored, network: Description) -> nn.Module:
    """The network of a manifest's recipe, if it is the one that the manifest describes."""
    if "recipe" not in stored.fields:
        raise ConfigurationError(
            f"The posterior in {stored.files} is one over the weights of a network of your own. "
            "Pass net=, a network of the architecture that it was made with; on the command line, "
            "give the configuration of the fit with --config FILE."
        )
    recipe = stored.fields["recipe"]
    most = 50 * (100 + len(network))  # known layers and models take up to 10 for each tensor
    with torch.device("meta"), bounded(most):  # neither memory nor random numbers
        made = make(recipe)
    if not isinstance(made, nn.Module):
        raise PosteriorFormatError(f"The recipe in {stored.files} makes no network.")
    difference = first_difference(network, describe(made))
    if difference:
        raise PosteriorFormatError(
            f"The manifest in {stored.files} contradicts itself: {difference} in the network that "
            "its recipe makes."
        )
    with isolated_random_state(0):
        net: nn.Module = make(recipe)
    return net


def changed(change: Change, tensors: Mapping[str, Tensor]) -> Weights:
    """A group of tensors with each of them changed.

    Example:
        >>> changed(lambda name, tensor: tensor + 1, {"w": torch.zeros(1)})
        {'w': tensor([1.])}
    """
    return {name: change(name, tensor) for name, tensor in tensors.items()}
