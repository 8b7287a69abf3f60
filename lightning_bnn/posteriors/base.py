"""The posterior: what a strategy leaves behind, whatever the strategy was.

A posterior predicts, and can be saved and loaded. That is all a Gaussian process or a dropout
network needs to be one: a class with a ``kind``, which says in :meth:`Posterior.blobs` and
:meth:`Posterior.entry` what it is made of, and in :meth:`Posterior.from_stored` how to make it from
these again. :class:`~lightning_bnn.posteriors.weights.WeightPosterior` is a posterior over the
weights of a network.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from os import PathLike
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn import likelihoods
from lightning_bnn.checks import check_device
from lightning_bnn.errors import LightningBNNError, PosteriorFormatError
from lightning_bnn.lightning import move_data_to_device
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.likelihoods.base import check_likelihood
from lightning_bnn.predictive import Predictive
from lightning_bnn.storage import store
from lightning_bnn.storage.manifest import MANIFEST, Form, checked

__all__ = [
    "Blobs", "Evidence", "Posterior", "likelihood_entry", "read_posterior", "restore",
    "stored_blobs", "stored_entry",
]  # fmt: skip

Blobs = dict[str, Mapping[str, Tensor]]
Nets = nn.Module | Sequence[nn.Module | None] | None

_ENTRY = {
    "kind": str,
    "likelihood": {"name": str, "config": dict},
    "evidence?": {"value": float, "error": float, "method": str},
}
_TRIES = 20  # to read a posterior that is saved anew again and again
# what constructors raise that are given tensors and options of different origin
_MISFITS = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError),
    *(StopIteration, TypeError, ValueError),
)


class Evidence(NamedTuple):
    """The logarithm of p(D), the probability of the training data under a model, in nats.

    Attributes:
        value: It, or an estimate.
        error: The standard error of the estimate, of Monte Carlo and of discretisation; 0 of what
            has none. That of an approximation (Laplace, a bound) is not in it.
        method: How it was found. Of an ``"ELBO"`` the value is a lower bound.

    Example:
        >>> print(Evidence(-12.3456, 0.0789, "ELBO"))
        at least -12.35 ± 0.08 (ELBO)
    """

    value: float
    error: float = 0.0
    method: str = "given"

    @property
    def is_bound(self) -> bool:
        """Whether it is a lower bound."""
        return self.method == "ELBO"

    def __str__(self) -> str:
        error = f" ± {self.error:.2f}" if self.error else ""
        return f"{'at least ' * self.is_bound}{self.value:.2f}{error} ({self.method})"


class Posterior(ABC):
    """What predicts with uncertainty, and can be saved and loaded.

    A class of it that has a name for its ``kind`` can be loaded by :meth:`load`.

    Args:
        likelihood: How what is computed from the inputs gives targets; the posterior keeps a copy.

    Attributes:
        kind: Its name on the disk.
        form: What :meth:`entry` gives, as for :func:`lightning_bnn.storage.manifest.check_form`: a
            file may be somebody else's, and is checked before it is believed.
        evidence: The log evidence of the model whose posterior it is, if it is known. It is saved,
            and may be set, as after :func:`lightning_bnn.evidence.annealed_importance`. What is
            made by :meth:`WeightPosterior.map` has none.
    """

    evidence: Evidence | None = None
    kind: ClassVar[str]
    form: ClassVar[Form] = {}
    _kinds: ClassVar[dict[str, type[Posterior]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):  # a subclass of a kind does not take its place
            Posterior._kinds[cls.kind] = cls

    def __init__(self, likelihood: Likelihood) -> None:
        check_likelihood(likelihood)
        self.likelihood = deepcopy(likelihood).eval().requires_grad_(False)

    # ---------------------------------------------------------------- what each kind adds

    @abstractmethod
    def predict(self, inputs: Any, draws: int | None = None, seed: int = 0) -> Predictive:
        """The predictive mixture of a batch of inputs.

        Args:
            inputs: A tensor, a tuple of positional or a mapping of keyword arguments.
            draws: How many predictions are mixed; by default what suits the kind.
            seed: Decides the draws: the same seed gives the same ones.
        """

    @abstractmethod
    def blobs(self) -> Blobs:
        """The tensors to save, as named groups; what the likelihood learned is saved with them."""

    def entry(self) -> dict[str, Any]:
        """What else to save, as JSON."""
        return {}

    @classmethod
    @abstractmethod
    def from_stored(
        cls, stored: store.Stored, entry: Mapping[str, Any], net: Any,
        likelihood: Likelihood, prefix: str,
    ) -> Self:  # fmt: skip
        """The inverse of :meth:`blobs` and :meth:`entry`.

        Args:
            stored: What was saved: ``stored.load(f"{prefix}{name}")`` reads a group of tensors.
            entry: What :meth:`entry` gave, and more.
            net: The network that was given to :meth:`load`.
            likelihood: The likelihood, with what it had learned.
            prefix: What the names of the groups begin with, if this is a component of a mixture.
        """

    def facts(self) -> list[str]:
        """What is shown of it beside its kind and its likelihood, in few words."""
        return []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join([*self.facts(), repr(self.likelihood)])})"

    @property
    def default_draws(self) -> int:
        """The number of draws that a prediction takes if none is given."""
        return 32

    @property
    def device(self) -> torch.device:
        """Where the posterior lies."""
        tensors = (tensor for blob in self.blobs().values() for tensor in blob.values())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def to(self, device: torch.device | str) -> Self:
        """Move everything to a device, in place: all tensors, and what has a ``to`` of its own."""
        place = check_device(device)
        for name, value in vars(self).items():
            setattr(self, name, move_data_to_device(value, place))
        return self

    # ---------------------------------------------------------------- saving, loading

    def save(self, directory: str | PathLike[str]) -> None:
        """Write the posterior to a directory or an fsspec URL.

        A crash at any moment leaves what was there before, or the new posterior, whole.
        """
        fields = {**stored_entry(self), **self.manifest_fields()}
        store.write(directory, kind=self.kind, blobs=stored_blobs(self), fields=fields)

    def manifest_fields(self) -> dict[str, Any]:
        """What a manifest says once, of a mixture as a whole: nothing, but for weights."""
        return {}

    @classmethod
    def load(
        cls,
        directory: str | PathLike[str],
        net: Nets = None,
        likelihood: Likelihood | None = None,
    ) -> Self:
        """Read a posterior from a directory or an fsspec URL.

        ``Posterior.load`` reads any kind; ``WeightPosterior.load`` any that is over weights.

        Args:
            directory: Where it was saved. (The posterior of a launched run is read by
                ``lightning_bnn.launch.load_run(storage).posterior(net)``.)
            net: For a posterior over weights, a network of the architecture that it was saved with;
                only its structure and its frozen code matter, not its values. For a compact
                posterior, also the network that it was pruned from, which is made smaller. Networks
                of torch.nn's layers, of torchvision and of this package are made from the file.
                For an average over models, one network that is of all of them, or a list of one
                (or None) for each.
            likelihood: Needed only if the posterior was made with a likelihood of your own.
        """
        if likelihood is not None:
            check_likelihood(likelihood)
        for _ in range(_TRIES):
            stored = store.read(directory)
            try:
                posterior = read_posterior(stored, net, likelihood)
                break
            except PosteriorFormatError as error:
                # another save may have taken its place, and its blobs, while it was read
                if not stored.is_replaced():
                    raise
                problem = error
        else:
            raise problem
        if not isinstance(posterior, cls):
            raise PosteriorFormatError(
                f"The posterior in {directory} is a {type(posterior).__name__}; expected a "
                f"{cls.__name__}."
            )
        return posterior

    @classmethod
    def from_manifest(
        cls, stored: store.Stored, net: Any, likelihood: Likelihood | None
    ) -> Posterior:
        """The posterior of a manifest, as opposed to a component of it."""
        return restore(stored, stored.fields, net, likelihood, prefix="")


def read_posterior(stored: store.Stored, net: Nets, likelihood: Likelihood | None) -> Posterior:
    """The posterior of a manifest, whatever its kind."""
    return _class_of(stored.kind).from_manifest(stored, net, likelihood)


def stored_entry(posterior: Posterior) -> dict[str, Any]:
    """What a manifest says of a posterior, or of a component of a mixture."""
    common = {"kind": posterior.kind, "likelihood": likelihood_entry(posterior.likelihood)}
    evidence = posterior.evidence
    known = {} if evidence is None else {"evidence": evidence._asdict()}
    return {**common, **known, **posterior.entry()}


def stored_blobs(posterior: Posterior) -> Blobs:
    """Every tensor to save: what the posterior is made of, and what its likelihood learned."""
    learned = posterior.likelihood.state_dict()
    return {**posterior.blobs(), **({"likelihood": learned} if learned else {})}


def restore(
    stored: store.Stored,
    entry: Mapping[str, Any],
    net: Nets,
    likelihood: Likelihood | None,
    prefix: str,
) -> Any:
    """The inverse of :func:`stored_entry` and :func:`stored_blobs`."""
    where = f"{stored.files}: {MANIFEST}"
    kind = _class_of(checked(entry, _ENTRY, where, "fields")["kind"])
    checked(entry, kind.form, where, "fields")
    chosen = _likelihood(entry["likelihood"], likelihood, whole=not prefix)
    learned = stored.load_if_present(f"{prefix}likelihood")
    try:
        chosen.load_state_dict(learned)
    except RuntimeError as error:
        raise PosteriorFormatError(
            f"The posterior's likelihood has learned {list(learned)}; {type(chosen).__name__} as "
            f"given has {list(chosen.state_dict())}. Pass likelihood= as it was when the "
            "posterior was made."
        ) from error
    try:
        made = kind.from_stored(stored, entry, net, chosen, prefix)
        if "evidence" in entry:
            known = entry["evidence"]
            made.evidence = Evidence(float(known["value"]), float(known["error"]), known["method"])
        return made
    except LightningBNNError:
        raise
    except _MISFITS as error:
        raise PosteriorFormatError(
            f"The parts of the posterior in {stored.files} do not fit together "
            f"({type(error).__name__}: {error}). Restore it from a copy."
        ) from error


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


def _class_of(kind: str) -> type[Posterior]:
    if kind not in Posterior._kinds:
        raise PosteriorFormatError(
            f"The posterior is of the kind {kind!r}; this version knows "
            f"{sorted(Posterior._kinds)}. Install a newer lightning_bnn, or import the module that "
            "defines it."
        )
    return Posterior._kinds[kind]


def _likelihood(entry: Mapping[str, Any], given: Likelihood | None, whole: bool) -> Likelihood:
    """The likelihood of an entry; one that is given beside the whole posterior must be the same."""
    known = getattr(likelihoods, entry["name"], None)
    if not (isinstance(known, type) and issubclass(known, Likelihood)) or known is Likelihood:
        if given is not None:
            return deepcopy(given)
        raise PosteriorFormatError(
            f"The posterior was made with the likelihood {entry['name']!r}, which is not one of "
            "lightning_bnn.likelihoods. Pass likelihood=."
        )
    try:
        made = known(**entry["config"])
    except Exception as error:  # whatever a constructor raises on arguments that cannot be
        raise PosteriorFormatError(
            f"The posterior's likelihood, {entry['name']}, cannot be made with "
            f"{entry['config']!r:.200}: {error}"
        ) from error
    if whole and given is not None and likelihood_entry(given) != likelihood_entry(made):
        raise PosteriorFormatError(
            f"The posterior was made with {entry['name']}, {entry['config']}; the given likelihood "
            f"is {type(given).__name__}, {given.config()}. Leave likelihood= out, or make it the "
            "same."
        )
    return made
