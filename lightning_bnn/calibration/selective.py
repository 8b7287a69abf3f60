"""Selective prediction: what is wrong among the most confident, as more is answered.

Rows are answered in order of falling confidence. After j of n, the coverage is j/n and the risk
the share of wrong ones among those j (El-Yaniv and Wiener 2010, "On the foundations of noise-free
selective classification"). The area under the curve is AURC = (1/n) Σ_j risk_j (Geifman et al.
2019), lower is better.

Rows of equal confidence have no order. The curve is the expectation over all orders of them: a
tie of m rows with w wrong ones, after c rows with e wrong ones, gives the risk
(e + w i/m) / (c + i) at its row i, so that the order of the data never matters.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lightning_bnn.calibration.bins import Array

__all__ = ["aurc_replicates", "coverage_at_risk", "risk_coverage"]

# Replicates are made a few at a time, so that no array has more numbers than this.
_BLOCK = 1_000_000


def risk_coverage(confidence: Array, wrong: Array) -> Array:
    """Give the risk at the coverages 1/n, 2/n, ..., 1. Their mean is the AURC.

    Args:
        confidence: Of shape (n,), larger is surer; not NaN, which has no rank.
        wrong: Whether the row was wrong, 0 or 1, of shape (n,); or any loss.

    Example:
        >>> risk_coverage(np.array([0.5, 0.5]), np.array([1, 0])).tolist()  # a tie
        [0.5, 0.5]
    """
    order, starts = _order(confidence)
    count = len(order)
    wrong = np.asarray(wrong, dtype=np.float64)[order]
    sizes = np.diff(starts, append=count)
    in_tie = np.add.reduceat(wrong, starts)
    before = np.cumsum(in_tie) - in_tie
    tie = np.repeat(np.arange(len(starts)), sizes)
    inside = np.arange(1, count + 1) - starts[tie]  # 1, ..., m within each tie
    errors = before[tie] + in_tie[tie] * inside / sizes[tie]
    return np.asarray(errors / np.arange(1, count + 1))


def coverage_at_risk(risks: Array, risk: float) -> float:
    """Give the largest coverage whose risk is at most ``risk``; 0 if there is none.

    Example:
        >>> risks = risk_coverage(np.array([0.9, 0.8, 0.7, 0.6]), np.array([0, 0, 1, 0]))
        >>> coverage_at_risk(risks, 0.25)  # 1 wrong in 4, although 1 in 3 before
        1.0
    """
    within = np.flatnonzero(risks <= risk)
    return float((within[-1] + 1) / len(risks)) if len(within) else 0.0


def aurc_replicates(confidence: Array, wrong: Array, weights: NDArray[np.floating]) -> Array:
    """Give the AURC of many resamplings of the same rows.

    A row drawn twice is a tie with itself. A tie of m rows, w of them wrong, after c rows with
    e wrong ones, adds Σ_i (e + w i/m) / (c + i) = w + (e − c w/m) (H(c + m) − H(c)), with the
    harmonic numbers H, so that no row has to be repeated.

    Args:
        confidence: Of shape (n,).
        wrong: Of shape (n,).
        weights: How often each row was drawn, whole numbers of shape (R, n).

    Returns:
        The R areas.

    Example:
        >>> confidence, wrong = np.array([0.6, 0.9]), np.array([1, 0])
        >>> aurc_replicates(confidence, wrong, np.array([[1.0, 1.0], [0.0, 2.0]])).tolist()
        [0.25, 0.0]
    """
    order, starts = _order(confidence)
    wrong = np.asarray(wrong, dtype=np.float64)[order]
    totals = weights.sum(axis=1, dtype=np.float64)
    harmonic = np.zeros(int(totals.max(initial=0)) + 1)
    np.cumsum(1 / np.arange(1, len(harmonic)), out=harmonic[1:])
    areas = np.empty(len(weights))
    step = max(1, _BLOCK // len(order))
    for first in range(0, len(weights), step):
        drawn = weights[first : first + step].astype(np.float64)[:, order]
        errors = np.add.reduceat(drawn * wrong, starts, axis=1)
        block = np.add.reduceat(drawn, starts, axis=1)
        covered, mistaken = np.cumsum(block, axis=1), np.cumsum(errors, axis=1)
        rise = harmonic[covered.astype(np.intp)]
        rise[:, 1:] -= rise[:, :-1].copy()
        share = errors / np.maximum(block, 1)
        slope = (mistaken - errors) - (covered - block) * share
        areas[first : first + step] = mistaken[:, -1] + np.einsum("ij,ij->i", slope, rise)
    return np.asarray(areas / totals)


def _order(confidence: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Give the order of falling confidence, and where in it each tie starts."""
    order = np.argsort(-confidence, kind="stable")
    ranked = confidence[order]
    return order, np.flatnonzero(np.diff(ranked, prepend=np.nan) != 0)  # NaN: the first is new
