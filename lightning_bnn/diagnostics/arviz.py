"""Chains as an ArviZ data object, for its tables, plots, comparisons and files; two of its plots.

Group ``posterior`` holds what was watched: ``prediction`` and ``mean_log_likelihood`` (see
:mod:`lightning_bnn.diagnostics.chains`) and the chosen weights under their names; a weight whose
name is taken gets the prefix ``weight.``, and a ``/``, which no file could hold, becomes a dot.
With targets, ``log_likelihood`` holds each example's own (for ``arviz.loo``) and ``observed_data``
the targets.

Traces and rank plots are drawn by ArviZ, of the scalars of the largest R-hat. A trace of chains
that have converged looks like one noise around one level. A rank plot pools the draws of all
chains, ranks them and shows where the ranks of each chain lie: evenly, if the chains sample one
distribution; a slope shows a chain that sits too low or too high, a hump or a hollow one that
spreads too little or too much. See Vehtari et al. (2021).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from lightning_bnn.checks import check_whole
from lightning_bnn.diagnostics.chains import choose_elements, label_elements, watch
from lightning_bnn.diagnostics.examples import choose_examples
from lightning_bnn.diagnostics.statistics import compute_statistics, require_arviz
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.selection import Choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["rank_figure", "to_arviz", "trace_figure"]

# names of axes and of what is observed
_RESERVED = ("chain", "draw", "example", "target")
# At most how many elements of each variable are looked at for the worst.
_ELEMENTS = 200


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
    function = {name: series.values for name, series in watched.function.items()}
    by_example = function.pop("log_likelihood", None)
    groups: dict[str, dict[str, Any]] = {"posterior": dict(function)}
    for name, series in watched.weights.items():
        free = name.replace("/", ".")
        taken = free in function or free in _RESERVED
        groups["posterior"][f"weight.{free}" if taken else free] = series.values
    coordinates: dict[str, Any] = {}
    dimensions = {name: ["example"] for name in function if name != "mean_log_likelihood"}
    if chosen is not None:
        coordinates["example"] = list(chosen.indices)
        if by_example is not None and isinstance(chosen.targets, Tensor):
            groups["log_likelihood"] = {"target": by_example}
            # through a list: NumPy has no bfloat16
            groups["observed_data"] = {"target": np.asarray(chosen.targets.tolist())}
            dimensions["target"] = ["example"]
    return _from_groups(groups, coords=coordinates, dims=dimensions)


def _from_groups(groups: dict[str, dict[str, Any]], **options: Any) -> Any:
    """ArviZ's data object from groups of variables, for the versions before and after 1."""
    arviz = require_arviz()
    if int(arviz.__version__.split(".")[0]) < 1:
        return arviz.from_dict(**groups, **options)
    return arviz.from_dict(groups, **options)


# ---------------------------------------------------------------- figures


def trace_figure(source: Any, inputs: Any = None, weights: Choice = None, count: int = 4) -> Figure:
    """Draw the density of each chain, and beside it values against draws.

    Args:
        source: A posterior of stored draws, or the data that ``to_arviz`` made of it.
        inputs: For a posterior, where to watch its predictions.
        weights: For a posterior, which of its weights to watch.
        count: How many scalars to draw, those of the largest R-hat.

    Returns:
        A matplotlib figure; save it with ``figure.savefig("trace.png")``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.posteriors import DrawsPosterior
        >>> draws = [{"weight": torch.randn(1, 2), "bias": torch.randn(1)} for _ in range(20)]
        >>> posterior = DrawsPosterior(nn.Linear(2, 1), Gaussian(0.1), draws)
        >>> len(trace_figure(posterior, torch.randn(8, 2), count=3).axes)  # density and trace
        6
    """
    return _figure("plot_trace", _worst(source, inputs, weights, count), compact=False, legend=True)


def rank_figure(source: Any, inputs: Any = None, weights: Choice = None, count: int = 4) -> Figure:
    """Draw the histogram of each chain's ranks among the draws of all chains.

    The dashed line is where every bar would end if all chains sampled the same distribution.

    Args:
        source: A posterior of stored draws, or the data that ``to_arviz`` made of it.
        inputs: For a posterior, where to watch its predictions.
        weights: For a posterior, which of its weights to watch.
        count: How many scalars to draw, those of the largest R-hat.

    Returns:
        A matplotlib figure; save it with ``figure.savefig("ranks.png")``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from lightning_bnn.likelihoods import Gaussian
        >>> from lightning_bnn.posteriors import DrawsPosterior, MixturePosterior
        >>> draws = [{"weight": torch.randn(1, 2), "bias": torch.randn(1)} for _ in range(20)]
        >>> chains = [DrawsPosterior(nn.Linear(2, 1), Gaussian(0.1), draws[k::2]) for k in (0, 1)]
        >>> len(rank_figure(MixturePosterior(chains), torch.randn(8, 2), count=3).axes)
        3
    """
    worst = _worst(source, inputs, weights, count)
    if len(next(iter(worst.values()))) == 1:
        raise ConfigurationError(
            "Rank plots compare chains, and there is one chain; run at least two (chains=4), "
            "or look at trace_figure."
        )
    return _figure("plot_rank", worst)


def _figure(plot: str, series: dict[str, Any], **options: Any) -> Figure:
    from matplotlib import pyplot  # a slow import

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ArviZ, about constant series
        data = _from_groups({"posterior": series})
        axes = getattr(require_arviz(), plot)(data, show=False, **options)
    figure = np.ravel(axes)[0].figure
    figure.set_layout_engine("constrained")
    pyplot.close(figure)  # else pyplot keeps it, and notebooks show it twice
    return figure


def _worst(source: Any, inputs: Any, weights: Choice, count: int) -> dict[str, Any]:
    """The scalars of the largest R-hat by name, each ``(chains, draws)``."""
    check_whole("count", count, 1)
    data = to_arviz(source, inputs, weights) if hasattr(source, "likelihood") else source
    blocks, labels = [], []
    for name, variable in data["posterior"].data_vars.items():
        shape = variable.shape[2:]
        flat = variable.values.reshape(*variable.shape[:2], -1)
        blocks.append(flat[:, :, choose_elements(shape, _ELEMENTS)])
        examples = variable["example"].values.tolist() if "example" in variable.dims else None
        labels += label_elements(name, shape, _ELEMENTS, examples)
    values = np.concatenate(blocks, axis=2)
    statistics = compute_statistics(values, labels, by_chain=False)
    rhats = [f"R-hat {rhat:.3f}" if rhat == rhat else "constant" for rhat in statistics.rhat]
    return {f"{labels[i]}, {rhats[i]}": values[:, :, i] for i in statistics.worst(count)}
