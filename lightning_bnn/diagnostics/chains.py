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
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_bnn.diagnostics.examples import Examples
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.likelihoods import Likelihood
from lightning_bnn.mixtures import full_precision
from lightning_bnn.posteriors import DrawsPosterior, MixturePosterior, WeightPosterior
from lightning_bnn.selection import Choice, choose

__all__ = [
    "Watched",
    "choose_elements",
    "function_values",
    "label_elements",
    "take_elements",
    "watch",
]

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Watched:
    """Quantities recorded along chains.

    Attributes:
        function: Predictions and likelihoods by name, each ``(chains, draws, ...)``.
        weights: Chosen weights by name, each ``(chains, draws, ...)``.
        function_shapes: The shape that each quantity of ``function`` has in one draw, before
            elements of it were chosen.
        weight_shapes: The same of ``weights``.
        notes: What was left out.
    """

    function: dict[str, NDArray[np.float64]]
    weights: dict[str, NDArray[np.float64]]
    function_shapes: dict[str, tuple[int, ...]]
    weight_shapes: dict[str, tuple[int, ...]]
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
    names = _weight_names(posterior.net, parts, weights)
    # apart: a weight may have the name of a prediction
    function, weight_record = _Record(elements), _Record(elements)
    for part in parts:
        # A generator of its own: asking for draws must not move the global one.
        for draw in part.draws(len(part), torch.Generator(part.device)):
            weight_record.add({name: draw[name] for name in names})
            if examples is not None:
                function.add(_predictions(part, draw, examples))
        function.end_part(part.chains)
        weight_record.end_part(part.chains)
    lengths = [len(part) // part.chains for part in parts]
    shortest, notes = min(lengths), []
    if max(lengths) > shortest:
        notes.append(
            f"Chains of unequal length, from {shortest} to {max(lengths)} draws: of each the first "
            f"{shortest} are used."
        )
    return Watched(
        function.join(shortest),
        weight_record.join(shortest),
        function.shapes,
        weight_record.shapes,
        tuple(notes),
    )


def _predictions(part: DrawsPosterior, draw: Weights, examples: Examples) -> Weights:
    """What a chunk of draws predicts at the examples."""
    dtype = next(tensor.dtype for tensor in draw.values() if tensor.is_floating_point())
    here = examples.to(part.device, dtype)
    outputs = part.outputs(draw, here.inputs)
    if here.targets is not None:
        part.likelihood.check(outputs[0], here.targets)
    return function_values(outputs, part.likelihood, here.targets)


class _Record:
    """Quantities by name, gathered a few draws at a time."""

    def __init__(self, elements: int | None) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._elements = elements
        self._chunks: dict[str, list[NDArray[np.float64]]] = {}
        self._parts: dict[str, list[NDArray[np.float64]]] = {}

    def add(self, values: Weights) -> None:
        """Add a chunk of draws."""
        for name, value in values.items():
            self.shapes[name] = tuple(value.shape[1:])
            if self._elements is not None:
                value = take_elements(value, self._elements)
            self._chunks.setdefault(name, []).append(value.cpu().double().numpy())

    def end_part(self, chains: int) -> None:
        """Make ``(chains, draws, ...)`` of the chunks so far: draw i is of chain i % chains."""
        for name, chunks in self._chunks.items():
            array = np.concatenate(chunks)
            by_chain = array.reshape(-1, chains, *array.shape[1:]).swapaxes(0, 1)
            self._parts.setdefault(name, []).append(by_chain)
        self._chunks = {}

    def join(self, draws: int) -> dict[str, NDArray[np.float64]]:
        """The chains of all parts, of each the first ``draws``."""
        return {
            name: np.concatenate([part[:, :draws] for part in parts])
            for name, parts in self._parts.items()
        }


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


def _weight_names(net: nn.Module, parts: Sequence[DrawsPosterior], choice: Choice) -> list[str]:
    """The chosen parameters, of those that vary between draws of every part."""
    if choice is None:
        return []
    names = [n for n, _ in net.named_parameters() if not any(n in p.fixed for p in parts)]
    if callable(choice) and not isinstance(choice, nn.Module):
        # It chooses among what is trainable, and the network of a posterior is frozen.
        trainable = deepcopy(net)
        for name, parameter in trainable.named_parameters():
            parameter.requires_grad_(name in names)
        choice = list(choice(trainable))
    return choose(net, names, choice, "watched", "trainable parameter")
