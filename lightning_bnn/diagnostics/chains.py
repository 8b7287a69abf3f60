"""What is watched along chains: predictions of the network first, chosen weights second.

Weights of a network can be permuted and rescaled without changing what it computes, so two chains
may agree on every prediction and on no weight. Predictions have no such symmetry. Of each draw
these are taken, at fixed examples:

* ``mean_log_likelihood``: the mean log density of the observed targets, one number that moves with
  the energy of the chain;
* ``prediction``: class probabilities, or the mean of the target;
* ``predicted_variance`` of the target, where the network predicts more than its mean.

Draws are read a few at a time, so memory holds the watched numbers and not the draws.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_bnn.diagnostics.examples import Examples
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.mixtures import full_precision
from lightning_bnn.posteriors import DrawsPosterior, MixturePosterior, WeightPosterior
from lightning_bnn.selection import Choice, choose

__all__ = [
    "Series",
    "Watched",
    "choose_elements",
    "function_values",
    "label_elements",
    "take_elements",
    "watch",
]

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Series:
    """A quantity recorded along chains.

    Attributes:
        values: ``(chains, draws, ...)``, or ``(chains, draws, elements)`` of a choice of elements.
        shape: The shape of the whole quantity in one draw.
    """

    values: NDArray[np.float64]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Watched:
    """Quantities recorded along chains.

    Attributes:
        function: Predictions and likelihoods by name.
        weights: Chosen weights by name.
        notes: What was left out.
    """

    function: dict[str, Series]
    weights: dict[str, Series]
    notes: tuple[str, ...] = ()


def function_values(outputs: Tensor, likelihood: Likelihood, targets: Tensor | None) -> Weights:
    """What draws predict, each by itself, from outputs of shape ``(draws, examples, ...)``.

    Example:
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> values = function_values(torch.zeros(5, 3, 1), Gaussian(1.0), torch.zeros(3))
        >>> {name: tuple(value.shape) for name, value in values.items()}
        {'log_likelihood': (5, 3), 'mean_log_likelihood': (5,), 'prediction': (5, 3)}
    """
    draws, examples = outputs.shape[:2]
    wide = full_precision(outputs)
    values: dict[str, Tensor] = {}
    if targets is not None:
        log_prob = likelihood.predictive(wide).component_log_prob(targets)
        values["log_likelihood"] = log_prob
        values["mean_log_likelihood"] = log_prob.mean(1)
    # Draws as if they were examples of one draw: nothing may be averaged over them.
    flat = wide.flatten(0, 1)
    predictive = likelihood.predictive(flat[None])
    moments = {"prediction": predictive.mean}
    if flat.numel() > predictive.mean.numel():
        moments["predicted_variance"] = predictive.variance
    for name, moment in moments.items():
        shape = [draws, examples, *moment.shape[1:]]
        values[name] = moment.reshape(shape[:-1] if len(shape) > 2 and shape[-1] == 1 else shape)
    return values


@torch.no_grad()
def watch(
    posterior: WeightPosterior,
    examples: Examples | None,
    weights: Choice = None,
    elements: int | None = None,
) -> Watched:
    """Run all draws of a posterior, in the order of their chains, and record what they give.

    Args:
        posterior: Stored draws, or a mixture of posteriors of stored draws.
        examples: Where to watch predictions; None to watch weights only.
        weights: Which weights to watch, as for :func:`lightning_bnn.selection.select`, except
            that None is none of them.
        elements: How many elements of each quantity to keep, a fixed choice; all if None.
    """
    if examples is None and weights is None:
        raise ConfigurationError(
            "There is nothing to watch: pass inputs= for predictions there, weights= for weights "
            "(such as '*' or '*.bias'), or both."
        )
    parts = _parts(posterior)
    varying = [
        name
        for name, _ in posterior.net.named_parameters()
        if not any(name in part.fixed for part in parts)
    ]
    names: list[str] = []
    if weights is not None:
        names = choose(posterior.net, varying, weights, "watched", "varying parameter")
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    recorded: dict[tuple[str, str], list[NDArray[np.float64]]] = defaultdict(list)
    for part in parts:
        chunks: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
        # A separate generator: asking for draws must not move the global one.
        for draw in part.draws(len(part), torch.Generator(part.device)):
            # by group: a weight may have the name of a prediction
            values = {("weights", name): draw[name] for name in names}
            if examples is not None:
                predictions = _predictions(part, draw, examples)
                values |= {("function", name): value for name, value in predictions.items()}
            for key, value in values.items():
                shapes[key] = tuple(value.shape[1:])
                kept = value if elements is None else take_elements(value, elements)
                chunks[key].append(kept.cpu().double())
        for key, tensors in chunks.items():
            array = torch.cat(tensors).numpy()
            # draw i is of chain i % chains
            by_chain = array.reshape(-1, part.chains, *array.shape[1:]).swapaxes(0, 1)
            recorded[key].append(by_chain)
    lengths = [len(part) // part.chains for part in parts]
    shortest, longest = min(lengths), max(lengths)
    groups: dict[str, dict[str, Series]] = {"function": {}, "weights": {}}
    for (group, name), arrays in recorded.items():
        joined = np.concatenate([array[:, :shortest] for array in arrays])
        groups[group][name] = Series(joined, shapes[group, name])
    note = (
        f"Chains of unequal length, from {shortest} to {longest} draws: of each the first "
        f"{shortest} are used."
    )
    return Watched(**groups, notes=(note,) if longest > shortest else ())


def _predictions(part: DrawsPosterior, draw: Weights, examples: Examples) -> Weights:
    """What a chunk of draws predicts at the examples."""
    dtype = next(tensor.dtype for tensor in draw.values() if tensor.is_floating_point())
    here = examples.to(part.device, dtype)
    outputs = part.outputs(draw, here.inputs)
    if here.targets is not None:
        part.likelihood.check(outputs[0], here.targets)
    return function_values(outputs, part.likelihood, here.targets)


def choose_elements(shape: Sequence[int], count: int) -> list[int]:
    """At most ``count`` flat indices of a tensor, spread at random, always the same for a shape.

    Example:
        >>> choose_elements((2, 2), 8), len(choose_elements((100, 100), 8))
        ([0, 1, 2, 3], 8)
    """
    total = math.prod(shape)
    if total <= count:
        return list(range(total))
    return sorted(np.random.default_rng(total).choice(total, count, replace=False).tolist())


def take_elements(values: Tensor, count: int) -> Tensor:
    """The elements that :func:`choose_elements` names, of ``(draws, ...)``: ``(draws, chosen)``."""
    flat = values.reshape(values.shape[0], -1)
    return flat[:, choose_elements(values.shape[1:], count)]


def label_elements(
    name: str, shape: Sequence[int], count: int, first: Sequence[int] | None = None
) -> list[str]:
    """Names of the elements that :func:`choose_elements` takes.

    Args:
        name: The name of the quantity.
        shape: Its shape in one draw.
        count: At most how many elements were chosen.
        first: What to call the places along the first axis, if not by their number.

    Example:
        >>> label_elements("prediction", (2, 2), 8, first=[10, 20])
        ['prediction[10, 0]', 'prediction[10, 1]', 'prediction[20, 0]', 'prediction[20, 1]']
        >>> label_elements("mean_log_likelihood", (), 2)
        ['mean_log_likelihood']
    """
    if not shape:
        return [name]
    labels = []
    for index in choose_elements(shape, count):
        row, *others = map(int, np.unravel_index(index, tuple(shape)))
        place = [row if first is None else first[row], *others]
        labels.append(f"{name}[{', '.join(str(i) for i in place)}]")
    return labels


def _parts(posterior: WeightPosterior) -> list[DrawsPosterior]:
    """The posteriors of draws that a posterior is made of."""
    if isinstance(posterior, DrawsPosterior):
        return [posterior]
    if isinstance(posterior, MixturePosterior):
        return [part for component in posterior.components for part in _parts(component)]
    raise ConfigurationError(
        "R-hat and ESS are of chains: they need a posterior of stored draws, or a mixture of such; "
        f"got {type(posterior).__name__}, whose draws are independent of each other."
    )
