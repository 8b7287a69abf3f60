"""A posterior of stored draws: sets of weights, and of buffers where they vary.

The draws are held in memory, or stay on the disk and are read as they are needed: those of a
:class:`~lightning_bnn.storage.stream.DrawStream`, and those of a saved posterior that are too
many to hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from lightning_bnn.checks import check_kind, check_whole
from lightning_bnn.errors import ConfigurationError, PosteriorFormatError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.network import in_network_order, network_tensors
from lightning_bnn.posteriors.base import Blobs, likelihood_entry
from lightning_bnn.posteriors.moments import Moments, RunningMoments
from lightning_bnn.posteriors.weights import (
    CACHE_BYTES,
    CHUNK,
    Change,
    WeightPosterior,
    Weights,
    changed,
    network_fields,
)
from lightning_bnn.storage.manifest import Form
from lightning_bnn.storage.store import Stored
from lightning_bnn.storage.stream import DrawStream, StoredDraws

__all__ = ["DrawsPosterior", "create_stream", "unstack"]


def create_stream(
    directory: str | os.PathLike[str],
    net: nn.Module,
    likelihood: Likelihood | None,
    weights: Mapping[str, Tensor],
) -> DrawStream:
    """Begin a stream of draws of a network, which ``Posterior.load(directory, net)`` opens.

    Args:
        directory: A local directory or an fsspec URL, without draws.
        net: The network; its values serve for what is not in ``weights``.
        likelihood: How outputs of the network give targets. If it is not known, it has to be
            given to ``Posterior.load``.
        weights: Weights such as every snapshot will have, with a leading axis of chains.

    Example:
        >>> from lightning_bnn import Posterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Linear(1, 1, bias=False)
        >>> stream = create_stream("memory://draws-doc", net, Gaussian(0.1), {
        ...     "weight": torch.zeros(2, 1, 1)})  # two chains
        >>> stream.append(step=1, weights={"weight": torch.tensor([1.0, 3.0]).reshape(2, 1, 1)})
        >>> Posterior.load("memory://draws-doc", net).predict(torch.ones(1, 1)).mean
        tensor([[2.]])
    """
    first = {name: tensor[0] for name, tensor in weights.items() if tensor.ndim}
    names = in_network_order(net, first, "weights")
    fixed = {name: tensor for name, tensor in network_tensors(net).items() if name not in names}
    unknown = {"name": "not given", "config": {}}
    entry = unknown if likelihood is None else likelihood_entry(likelihood)
    return DrawStream.create(
        directory,
        fields={"kind": "draws", "likelihood": entry, **network_fields(net)},
        weights=weights,
        fixed=fixed,
        likelihood=None if likelihood is None else likelihood.state_dict(),
    )


def unstack(weights: Mapping[str, Tensor]) -> list[Weights]:
    """The single sets of weights of tensors with a leading axis.

    Example:
        >>> unstack({"w": torch.tensor([[1.0], [2.0]])})
        [{'w': tensor([1.])}, {'w': tensor([2.])}]
    """
    count = len(next(iter(weights.values())))
    return [{name: tensor[index] for name, tensor in weights.items()} for index in range(count)]


class DrawsPosterior(WeightPosterior):
    """Equally weighted sets of weights.

    Asked for as many draws as it holds, it gives each once, in order; for fewer, a random
    choice without repetition; for more, each equally often but for a random rest.

    Args:
        net: The network; the posterior keeps a copy.
        likelihood: How outputs of the network give targets.
        draws: The sets of weights (and of buffers that vary), by name. Those of
            :class:`~lightning_bnn.storage.stream.StoredDraws` stay on the disk.
        fixed: Other parameters and buffers; the network's own values serve for those left out.
        chains: The number of chains that the draws come from: draw i is of chain i % chains.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Linear(1, 1, bias=False)
        >>> draws = [{"weight": torch.full((1, 1), value)} for value in (1.0, 3.0)]
        >>> DrawsPosterior(net, Gaussian(0.1), draws).predict(torch.ones(1, 1)).mean
        tensor([[2.]])
    """

    kind = "draws"
    form: ClassVar[Form] = {"chains": int}

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        draws: Sequence[Mapping[str, Tensor]],
        fixed: Mapping[str, Tensor] | None = None,
        chains: int = 1,
    ) -> None:
        check_kind("draws", draws, Sequence, "a list of sets of weights")
        if not len(draws):
            raise ConfigurationError("A posterior of draws needs at least one draw; got none.")
        if len(draws) % check_whole("chains", chains, 1):
            raise ConfigurationError(
                f"Every chain has the same number of draws; got chains={chains} and {len(draws)} "
                "draws."
            )
        self._draws: StoredDraws | list[Weights]
        if isinstance(draws, StoredDraws):
            like = {name: torch.empty(shape, device="meta") for name, shape in draws.shapes.items()}
            names, self._draws = list(in_network_order(net, like, "The stored draws'")), draws
        else:
            ordered = [in_network_order(net, draw, f"draw {i}") for i, draw in enumerate(draws)]
            names = list(ordered[0])
            for index, draw in enumerate(ordered):
                if list(draw) != names or not names:
                    raise ConfigurationError(
                        "Every draw needs the same tensors, at least one; draw 0 has "
                        f"{names[:3]}, draw {index} has {list(draw)[:3]}."
                    )
            self._draws = [{k: v.detach().clone() for k, v in draw.items()} for draw in ordered]
        super().__init__(net, likelihood, names, fixed)
        self.chains, self._names = chains, names

    @classmethod
    def from_stream(
        cls,
        stream: DrawStream,
        net: nn.Module,
        likelihood: Likelihood,
        steps: Sequence[int] | None = None,
    ) -> Self:
        """The posterior of draws that a stream holds now; they stay on the disk.

        Args:
            stream: Draws of ``net``.
            net: The network.
            likelihood: As the stream was made with; it gets what was learned up to the last draw.
            steps: After which steps the draws were taken; by default all.

        Raises:
            PosteriorFormatError: There is no draw in the stream yet, or none of one of the steps.
        """
        if not len(stream):
            raise PosteriorFormatError(
                f"The stream in {stream.files} holds no draw yet: the first comes after the "
                "burn-in. Open it later."
            )
        likelihood = deepcopy(likelihood)
        if learned := stream.likelihood(None if steps is None else steps[-1]):
            likelihood.load_state_dict(learned)
        return cls(net, likelihood, stream.draws(steps), stream.fixed(), stream.chains)

    @classmethod
    def from_collected(
        cls,
        state: Mapping[str, Any],
        net: nn.Module,
        likelihood: Likelihood,
        stream: DrawStream | None = None,
    ) -> Self:
        """The posterior of the draws that a SampleCollector's state holds, or says where they are.

        Args:
            state: What a checkpoint holds of the collector.
            net: The network.
            likelihood: It gets what was learned up to the last draw.
            stream: The draws on the disk, if they are open.
        """
        if state["stream"] is not None:
            place, steps, problem = state["dirpath"], state["steps"], ""
            if place is None and stream is None:
                place, problem = "a directory", "a checkpoint of version 0.1 does not name it"
            else:
                try:
                    stream = stream or DrawStream.open(place, last_step=steps[-1])
                    problem = "" if stream.id == state["stream"] else "its draws are of another run"
                except (PosteriorFormatError, OSError) as error:
                    problem = str(error).rstrip(".")
            if not problem:
                assert stream is not None
                return cls.from_stream(stream, net, likelihood, steps)
            raise ConfigurationError(
                f"The draws of {len(steps)} steps were collected in {place}, but {problem}. Put "
                "the directory back, or read it where it is now with Posterior.load."
            )
        likelihood = deepcopy(likelihood)
        if state["learned"]:
            likelihood.load_state_dict(state["learned"])
        draws = [draw for snapshot in state["draws"] for draw in unstack(snapshot)]
        return cls(net, likelihood, draws, chains=state["chains"])

    def chain(self, number: int) -> DrawsPosterior:
        """The draws of one chain, a posterior of its own.

        Example:
            >>> from lightning_bnn.likelihoods import Gaussian
            >>> draws = [{"weight": torch.full((1, 1), float(value))} for value in range(6)]
            >>> posterior = DrawsPosterior(nn.Linear(1, 1), Gaussian(0.1), draws, chains=2)
            >>> posterior.chain(1).sample(3)["weight"].flatten()
            tensor([1., 3., 5.])
        """
        if check_whole("number", number, 0) >= self.chains:
            raise ConfigurationError(f"There is no chain {number}: there are {self.chains}.")
        draws = self._draws[number :: self.chains]
        return type(self)(self.net, self.likelihood, draws, self.fixed).made_from(self)

    def __len__(self) -> int:
        return len(self._draws)

    @property
    def default_draws(self) -> int:
        """All of them."""
        return len(self._draws)

    @property
    def device(self) -> torch.device:
        """Where the posterior lies, or where it goes when it is read."""
        if isinstance(self._draws, StoredDraws):
            return self._draws.device
        return next(iter(self._draws[0].values())).device

    def draws(
        self, count: int, generator: torch.Generator | None = None, chunk: int = CHUNK
    ) -> Iterator[Weights]:
        """Yield ``count`` draws, stacked, at most ``chunk`` at a time."""
        rounds, rest = divmod(count, len(self))
        order = list(range(len(self))) * rounds
        if rest:
            device = self.device if generator is None else generator.device
            extra = torch.randperm(len(self), generator=generator, device=device)[:rest]
            order += sorted(extra.tolist())
        for start in range(0, count, chunk):
            yield self._stack(order[start : start + chunk])

    def _stack(self, indices: Sequence[int]) -> Weights:
        stacked: Weights = {}
        for row, index in enumerate(indices):  # one is held at a time, where they are read
            draw = self._draws[index]
            for name in self._names:
                if row == 0:
                    stacked[name] = draw[name].new_empty(len(indices), *draw[name].shape)
                stacked[name][row] = draw[name]
        return stacked

    def moments(self) -> Moments:
        """Mean and variance of each weight; of n draws with n - 1, of a single one the variance 0.

        Draws on the disk are read one at a time.
        """
        return self._running(self.varying).result(max(1, len(self) - 1))

    @property
    def mean(self) -> Weights:
        """The mean of every tensor that varies; counters are those of the last draw."""
        return self._running(self._names).mean()

    def _running(self, names: Sequence[str]) -> RunningMoments:
        running = RunningMoments(names)
        for index in range(len(self)):
            running.add(self._draws[index])
        return running

    @property
    def has_variance(self) -> bool:
        """Whether there are several draws; they are not compared."""
        return len(self) > 1

    def map(self, change: Change, net: nn.Module | None = None) -> Self:
        """The same kind of posterior, with every stored tensor changed; on the disk, when read."""
        draws: Sequence[Weights]
        if isinstance(self._draws, StoredDraws):
            draws = self._draws.mapped(change)
        else:
            draws = [changed(change, draw) for draw in self._draws]
        fixed = changed(change, self.fixed)
        made = type(self)(net or self.net, self.likelihood, draws, fixed, self.chains)
        return made.made_from(self, net)

    def entry(self) -> dict[str, Any]:
        """The number of chains."""
        return {"chains": self.chains}

    def blobs(self) -> Blobs:
        """The tensors to save: each draw is looked up only when its turn comes."""
        draws = {f"draw-{i:06d}": _Draw(self._draws, i, self._names) for i in range(len(self))}
        return {**draws, **super().blobs()}

    @classmethod
    def from_stored(
        cls, stored: Stored, entry: Mapping[str, Any], net: nn.Module,
        likelihood: Likelihood, prefix: str,
    ) -> Self:  # fmt: skip
        """The inverse of :meth:`blobs` and :meth:`entry`; draws that are too many stay there."""
        if "stream" in entry:
            return cls.from_stream(DrawStream(stored), net, likelihood)
        names = sorted(name for name in stored.blob_names if name.startswith(f"{prefix}draw-"))
        lazy = StoredDraws(stored.files, [stored.entry(name) for name in names], chains=0)
        draws = lazy if stored.bytes > CACHE_BYTES else list(lazy)
        fixed = stored.load_if_present(f"{prefix}fixed")
        return cls(net, likelihood, draws, fixed, entry["chains"])


class _Draw(Mapping[str, Tensor]):
    """One of the draws as a blob to save, looked up only when its turn comes."""

    def __init__(self, draws: Sequence[Weights], index: int, names: Sequence[str]) -> None:
        self._draws, self._index, self._names = draws, index, names

    def __getitem__(self, name: str) -> Tensor:
        return self._draws[self._index][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def items(self) -> Any:
        """All tensors from one look at the draw."""
        draw = self._draws[self._index]
        return [(name, draw[name]) for name in self._names]
