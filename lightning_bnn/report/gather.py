"""Predictions of a loader's batches into statistics, one batch at a time.

A ``DistributedSampler`` orders the data, pads the list with repeats until every process has as
many, and gives process r the places r, r + W, r + 2W, ... of W processes. So example j of process r
is number jW + r of the list, and the numbers at or beyond the length of the data are repeats,
which must not count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler
from tqdm import tqdm

from lightning_bnn.errors import ConfigurationError, DataError
from lightning_bnn.lightning import sized_len
from lightning_bnn.predictive import ClassPredictive, Predictive
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report.statistics import Statistics
from lightning_bnn.strategies.base import batch_size
from lightning_bnn.target import split_batch

__all__ = [
    "Batches", "ExampleNumbers", "add", "batch_inputs", "batch_limit", "check_models",
    "check_predicts", "distributed_sampler", "first_batch", "flat_loaders", "gather",
    "numbered_batches", "progress", "undisturbed",
]  # fmt: skip

T = TypeVar("T")


def distributed_sampler(loader: Any) -> DistributedSampler | None:
    """The sampler that shares a loader's data among processes, if there is one.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> sampler = DistributedSampler(range(5), num_replicas=2, rank=1)
        >>> distributed_sampler(DataLoader(range(5), sampler=sampler)) is sampler
        True
        >>> distributed_sampler(DataLoader(range(5))) is None
        True
    """
    # A batch sampler of the user's own has the sampler; the loader then holds one without use.
    owners = getattr(loader, "batch_sampler", None), loader
    samplers = (getattr(owner, "sampler", None) for owner in owners)
    return next((each for each in samplers if isinstance(each, DistributedSampler)), None)


class Batches:
    """Batches of (inputs, targets) that can be read several times.

    Args:
        read: Starts a new pass over the data.

    Example:
        >>> batches = Batches(lambda: iter([(torch.zeros(2), torch.ones(2))]))
        >>> len(list(batches)), len(list(batches))
        (1, 1)
    """

    def __init__(self, read: Callable[[], Iterator[tuple[Any, Tensor]]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        return self._read()


class ExampleNumbers:
    """Numbers the examples of a loader in the order in which they come.

    Where no ``DistributedSampler`` shares the data (an ``IterableDataset``, or sampling of the
    user's own), every process counts on by itself, its numbers set apart from those of the others:
    whether an example comes twice cannot be known then.

    Args:
        loader: The loader, as Lightning has prepared it.
        rank: The rank of this process.
        world_size: The number of processes.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> sampler = DistributedSampler(range(5), num_replicas=2, rank=1, shuffle=False)
        >>> numbers = ExampleNumbers(DataLoader(range(5), sampler=sampler), rank=1, world_size=2)
        >>> numbers.take(2), numbers.take(1)  # the sixth of five is a repeat
        (tensor([1, 3]), tensor([-1]))
    """

    def __init__(self, loader: Any, rank: int = 0, world_size: int = 1) -> None:
        sampler = distributed_sampler(loader)
        self._rank, self._stride = rank, world_size
        self._end: int | None = None
        # without batches of its own, an item is a batch, and repeats cannot be told
        if sampler is not None and getattr(loader, "batch_sampler", None) is not None:
            self._rank, self._stride = sampler.rank, sampler.num_replicas
            self._end = len(sampler.dataset)  # type: ignore[arg-type]
        self._seen = 0

    def take(self, count: int) -> Tensor:
        """The numbers of the next ``count`` examples; -1 for repeats."""
        places = torch.arange(self._seen, self._seen + count)
        self._seen += count
        numbers = places * self._stride + self._rank
        if self._end is not None:
            numbers[numbers >= self._end] = -1
        return numbers


def batch_inputs(batch: Any) -> Any:
    """The inputs of a batch of (inputs, targets), or of inputs alone.

    Example:
        >>> batch_inputs([torch.zeros(2), torch.ones(2)]), batch_inputs(torch.zeros(2))
        (tensor([0., 0.]), tensor([0., 0.]))
    """
    if isinstance(batch, (Tensor, Mapping)):
        return batch
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0]
    return split_batch(batch)[0]


@contextmanager
def undisturbed(loader: Any) -> Iterator[None]:
    """Iterate a loader so that nobody's random numbers move, and in the same order each time."""
    owners = (loader, getattr(loader, "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    states = [(g, g.get_state()) for g in generators if isinstance(g, torch.Generator)]
    try:
        with isolated_random_state(0):
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def first_batch(loader: Any, what: str) -> Any:
    """The first batch of a loader, which is left as it was.

    Raises:
        DataError: There is none.
    """
    with undisturbed(loader):
        for batch in loader:
            return batch
    raise DataError(f"{what} is empty: its loader gives no batch.")


def numbered_batches(
    loader: Any,
    rank: int = 0,
    world_size: int = 1,
    limit: float = float("inf"),
    prepared: bool = False,
) -> Iterator[tuple[Any, Callable[[int], Tensor]]]:
    """The batches of a loader that are this process's, each with what numbers its examples.

    A loader that Lightning has prepared, or that a distributed sampler shares, gives all of its
    batches; of any other, process r of W takes batches r, r + W, ... and the numbers count those of
    the others too.

    Args:
        loader: Any iterable of batches.
        rank: The rank of this process.
        world_size: The number of processes.
        limit: At most how many batches of the loader are looked at.
        prepared: Whether it holds this process's share, however that came about.

    Yields:
        A batch, and a function from its number of examples to their numbers (-1: a repeat).

    Example:
        >>> [(batch, numbers(2)) for batch, numbers in numbered_batches([[7, 8], [5, 6]])]
        [([7, 8], tensor([0, 1])), ([5, 6], tensor([2, 3]))]
    """
    prepared = prepared or world_size == 1 or distributed_sampler(loader) is not None
    numbers = ExampleNumbers(loader, rank, world_size) if prepared else ExampleNumbers(None)
    for index, batch in enumerate(loader):
        if index >= limit:
            break
        if prepared or index % world_size == rank:
            yield batch, numbers.take
        else:
            numbers.take(batch_size(batch) or 1)


def progress(batches: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """Show on a terminal how far a pass over data is, if it takes longer than a second.

    Args:
        batches: What is gone through.
        what: What is being done.
        total: The number of batches, where it is known.

    Example:
        >>> list(progress([1, 2], "predict"))
        [1, 2]
    """
    shown = {"desc": what, "total": total, "unit": "batch", "delay": 1.0, "leave": False}
    return tqdm(batches, disable=None, **shown)  # None: where standard error is no terminal


def flat_loaders(loaders: Any) -> list[Any]:
    """Loaders as a list, however a trainer or a data module has them.

    Example:
        >>> flat_loaders({"a": "first", "b": "second"}), flat_loaders("only")
        (['first', 'second'], ['only'])
    """
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, (list, tuple)) else [loaders]


def batch_limit(loader: Any, limit: float, processes: int = 1) -> float:
    """How many batches of a loader a trainer's limit allows: a number, or a share (float).

    Args:
        loader: The loader.
        limit: As in ``Trainer(limit_val_batches=...)``.
        processes: How many processes share the loader; a number of batches is that of each.

    Example:
        >>> batch_limit(range(10), 3), batch_limit(range(10), 0.5), batch_limit(range(10), 3, 2)
        (3, 5, 6)
    """
    if isinstance(limit, int):
        return limit * processes
    length = sized_len(loader)
    return float("inf") if limit >= 1 or length is None else int(length * limit)


def _kind(predictive: Predictive) -> str:
    """What a predictive is of, in words; the same for models that can be compared."""
    name, shape = type(predictive).__name__, tuple(predictive.mean.shape[1:])
    if isinstance(predictive, ClassPredictive) and predictive.mean.ndim > predictive.mode.ndim:
        return f"{name} of {shape[0]} classes"
    return f"{name} of shape {shape} per example"


def check_predicts(
    predict: Callable[[Any], Predictive], inputs: Any, what: str, fix: str
) -> Predictive:
    """Try a model on inputs.

    Args:
        predict: The model.
        inputs: A batch of inputs.
        what: The model and the data, for the error.
        fix: What to do if they do not go together.

    Raises:
        DataError: The network does not take the inputs.
    """
    try:
        return predict(inputs)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        given = f"is a {type(inputs).__name__}"
        if isinstance(inputs, Tensor):
            given = f"has shape {tuple(inputs.shape)} and dtype {inputs.dtype}"
        first = str(error).strip().split("\n")[0]
        raise DataError(
            f"{what} does not go through the network: a batch of inputs {given}. {fix} "
            f"({type(error).__name__}: {first})"
        ) from error


def check_models(
    models: Mapping[str, Callable[[Any], Predictive]],
    inputs: Any,
    ood: Mapping[str, Any],
    inputs_of: Callable[[Any], Any] = batch_inputs,
    class_names: Sequence[str] | None = None,
) -> None:
    """Try every model on a batch of everything, before any work is done.

    Args:
        models: From inputs to what each model predicts, by name.
        inputs: A batch of inputs.
        ood: Loaders of out-of-distribution data, by name.
        inputs_of: From a batch of such a loader to its inputs.
        class_names: The names of the classes.

    Raises:
        DataError: A loader is empty, or its inputs do not go through a network.
        ConfigurationError: The models predict different things, or there are more or fewer names
            than classes.
    """
    if not models:
        raise ConfigurationError("a report needs at least one model, got none.")
    fix = "Every model of a report takes the same inputs."
    tried = {
        name: check_predicts(predict, inputs, f"data, tried on {name!r},", fix)
        for name, predict in models.items()
    }
    first, *others = kinds = {name: _kind(predictive) for name, predictive in tried.items()}
    for name in others:
        if kinds[name] != kinds[first]:
            raise ConfigurationError(
                f"{first!r} predicts a {kinds[first]} and {name!r} a {kinds[name]}: only models of "
                "one task can be compared. Make a report of each."
            )
    predicted: Any = tried[first]
    known = predicted.log_probabilities.shape[1] if predicted.task == "classification" else 0
    if class_names is not None and len(class_names) != known:
        raise ConfigurationError(
            f"class_names= names {len(class_names)} classes and {first!r} predicts a "
            f"{kinds[first]}. Name each class; leave it out of a regression."
        )
    shape = tuple(inputs.shape[1:]) if isinstance(inputs, Tensor) else "of the data"
    for place, loader in ood.items():
        strange = inputs_of(first_batch(loader, f"ood[{place!r}]"))
        fix = f"Inputs of the shape {shape} per example are expected."
        for name, predict in models.items():
            check_predicts(predict, strange, f"ood[{place!r}], tried on {name!r},", fix)


def add(
    statistics: Statistics,
    predictive: Predictive,
    numbers: Tensor,
    targets: Tensor | None = None,
    inputs: Any = None,
) -> None:
    """Add a batch, its repeats (-1) left out, on the CPU; one without targets to OOD scores."""
    kept = numbers >= 0
    if bool(kept.any()):
        observed, pictures = (
            each.detach().cpu()[kept] if isinstance(each, Tensor) else None
            for each in (targets, inputs)
        )
        statistics.update(predictive.to("cpu")[kept], observed, numbers[kept], pictures)


def gather(
    loader: Any,
    into: Mapping[str, Statistics],
    split: Callable[[Any], tuple[Any, Tensor | None]],
    predict: Callable[[Any], Mapping[str, Predictive]],
    ood: str | None = None,
    bar: str | None = None,
    **share: Any,
) -> None:
    """Predict a loader with all models.

    Args:
        loader: The loader.
        into: The statistics by model.
        split: From a batch to inputs and targets.
        predict: From inputs to what each model predicts.
        ood: The name of the data, if they are out-of-distribution; targets are not looked at.
        bar: What a progress bar says that is being done; there is none without it.
        share: Which batches are this process's, as :func:`numbered_batches` takes it.
    """
    with undisturbed(loader), torch.no_grad():
        batches = numbered_batches(loader, **share)
        for batch, number in batches if bar is None else progress(batches, bar, sized_len(loader)):
            inputs, targets = split(batch)
            predicted = predict(inputs)
            numbers = number(len(next(iter(predicted.values()))))
            for name, predictive in predicted.items():
                if ood is None:
                    add(into[name], predictive, numbers, targets, inputs)
                else:
                    add(into[name].ood.setdefault(ood, Statistics()), predictive, numbers)
