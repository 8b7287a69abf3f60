"""The histogram of signal-to-noise ratios, of a whole network and of each of its layers.

A weight of mean μ and standard deviation σ under the posterior has the ratio |μ|/σ (Graves, 2011,
*Practical Variational Inference for Neural Networks*; Blundell et al., 2015, *Weight Uncertainty in
Neural Networks*). The ratios of one network span many powers of ten, so they are counted by their
logarithm to the base 10. The edges cover the middle 99.8 % of the ratios, rounded outwards to a
grid of 1, 2 or 5 times a power of ten; the few beyond them are counted apart, and none is lost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bnn.errors import ConfigurationError, DataError

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
        median: Their median.
        counts: How many lie in each bin of the histogram.

    Example:
        >>> LayerRatios("0.weight", total=3, median=1.5, counts=(1, 2)).total
        3
    """

    name: str
    total: int
    median: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class SNRHistogram:
    """How many ratios lie between edges, which are logarithms to the base 10.

    Attributes:
        edges: The edges of the bins, one more than there are counts.
        counts: How many ratios lie in each bin: from its left edge on, below its right one (the
            last bin has both).
        below: How many lie below the first edge, and are not zero.
        above: How many lie above the last edge, infinite ones included.
        zero: How many are exactly zero, such as those of weights that are removed already.
        layers: The same bins for each layer.

    Example:
        >>> import torch
        >>> made = snr_histogram({"weight": torch.tensor([0.0, 0.1, 1.0, 10.0])})
        >>> sum(made.counts), made.zero, made.total
        (3, 1, 4)
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    below: int
    above: int
    zero: int
    layers: tuple[LayerRatios, ...]

    @property
    def total(self) -> int:
        """The number of all ratios."""
        return sum(self.counts) + self.below + self.above + self.zero

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, as JSON has them; an infinite median is None."""
        return {
            "log10_edges": list(self.edges),
            "counts": list(self.counts),
            "below": self.below,
            "above": self.above,
            "zero": self.zero,
            "layers": [
                {
                    "name": layer.name,
                    "total": layer.total,
                    "median": layer.median if math.isfinite(layer.median) else None,
                    "counts": list(layer.counts),
                }
                for layer in self.layers
            ],
        }


def snr_histogram(snr: Mapping[str, Tensor], bins: int = 60) -> SNRHistogram:
    """Count the ratios of each layer, and of all layers together.

    Args:
        snr: The ratios by name, as :func:`~lightning_bnn.pruning.signal_to_noise` gives them: zero
            or more, infinity included.
        bins: At most how many bins there are, at least 2; the round grid may need fewer.

    Raises:
        ConfigurationError: There is no ratio, or fewer than two bins.
        DataError: A ratio is negative or NaN.

    Example:
        >>> import torch
        >>> ratios = torch.tensor([0.01, 0.1, 1.0, 10.0], dtype=torch.float64)
        >>> made = snr_histogram({"weight": ratios}, bins=4)
        >>> made.edges
        (-2.0, -1.0, 0.0, 1.0)
        >>> made.counts
        (1, 1, 2)
    """
    if bins < 2:  # zero is an edge of every round grid, and may lie in the middle
        raise ConfigurationError(f"bins= is at least 2; got {bins}.")
    ratios = {name: _checked(name, tensor) for name, tensor in snr.items()}
    total = sum(values.size for values in ratios.values())
    if not total:
        raise ConfigurationError("A histogram needs at least one signal-to-noise ratio; got none.")
    step = math.ceil(total / _MOST_FOR_EDGES)
    sample = np.concatenate([values[::step] for values in ratios.values()]).astype(np.float64)
    sample = sample[(sample > 0) & np.isfinite(sample)]
    edges = _round_edges(np.log10(sample), bins)
    outside = np.zeros(3, dtype=np.int64)
    counts = np.zeros(len(edges) - 1, dtype=np.int64)
    layers = []
    for name, values in ratios.items():
        inside, beyond = _count(values, edges)
        counts += inside
        outside += beyond
        middle = float(np.median(values)) if values.size else math.nan
        layers.append(LayerRatios(name, values.size, middle, tuple(inside.tolist())))
    below, above, zero = outside.tolist()
    return SNRHistogram(
        tuple(edges.tolist()), tuple(counts.tolist()), below, above, zero, tuple(layers)
    )


def _checked(name: str, tensor: Tensor) -> np.ndarray:
    wide = tensor.detach().cpu().flatten()
    values = (wide if wide.dtype == torch.float64 else wide.float()).numpy()
    if not bool((values >= 0).all()):
        raise DataError(
            f"Signal-to-noise ratios are zero or more; {name!r} holds some that are negative or "
            "NaN. Look for NaN in the weights of the posterior."
        )
    return values


def _count(values: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The counts between the edges, and those below, above and at zero."""
    zero = int((values == 0).sum())
    with np.errstate(divide="ignore"):  # log10(0) is -inf, which is below every edge
        logarithms = np.log10(values.astype(np.float64))
    inside, _ = np.histogram(logarithms, bins=edges)
    below = int((logarithms < edges[0]).sum()) - zero
    above = int((logarithms > edges[-1]).sum())
    return inside, np.array([below, above, zero])


def _round_edges(logarithms: np.ndarray, bins: int) -> np.ndarray:
    """Edges on the finest round grid that covers the middle of the values with these bins."""
    low, high = (-0.5, 0.5)  # nothing to see: all are zero or infinite
    if logarithms.size:
        low, high = np.quantile(logarithms, _QUANTILES).tolist()
        # weights of inputs that are always zero fall to 1e-30 and less: counted, not shown
        low = max(low, high - _MOST_DECADES)
    if high - low < 1.0:  # equal ratios have no width: show a power of ten around them
        low, high = (low + high) / 2 - 0.5, (low + high) / 2 + 0.5
    power = math.floor(math.log10((high - low) / bins))
    while True:
        for factor in (1, 2, 5):
            # whole numbers first: 3 · 0.1 is not 0.3, and 3 / 10 is
            up, down = factor * 10 ** max(power, 0), 10 ** max(-power, 0)
            first = math.floor(low * down / up + 1e-9)
            last = math.ceil(high * down / up - 1e-9)
            if last - first <= bins:
                return np.arange(first, last + 1) * up / down
        power += 1
