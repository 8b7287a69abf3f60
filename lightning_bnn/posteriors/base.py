"""The posterior: what a strategy leaves behind, whatever the strategy was.

A posterior gives draws of a network's weights, predicts with them, and can be saved and
loaded. It holds its own copy of the network, and every tensor of it that does not vary between
draws (point estimates, frozen weights, buffers) in ``fixed``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from pytorch_lightning.utilities import move_data_to_device
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn import likelihoods
from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import (
    copy_network,
    describe,
    first_difference,
    in_network_order,
    network_tensors,
)
from lightning_bnn.posteriors import store
from lightning_bnn.posteriors.fitted_network import fitted_network
from lightning_bnn.posteriors.prunable import Prunable
from lightning_bnn.predictive import Predictive
from lightning_bnn.selection import Choice
from lightning_bnn.stacked import Mode, StackedModule

if TYPE_CHECKING:
    from lightning_bnn.diagnostics import Diagnosis

__all__ = ["Posterior"]

_CHUNK = 8
_CACHE_BYTES = 2**29

Weights = dict[str, Tensor]
Blobs = dict[str, Mapping[str, Tensor]]


class Posterior(Prunable, ABC):
    """A distribution over the weights of a network.

    Args:
        net: The network; the posterior keeps a copy.
        likelihood: How outputs of the network give targets.
        varying: The names of the parameters and buffers that a draw holds.
        fixed: The others, which are the same in every draw; the network's own values serve for
            those left out.
    """

    kind: ClassVar[str]
    _kinds: ClassVar[dict[str, type[Posterior]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):  # a subclass of a kind does not take its place
            Posterior._kinds[cls.kind] = cls

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        varying: Iterable[str],
        fixed: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.net = copy_network(net)
        self.net.eval()
        self.net.requires_grad_(False)
        self.likelihood = deepcopy(likelihood).eval().requires_grad_(False)
        excluded = set(varying)
        values = {**network_tensors(net), **in_network_order(net, fixed or {}, "fixed")}
        self.fixed = {k: v.detach().clone() for k, v in values.items() if k not in excluded}
        self._stacked = StackedModule(self.net)
        self._cache: tuple[tuple[int, int], list[Weights]] | None = None

    # ---------------------------------------------------------------- what each kind adds

    @abstractmethod
    def draws(
        self, count: int, generator: torch.Generator | None = None, chunk: int = _CHUNK
    ) -> Iterator[Weights]:
        """Yield ``count`` draws, stacked, at most ``chunk`` at a time."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the posterior lies."""

    @property
    def mode(self) -> Mode:
        """How draws run through the network: ``"stacked"``, ``"loop"``, or not yet measured."""
        return self._stacked.mode

    @mode.setter
    def mode(self, value: Mode) -> None:
        self._stacked.mode = value

    @property
    def default_draws(self) -> int:
        """The number of draws that a prediction takes if none is given."""
        return 32

    @abstractmethod
    def _own_blobs(self) -> Blobs:
        """The tensors that this kind has to save, by blob."""

    @classmethod
    @abstractmethod
    def _from_stored(
        cls, stored: store.Stored, entry: Mapping[str, Any], net: nn.Module,
        likelihood: Likelihood, prefix: str,
    ) -> Posterior:  # fmt: skip
        """The inverse of :meth:`_own_blobs`."""

    def _blobs(self) -> Blobs:
        """Everything to save: what the kind adds, what is fixed, what the likelihood learned."""
        common = {"fixed": self.fixed, "likelihood": self.likelihood.state_dict()}
        return {**self._own_blobs(), **{name: blob for name, blob in common.items() if blob}}

    # ---------------------------------------------------------------- sampling, predicting

    def sample(self, count: int, generator: torch.Generator | None = None) -> Weights:
        """``count`` sets of weights, each tensor with a leading axis of draws.

        Only what varies is in it; the rest is in ``fixed``.
        """
        if count < 1:
            raise ConfigurationError(f"The number of draws is at least 1; got {count}.")
        pieces = list(self.draws(count, generator))
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    @torch.no_grad()
    def predict(self, inputs: Any, draws: int | None = None, seed: int = 0) -> Predictive:
        """The predictive mixture of a batch of inputs.

        The same seed gives the same draws, so that batch after batch is seen by the same
        functions. At most eight draws are held at once, unless all of them are small enough
        to keep for the next batch.

        Args:
            inputs: A tensor, a tuple of positional or a mapping of keyword arguments.
            draws: How many sets of weights are mixed; by default what suits the kind.
            seed: Decides the draws.
        """
        count = self.default_draws if draws is None else draws
        if count < 1:
            raise ConfigurationError(f"draws= is at least 1; got {count}.")
        inputs = move_data_to_device(inputs, self.device)
        outputs = []
        for weights in self._chunks(count, seed):
            outputs.append(self._stacked(weights, inputs, self.fixed))
            del weights  # before the next are made
        return self.likelihood.predictive(torch.cat(outputs))

    def diagnose(
        self, inputs: Any, weights: Choice = None, examples: int = 64, elements: int = 200
    ) -> Diagnosis:
        """Whether chains of draws agree: R-hat and ESS of predictions, then of chosen weights.

        See :func:`lightning_bnn.diagnostics.diagnose`.

        Args:
            inputs: Where to watch predictions: a loader, a batch or a tensor.
            weights: Which weights to look at too, such as ``"*.bias"``; none by default.
            examples: At most how many of the inputs are used, evenly chosen.
            elements: At most how many numbers of each quantity and of each weight tensor are
                watched, a fixed choice.
        """
        from lightning_bnn.diagnostics import diagnose

        return diagnose(self, inputs, weights, examples, elements)

    def to_arviz(self, inputs: Any = None, weights: Choice = None, examples: int = 64) -> Any:
        """Predictions and chosen weights of all chains as ArviZ has them.

        See :func:`lightning_bnn.diagnostics.to_arviz`.

        Args:
            inputs: Where to predict: a loader, a batch or a tensor.
            weights: Which weights to include, such as ``"*.bias"``; none by default.
            examples: At most how many of the inputs are used, evenly chosen.
        """
        from lightning_bnn.diagnostics import to_arviz

        return to_arviz(self, inputs, weights, examples)

    def _chunks(self, count: int, seed: int) -> Iterator[Weights] | list[Weights]:
        if self._cache is not None and self._cache[0] == (count, seed):
            return self._cache[1]
        generator = torch.Generator(self.device).manual_seed(seed)
        chunks = self.draws(count, generator)
        first = next(chunks)
        members = next(iter(first.values())).shape[0]
        total = sum(t.numel() * t.element_size() for t in first.values()) * count / members
        if total > _CACHE_BYTES:
            return _chain(first, chunks)
        self._cache = ((count, seed), [first, *chunks])
        return self._cache[1]

    def to(self, device: torch.device | str) -> Self:
        """Move everything to a device, in place."""
        self.net.to(device)
        self.likelihood.to(device)
        self.fixed = {name: tensor.to(device) for name, tensor in self.fixed.items()}
        self._cache = None
        return self

    # ---------------------------------------------------------------- saving, loading

    def save(self, directory: str | PathLike[str]) -> None:
        """Write the posterior to a directory or an fsspec URL.

        A crash at any moment leaves what was there before, or the new posterior, whole.
        """
        smaller: dict[str, Any] = {"compact": True} if self._compact else {}
        if self._compact and (original := self._pruned_from()) is not None:
            smaller["original"] = original
        fields = {**self._entry(), **smaller, "network": describe(self.net)}
        store.write(directory, kind=self.kind, blobs=self._blobs(), fields=fields)

    def _entry(self) -> dict[str, Any]:
        """What the manifest says of this posterior, or of this component of a mixture."""
        return {"kind": self.kind, "likelihood": likelihood_entry(self.likelihood)}

    @staticmethod
    def load(
        directory: str | PathLike[str], net: nn.Module, likelihood: Likelihood | None = None
    ) -> Posterior:
        """Read a posterior of ``net`` from a directory or an fsspec URL.

        Args:
            directory: Where it was saved. (The posterior of a launched run is read by
                ``lightning_bnn.launch.load_run(storage).posterior(net)``.)
            net: A network of the architecture that it was saved with; only its structure and
                its frozen code matter, not its values. For a compact posterior, also the network
                that it was pruned from, which is made smaller.
            likelihood: Needed only if the posterior was made with a likelihood of your own.
        """
        stored = store.read(directory)
        _class_of(stored.kind)
        network = stored.fields.get("network", [])
        if stored.fields.get("compact"):
            original = stored.fields.get("original")
            net = fitted_network(net, describe(net), network, str(directory), original)
        difference = first_difference(network, describe(net))
        if difference:
            raise PosteriorFormatError(
                f"The posterior in {directory} is of another network: {difference} in the given "
                "one. Pass the architecture that the posterior was made with."
            )
        try:
            _check_given(likelihood, stored.fields["likelihood"])
            return restore(stored, stored.fields, net, likelihood, prefix="")
        except KeyError as error:
            raise PosteriorFormatError(
                f"{directory} was not written by Posterior.save: its fields have no {error}."
            ) from error


def restore(
    stored: store.Stored,
    entry: Mapping[str, Any],
    net: nn.Module,
    likelihood: Likelihood | None,
    prefix: str,
) -> Posterior:
    """One posterior, or one component of a mixture, from its entry and its blobs."""
    chosen = _likelihood(entry["likelihood"], likelihood)
    learned = load_if_stored(stored, f"{prefix}likelihood")
    try:
        chosen.load_state_dict(learned)
    except RuntimeError as error:
        raise PosteriorFormatError(
            f"The posterior's likelihood has learned {list(learned)}; {type(chosen).__name__} as "
            f"given has {list(chosen.state_dict())}. Pass likelihood= as it was when the "
            "posterior was made."
        ) from error
    posterior = _class_of(entry["kind"])._from_stored(stored, entry, net, chosen, prefix)
    posterior._compact = bool(stored.fields.get("compact"))
    posterior._original = stored.fields.get("original")
    return posterior


def likelihood_entry(likelihood: Likelihood) -> dict[str, Any]:
    """What a manifest says of a likelihood: its class and its options.

    Example:
        >>> likelihood_entry(likelihoods.Categorical())["name"]
        'Categorical'
    """
    made = type(likelihood)
    ours = getattr(likelihoods, made.__name__, None) is made
    name = made.__name__ if ours else f"{made.__module__}.{made.__qualname__}"
    return {"name": name, "config": likelihood.config()}


def load_if_stored(stored: store.Stored, blob: str) -> Weights:
    """The tensors of a blob; none where an empty blob was left out."""
    return stored.load(blob) if blob in stored.blob_names else {}


def _class_of(kind: str) -> type[Posterior]:
    if kind not in Posterior._kinds:
        raise PosteriorFormatError(
            f"The posterior is of the kind {kind!r}; this version knows "
            f"{sorted(Posterior._kinds)}. Install a newer lightning_bnn."
        )
    return Posterior._kinds[kind]


def _check_given(given: Likelihood | None, entry: Mapping[str, Any]) -> None:
    """A likelihood that is given beside a posterior of ours must be the one it was made with."""
    ours = hasattr(likelihoods, entry["name"])
    if given is None or not ours:
        return
    if type(given).__name__ != entry["name"] or given.config() != entry["config"]:
        raise PosteriorFormatError(
            f"The posterior was made with {entry['name']}, {entry['config']}; the given likelihood "
            f"is {type(given).__name__}, {given.config()}. Leave likelihood= out, or make it the "
            "same."
        )


def _likelihood(entry: Mapping[str, Any], given: Likelihood | None) -> Likelihood:
    known = getattr(likelihoods, entry["name"], None)
    if not (isinstance(known, type) and issubclass(known, Likelihood)):
        if given is not None:
            return deepcopy(given)
        raise PosteriorFormatError(
            f"The posterior was made with the likelihood {entry['name']!r}, which is not one of "
            "lightning_bnn.likelihoods. Pass likelihood=."
        )
    try:
        return known(**entry["config"])
    except (TypeError, ConfigurationError) as error:
        raise PosteriorFormatError(
            f"The posterior's likelihood {entry['name']!r} cannot be made from {entry['config']}: "
            f"{error} Pass likelihood=."
        ) from error


def _chain(first: Weights, rest: Iterator[Weights]) -> Iterator[Weights]:
    yield first
    del first
    yield from rest
