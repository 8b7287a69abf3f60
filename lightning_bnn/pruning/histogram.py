"""The histogram of signal-to-noise ratios, of a whole network and of each of its layers.

The ratios of one network span many powers of ten, so they are counted by their logarithm to the
base 10. The edges cover the middle 99.8 % of the ratios, rounded outwards to a grid of 1, 2 or 5
times a power of ten; the few beyond them are counted apart, and none is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_bnn.posteriors.moments import at_least_float32

__all__ = ["LayerRatios", "SNRHistogram", "snr_histogram"]

_MOST_DECADES = 5.0  # powers of ten in view, below the largest ratios
_QUANTILES = (0.001, 0.999)
# Edges need no more than this many ratios, evenly taken; the counts are of all.
_MOST_FOR_EDGES = 2**20


@dataclass(frozen=True)
class LayerRatios:
    """The ratios of one layer.

    Attributes:
        name: The name of the weight.
        total: How many ratios there are, those outside of the edges included.
        median: Their median; None if it is infinite.
        counts: How many lie in each bin of the histogram.
    """

    name: str
    total: int
    median: float | None
    counts: list[int]


@dataclass(frozen=True)
class SNRHistogram:
    """How many ratios lie between edges, which are logarithms to the base 10.

    Attributes:
        log10_edges: The edges of the bins, one more than there are counts.
        counts: How many ratios lie in each bin: from its left edge on, below its right one (the
            last bin has both).
        below: How many lie below the first edge, and are not zero.
        above: How many lie above the last edge, infinite ones included.
        zero: How many are exactly zero, such as those of weights that are removed already.
        layers: The same bins for each layer.

    Example:
        >>> import torch
        >>> made = snr_histogram({"weight": torch.tensor([0.0, 0.1, 1.0, 10.0])})
        >>> sum(made.counts), made.zero
        (3, 1)
    """

    log10_edges: list[float]
    counts: list[int]
    below: int
    above: int
    zero: int
    layers: list[LayerRatios]


def snr_histogram(snr: Mapping[str, Tensor], bins: int = 60) -> SNRHistogram:
    """Count the ratios of each layer, and of all layers together.

    Args:
        snr: The ratios by name, as :func:`~lightning_bnn.pruning.signal_to_noise` gives them: zero
            or more, infinity included; at least one.
        bins: At most how many bins there are, at least 2; the round grid may need fewer.

    Example:
        >>> import torch
        >>> snr_histogram({"weight": torch.tensor([0.2, 2.0, 20.0])}, bins=4).log10_edges
        [-1.0, 0.0, 1.0, 2.0]
    """
    ratios = {
        name: at_least_float32(tensor.detach().cpu().flatten()).numpy()
        for name, tensor in snr.items()
    }
    step = math.ceil(sum(values.size for values in ratios.values()) / _MOST_FOR_EDGES)
    sample = np.concatenate([values[::step] for values in ratios.values()]).astype(np.float64)
    edges = _round_edges(np.log10(sample[(sample > 0) & np.isfinite(sample)]), bins)
    counts = np.zeros(len(edges) - 1, dtype=np.int64)
    below = above = zero = 0
    layers = []
    for name, values in ratios.items():
        with np.errstate(divide="ignore"):  # log10(0) is -inf, which is below every edge
            logarithms = np.log10(values.astype(np.float64))
        inside, _ = np.histogram(logarithms, bins=edges)
        counts += inside
        zero += int((values == 0).sum())
        below += int((logarithms < edges[0]).sum())
        above += int((logarithms > edges[-1]).sum())
        median = float(np.median(values))
        shown = median if math.isfinite(median) else None  # JSON has no infinity
        layers.append(LayerRatios(name, values.size, shown, inside.tolist()))
    return SNRHistogram(edges.tolist(), counts.tolist(), below - zero, above, zero, layers)


def _round_edges(logarithms: np.ndarray, bins: int) -> np.ndarray:
    """Edges on the finest round grid that covers the middle of the values with these bins."""
    low, high = (-0.5, 0.5)  # nothing to see: all are zero or infinite
    if logarithms.size:
        low, high = np.quantile(logarithms, _QUANTILES).tolist()
        # weights of inputs that are always zero fall to 1e-30 and less: counted, not shown
        low = max(low, high - _MOST_DECADES)
    if high - low < 1.0:  # equal ratios have no width: show a power of ten around them
        low, high = (low + high) / 2 - 0.5, (low + high) / 2 + 0.5
    for step in (factor * 10.0**power for power in range(-4, 2) for factor in (1, 2, 5)):
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first <= bins:
            break
    return np.round(np.arange(first, last + 1) * step, 9)  # 3 · 0.1 is not 0.3
