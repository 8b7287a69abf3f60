"""Predictions of a loader's batches into statistics, one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning_fabric.utilities.data import sized_len
from torch import Tensor

from lightning_bnn.errors import DataError
from lightning_bnn.posteriors import Posterior
from lightning_bnn.predictive import ClassPredictive, Predictive
from lightning_bnn.random import isolated_random_state
from lightning_bnn.report.example_numbers import ExampleNumbers, distributed_sampler
from lightning_bnn.report.outside import Outside
from lightning_bnn.report.statistics import Statistics
from lightning_bnn.strategies.base import batch_size
from lightning_bnn.target import split_batch

__all__ = [
    "add",
    "add_outside",
    "batch_inputs",
    "batch_limit",
    "check_predicts",
    "flat_loaders",
    "inputs_for",
    "kind_of",
    "numbered_batches",
    "undisturbed",
]


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
    found = [getattr(owner, "generator", None) for owner in owners]
    generators = [g for g in found if isinstance(g, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        with isolated_random_state(0):
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


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
    if world_size == 1 or prepared or distributed_sampler(loader) is not None:
        own = ExampleNumbers(loader, rank, world_size)
        for index, batch in enumerate(loader):
            if index >= limit:
                break
            yield batch, own.take
        return
    start = 0
    for index, batch in enumerate(loader):
        if index >= limit:
            break
        if index % world_size == rank:
            yield batch, lambda count, start=start: torch.arange(start, start + count)  # type: ignore[misc]
        start += batch_size(batch) or 1


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


def inputs_for(posterior: Posterior, inputs: Any) -> Any:
    """Inputs in the precision of a posterior's network, which may not be that of the trainer.

    Example:
        >>> from torch import nn
        >>> from lightning_bnn import DrawsPosterior
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> net = nn.Linear(1, 1)
        >>> posterior = DrawsPosterior(net, Gaussian(), [dict(net.named_parameters())])
        >>> inputs_for(posterior, torch.zeros(1, 1, dtype=torch.float64)).dtype
        torch.float32
    """
    net = getattr(posterior, "net", None)  # a posterior without weights takes inputs as they are
    dtypes = [] if net is None else [p.dtype for p in net.parameters() if p.is_floating_point()]
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or not dtypes:
        return inputs
    return inputs.to(dtypes[0])


def kind_of(predictive: Predictive) -> str:
    """What a predictive is of, in words; the same for models that can be compared.

    Example:
        >>> from lightning_bnn.predictive import CategoricalPredictive
        >>> kind_of(CategoricalPredictive(torch.zeros(1, 2, 3)))
        'CategoricalPredictive of 3 classes'
    """
    name = type(predictive).__name__
    shape = tuple(predictive.mean.shape[1:])
    if not isinstance(predictive, ClassPredictive):
        return f"{name} of {shape or 'one'} output(s)"
    if predictive.mean.ndim == predictive.mode.ndim:  # labels, each with a yes and a no
        return f"{name} of {shape or 'one'} label(s)"
    return f"{name} of {shape[0]} classes"


def check_predicts(predict: Callable[[Any], Predictive], inputs: Any, what: str, fix: str) -> str:
    """Try a model on inputs; what it predicts, in words.

    Args:
        predict: The model.
        inputs: A batch of inputs.
        what: The model and the data, for the error.
        fix: What to do if they do not go together.

    Raises:
        DataError: The network does not take the inputs.
    """
    try:
        return kind_of(predict(inputs))
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        what_came = f"is a {type(inputs).__name__}"
        if isinstance(inputs, Tensor):
            what_came = f"has shape {tuple(inputs.shape)} and dtype {inputs.dtype}"
        first = str(error).strip().split("\n")[0]
        raise DataError(
            f"{what} does not go through the network: a batch of inputs {what_came}. {fix} "
            f"({type(error).__name__}: {first})"
        ) from error


def add(
    statistics: Statistics, predictive: Predictive, targets: Tensor, numbers: Tensor, inputs: Any
) -> None:
    """Add a batch to statistics, its repeats left out, on the CPU."""
    pictures = inputs.detach().cpu() if isinstance(inputs, Tensor) else None
    predictive, targets = _on_cpu(predictive), targets.detach().cpu()
    kept = numbers >= 0
    if not bool(kept.all()):
        if not bool(kept.any()):
            return
        predictive, targets, numbers = predictive._map(lambda t: t[:, kept]), *(
            targets[kept], numbers[kept]
        )  # fmt: skip
        pictures = None if pictures is None else pictures[kept]
    statistics.update(predictive, targets, numbers, pictures)


def add_outside(outside: Outside, predictive: Predictive, numbers: Tensor) -> None:
    """Add a batch from elsewhere, its repeats left out, on the CPU."""
    predictive, kept = _on_cpu(predictive), numbers >= 0
    if not bool(kept.all()):
        if not bool(kept.any()):
            return
        predictive, numbers = predictive._map(lambda t: t[:, kept]), numbers[kept]
    outside.update(predictive, numbers)


def _on_cpu(predictive: Predictive) -> Predictive:
    # on a CPU the same object stays, with what its metrics have computed already
    return predictive if predictive.outputs.device.type == "cpu" else predictive.to("cpu")
