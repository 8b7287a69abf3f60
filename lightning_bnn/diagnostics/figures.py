"""Traces and rank histograms of what chains watch, the worst R-hat first.

A trace of chains that have converged looks like one noise around one level. A rank histogram pools
the draws of all chains, ranks them and shows where the ranks of each chain lie: evenly, if the
chains sample one distribution; a slope shows a chain that sits too low or too high, a hump or a
hollow one that spreads too little or too much. See Vehtari et al. (2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_bnn.diagnostics.chains import choose_elements
from lightning_bnn.diagnostics.export import to_arviz
from lightning_bnn.diagnostics.statistics import Floats, compute_statistics
from lightning_bnn.errors import ConfigurationError
from lightning_bnn.posteriors import WeightPosterior
from lightning_bnn.selection import Choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["rank_figure", "trace_figure"]

_COLOURS = ("#2f6db5", "#d9762b", "#3a9a6b", "#8b5fbf", "#c44e52", "#b8963e", "#3aa6b9", "#6b7280",
            "#1f3b63", "#e08fb0")  # fmt: skip
_GREY = "#6b7280"
_ELEMENTS = 200


@dataclass(frozen=True)
class _Series:
    """One scalar along the chains."""

    values: Floats  # (chains, draws)
    title: str


def trace_figure(source: Any, inputs: Any = None, weights: Choice = None, count: int = 4) -> Figure:
    """Draw values against draws, one line per chain, with their histograms beside.

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
        >>> len(trace_figure(posterior, torch.randn(8, 2), count=3).axes)  # trace and histogram
        6
    """
    from matplotlib.figure import Figure

    series = _worst_series(source, inputs, weights, count)
    figure = Figure(figsize=(9, 0.9 + 1.7 * len(series)), layout="constrained")
    # the scalars may differ in scale, so that only the axis of draws is common
    rows = figure.subplots(len(series), 2, squeeze=False, sharey="row", width_ratios=[4, 1])
    for (trace, histogram), one in zip(rows, series, strict=True):
        _draw_trace(trace, histogram, one)
    for row in rows[:-1]:
        row[0].tick_params(labelbottom=False)
    rows[-1][0].set_xlabel("draw", fontsize=9)
    rows[-1][1].set_xlabel("density", fontsize=9)
    _add_legend(figure, rows[0][0])
    return figure


def rank_figure(source: Any, inputs: Any = None, weights: Choice = None, count: int = 4) -> Figure:
    """Draw the histogram of each chain's ranks among the draws of all chains.

    The dashed line is where every bar would end if all chains sampled the same distribution;
    the band is the range that holds 95% of the bars of independent draws.

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
    from matplotlib.figure import Figure

    series = _worst_series(source, inputs, weights, count)
    chains = len(series[0].values)
    if chains == 1:
        raise ConfigurationError(
            "Rank histograms compare chains, and there is one chain; run at least two (chains=4), "
            "or look at trace_figure."
        )
    columns = min(2, len(series))
    rows = -(-len(series) // columns)
    height = 0.6 + 0.45 * chains
    figure = Figure(figsize=(4.6 * columns, 0.4 + height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, one in zip(grid.flat, series, strict=False):
        _draw_ranks(axes, one)
    for axes in grid.flat[len(series) :]:
        axes.remove()
    for axes in figure.axes[-columns:]:
        axes.set_xlabel("rank among all draws", fontsize=9)
    return figure


def _worst_series(source: Any, inputs: Any, weights: Choice, count: int) -> list[_Series]:
    """The scalars of the largest R-hat, over all that the source watches."""
    if count < 1:
        raise ConfigurationError(f"count= is at least 1; got {count}.")
    data = to_arviz(source, inputs, weights) if isinstance(source, WeightPosterior) else source
    try:
        variables = dict(data["posterior"].data_vars)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(
            "A figure of chains is drawn from a posterior or from what to_arviz returned; got "
            f"{type(source).__name__}."
        ) from error
    blocks, labels = [], []
    for name, variable in variables.items():
        chosen = choose_elements(variable.shape[2:], _ELEMENTS)
        blocks.append(variable.values.reshape(*variable.shape[:2], -1)[:, :, chosen])
        labels += _labels(name, variable, chosen)
    values = np.concatenate(blocks, axis=2)
    statistics = compute_statistics(values, labels, by_chain=False)
    return [
        _Series(values[:, :, i], f"{labels[i]}     {_rhat_text(statistics.rhat[i])}")
        for i in statistics.worst(count)
    ]


def _rhat_text(rhat: float) -> str:
    return "constant" if np.isnan(rhat) else f"R-hat {rhat:.3f}"


def _labels(name: str, variable: Any, chosen: list[int]) -> list[str]:
    """Names with the coordinates that the data have for each element."""
    if variable.ndim == 2:
        return [name]
    axes = [variable[dimension].values for dimension in variable.dims[2:]]
    places = [np.unravel_index(index, variable.shape[2:]) for index in chosen]
    return [
        f"{name}[{', '.join(str(axis[i]) for axis, i in zip(axes, place, strict=True))}]"
        for place in places
    ]


def _draw_trace(trace: Axes, histogram: Axes, series: _Series) -> None:
    edges = np.histogram_bin_edges(_finite(series.values), bins=30)
    for chain, values in enumerate(series.values):
        colour = _COLOURS[chain % len(_COLOURS)]
        trace.plot(values, color=colour, lw=0.7, alpha=0.85, label=f"chain {chain}")
        heights, _ = np.histogram(_finite(values), edges, density=True)
        histogram.stairs(heights, edges, orientation="horizontal", color=colour, lw=1.2)
    trace.set_title(series.title, fontsize=9, loc="left")
    trace.margins(x=0.01)
    histogram.set_xticks([])
    for axes in (trace, histogram):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)


def _draw_ranks(axes: Axes, series: _Series) -> None:
    from scipy.stats import rankdata

    chains, draws = series.values.shape
    bins = int(np.clip(draws // 10, 4, 20))
    ranks = rankdata(series.values).reshape(series.values.shape)
    edges = np.linspace(0.5, chains * draws + 0.5, bins + 1)
    counts = [np.histogram(ranks[chain], edges)[0] for chain in range(chains)]
    expected = draws / bins
    # of independent draws: a chain is a sample without replacement of all the ranks
    spread = 1.96 * np.sqrt(expected * (1 - 1 / bins) * (1 - 1 / chains))
    step = 1.1 * max(float(np.max(counts)), expected + spread)
    bases = [step * (chains - 1 - chain) for chain in range(chains)]  # chain 0 on top
    for chain, base in enumerate(bases):
        axes.axhspan(
            base + max(0.0, expected - spread), base + expected + spread, color=_GREY, alpha=0.2,
            lw=0,
        )  # fmt: skip
        axes.bar(
            edges[:-1], counts[chain], np.diff(edges), base, align="edge", alpha=0.75,
            color=_COLOURS[chain % len(_COLOURS)], edgecolor="white", lw=0.4,
        )  # fmt: skip
        axes.axhline(base + expected, color=_GREY, lw=0.8, ls="--")
    axes.set_yticks([base + expected / 2 for base in bases])
    axes.set_yticklabels([f"chain {chain}" for chain in range(chains)])
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, chains * step)
    axes.set_title(series.title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _finite(values: Floats) -> Floats:
    return values[np.isfinite(values)]


def _add_legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper right", ncols=min(8, len(labels)), frameon=False,
        fontsize=8,
    )  # fmt: skip
