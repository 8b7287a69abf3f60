"""Traces and rank plots of what chains watch, the worst R-hat first, drawn by ArviZ.

A trace of chains that have converged looks like one noise around one level. A rank plot pools the
draws of all chains, ranks them and shows where the ranks of each chain lie: evenly, if the chains
sample one distribution; a slope shows a chain that sits too low or too high, a hump or a hollow
one that spreads too little or too much. See Vehtari et al. (2021).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_bnn.checks import check_whole
from lightning_bnn.diagnostics.chains import choose_elements, label_elements
from lightning_bnn.diagnostics.export import from_groups, to_arviz
from lightning_bnn.diagnostics.statistics import compute_statistics, require_arviz
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.selection import Choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["rank_figure", "trace_figure"]

# At most how many elements of each variable are looked at for the worst.
_ELEMENTS = 200


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
        data = from_groups({"posterior": series})
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
