"""Chains as an ArviZ data object, for its tables, plots, comparisons and files.

Group ``posterior`` holds what was watched: ``prediction`` and ``mean_log_likelihood`` (see
:mod:`lightning_bnn.diagnostics.chains`) and the chosen weights under their names; a weight whose
name is taken gets the prefix ``weight.``, and a ``/``, which no file could hold, becomes a dot.
With targets, ``log_likelihood`` holds each example's own (for ``arviz.loo``) and ``observed_data``
the targets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from lightning_bnn.diagnostics.chains import watch
from lightning_bnn.diagnostics.examples import choose_examples
from lightning_bnn.diagnostics.statistics import require_arviz
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.selection import Choice

__all__ = ["to_arviz"]

# names of axes and of what is observed
_RESERVED = ("chain", "draw", "example", "target")


def to_arviz(
    posterior: WeightPosterior, inputs: Any = None, weights: Choice = None, examples: int = 64
) -> Any:
    """The chains of a posterior as ArviZ has them.

    Args:
        posterior: Stored draws, or a mixture of posteriors of stored draws.
        inputs: Where to predict: a loader of (inputs, targets) pairs or of inputs, one such
            batch, or a tensor.
        weights: Which weights to include, whole, as for
            :func:`lightning_bnn.selection.select`; none by default.
        examples: At most how many of the inputs are used, evenly chosen.

    Returns:
        An ``arviz.InferenceData``, or from ArviZ 1 on an ``xarray.DataTree``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.posteriors import DrawsPosterior
        >>> draws = [{"weight": torch.randn(1, 2), "bias": torch.randn(1)} for _ in range(10)]
        >>> posterior = DrawsPosterior(nn.Linear(2, 1), Gaussian(0.1), draws)
        >>> data = to_arviz(posterior, (torch.randn(3, 2), torch.randn(3)), weights="bias")
        >>> sorted(data.posterior.data_vars)
        ['bias', 'mean_log_likelihood', 'prediction']
    """
    chosen = None if inputs is None else choose_examples(inputs, examples)
    watched = watch(posterior, chosen, weights)
    function = dict(watched.function)
    by_example = function.pop("log_likelihood", None)
    groups: dict[str, dict[str, Any]] = {"posterior": dict(function)}
    for name, array in watched.weights.items():
        free = name.replace("/", ".")
        taken = free in function or free in _RESERVED
        groups["posterior"][f"weight.{free}" if taken else free] = array
    coordinates: dict[str, Any] = {}
    dimensions = {name: ["example"] for name in function if name != "mean_log_likelihood"}
    if chosen is not None:
        coordinates["example"] = list(chosen.indices)
        if by_example is not None and isinstance(chosen.targets, Tensor):
            groups["log_likelihood"] = {"target": by_example}
            # through a list: NumPy has no bfloat16
            groups["observed_data"] = {"target": np.asarray(chosen.targets.tolist())}
            dimensions["target"] = ["example"]
    return from_groups(groups, coords=coordinates, dims=dimensions)


def from_groups(groups: dict[str, dict[str, Any]], **options: Any) -> Any:
    """ArviZ's data object from groups of variables, for the versions before and after 1."""
    arviz = require_arviz()
    if int(arviz.__version__.split(".")[0]) < 1:
        return arviz.from_dict(**groups, **options)
    return arviz.from_dict(groups, **options)
