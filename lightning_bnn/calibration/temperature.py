r"""One number that mends over- or under-confidence: the temperature (Guo et al., 2017).

Predictions :math:`p_k` become :math:`p_k^{1/T} / \sum_j p_j^{1/T}`. T > 1 makes them less sure,
T < 1 surer; the most probable class stays. For a mixture it is the mixture's probabilities that are
scaled, not the logits of each draw.

T minimises the negative log likelihood. With the inverse temperature :math:`\beta = 1/T` and
:math:`l_k = \log p_k`,

.. math:: f(\beta) = \frac1n \sum_i \Big(\log \sum_k e^{\beta l_{ik}} - \beta l_{iy_i}\Big), \quad
          f' = \frac1n \sum_i (E_\beta[l_i] - l_{iy_i}), \quad
          f'' = \frac1n \sum_i \mathrm{Var}_\beta[l_i] \ge 0,

so that f is convex, and Brent's method finds the only root of its derivative.

A temperature that was fitted on the rows it is judged by looks better than it is. It is therefore
fitted on validation data, or else by cross-fitting: the examples are split in two halves, and each
half is judged by the temperature of the other.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_softmax, softmax

from lightning_bnn.calibration.bins import Array, bin_sums, reliability_curve, width_edges
from lightning_bnn.calibration.clusters import cluster_sums
from lightning_bnn.calibration.error import expected_calibration_error
from lightning_bnn.calibration.verdict import CLASS_BAND_LEVEL, class_verdict, score_moments

__all__ = ["apply_temperature", "cross_fitted", "fit_temperature", "scaled"]

Integers = NDArray[np.int64]

COLDEST, HOTTEST = 0.01, 100.0


def fit_temperature(log_probabilities: Array, targets: Integers) -> float:
    """Temperature in [0.01, 100] with the smallest negative log likelihood.

    Where all rows are right, colder is better without end, and the coldest is returned; the hottest
    where every other class is more probable than the observed one. Uniform predictions are the
    same at every temperature: 1. A row whose target has probability 0 is infinitely bad at every
    temperature and says nothing about it: it is left out of the fit.

    Args:
        log_probabilities: Of shape ``(n, K)``; classes of probability 0 are ``-inf``.
        targets: The observed classes, ``(n,)``.

    Returns:
        The temperature; NaN if there is no row to fit it on.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.temperature import fit_temperature
        >>> stated = np.log([[0.9, 0.1]] * 4)  # 90 percent sure, and right in 3 of 4 rows
        >>> temperature = fit_temperature(stated, np.array([0, 0, 0, 1]))
        >>> round(temperature, 6), round(float(np.log(0.9 / 0.1) / np.log(0.75 / 0.25)), 6)
        (2.0, 2.0)
    """
    observed = np.take_along_axis(log_probabilities, targets[:, None], axis=1)
    told = np.isfinite(observed[:, 0])
    if not told.all():
        log_probabilities, observed = log_probabilities[told], observed[told]
    if len(observed) == 0:
        return float("nan")
    # Shifting a row changes nothing, and with the target's at 0 the slope needs no subtraction.
    log_ratios = log_probabilities - observed
    low, high = 1 / HOTTEST, 1 / COLDEST
    slope = _slope(log_ratios, 1.0)
    end = low if slope > 0 else high
    if slope == 0:
        return 1.0
    if slope * _slope(log_ratios, end) >= 0:
        return 1 / end
    # In the logarithm, where the slope is closer to a line.
    ends = sorted((0.0, math.log(end)))
    return math.exp(-brentq(lambda log: _slope(log_ratios, math.exp(log)), *ends, xtol=1e-10))


def _slope(log_ratios: Array, inverse: float) -> float:
    """Derivative of the mean negative log likelihood in the inverse temperature."""
    finite = np.where(np.isneginf(log_ratios), 0.0, log_ratios)  # they weigh 0; 0 * inf is NaN
    return float((softmax(inverse * log_ratios, axis=1) * finite).sum(1).mean())


def apply_temperature(log_probabilities: Array, temperature: float | Array) -> Array:
    """Log-probabilities at another temperature, normalised again.

    Args:
        log_probabilities: Of shape ``(n, K)``.
        temperature: One positive number, or one for each row, ``(n,)``.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.temperature import apply_temperature
        >>> np.exp(apply_temperature(np.log([[0.9, 0.1]]), 2.0)).round(6)  # odds of 9 become 3
        array([[0.75, 0.25]])
    """
    return log_softmax(log_probabilities / np.reshape(temperature, (-1, 1)), axis=1)


def scaled(
    log_probabilities: Array,
    targets: Integers,
    validation: tuple[Array, Integers] | None,
    examples: Integers,
    bins: int = 15,
) -> dict[str, Any]:
    """Scores before and after temperature scaling, by a temperature that did not see the rows.

    Args:
        log_probabilities: Of shape ``(n, K)``.
        targets: The observed classes, ``(n,)``.
        validation: Log-probabilities and targets to fit the temperature on; without them it is
            cross-fitted.
        examples: The example that each row belongs to, ``(n,)``; rows of one example stay in one
            half.
        bins: Number of bins of equal width of the calibration error.

    Returns:
        ``"value"``, the temperature (of all rows together where it is cross-fitted),
        ``"fitted_on"`` (``"validation"`` or ``"cross-fit"``), ``"rows"``, how many it was fitted
        on, and the scores ``"before"`` and ``"after"``: ``"nll"``, ``"ece"`` and ``"brier"``.
        ``"after"`` is NaN where there is nothing to fit on, as with a single example.
        ``"verdict_after"`` is the label of the verdict on the scaled rows, None without them.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.temperature import scaled
        >>> stated, targets = np.log([[0.9, 0.1]] * 400), np.tile([0, 0, 0, 1], 100)
        >>> result = scaled(stated, targets, (stated, targets), np.arange(400))
        >>> result["fitted_on"], round(result["value"], 6), round(result["before"]["ece"], 6)
        ('validation', 2.0, 0.15)
        >>> round(result["after"]["ece"], 6)
        0.0
    """
    if validation is not None:
        value = fit_temperature(*validation)
        temperature = np.full(len(targets), value)
    else:
        value = fit_temperature(log_probabilities, targets)
        temperature = cross_fitted(log_probabilities, targets, examples)
    before, _ = _judged(log_probabilities, targets, examples, bins)
    after, verdict = dict.fromkeys(before, math.nan), None
    if np.isfinite(temperature).all():
        cooled = apply_temperature(log_probabilities, temperature)
        after, verdict = _judged(cooled, targets, examples, bins)
    return {
        "value": value,
        "fitted_on": "cross-fit" if validation is None else "validation",
        "rows": len(targets if validation is None else validation[1]),
        "before": before,
        "after": after,
        "verdict_after": verdict,
    }


def cross_fitted(log_probabilities: Array, targets: Integers, examples: Integers) -> Array:
    """For each row the temperature of the half that its example is not in.

    Args:
        log_probabilities: Of shape ``(n, K)``.
        targets: The observed classes, ``(n,)``.
        examples: The example that each row belongs to, ``(n,)``.

    Returns:
        Of shape ``(n,)``; NaN where the other half is empty.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.temperature import cross_fitted
        >>> stated, targets = np.log([[0.9, 0.1]] * 4), np.array([0, 0, 0, 1])
        >>> cross_fitted(stated, targets, np.zeros(4, np.int64))  # one example: no other half
        array([nan, nan, nan, nan])
    """
    names, inverse = np.unique(examples, return_inverse=True)
    # A random half: data sets are often sorted by class, or have pairs of like neighbours.
    second = (np.random.default_rng(0).permutation(len(names)) % 2 == 1)[inverse]
    temperature = np.empty(len(targets))
    for half in (second, ~second):
        temperature[~half] = fit_temperature(log_probabilities[half], targets[half])
    return temperature


def _judged(
    log_probabilities: Array, targets: Integers, examples: Integers, bins: int
) -> tuple[dict[str, float], str]:
    """Scores of rows that are held in memory, and the label of their verdict."""
    rows, probabilities = np.arange(len(targets)), np.exp(log_probabilities)
    predicted = probabilities.argmax(1)
    confidence = np.minimum(probabilities[rows, predicted], 1.0)
    sums = bin_sums(confidence, predicted == targets, width_edges(bins))
    moments = score_moments(log_probabilities, probabilities, targets)
    score, variance, third = (float(moment.sum()) for moment in moments)
    clusters = cluster_sums(examples, moments[0])
    verdict = class_verdict(
        reliability_curve(sums, level=CLASS_BAND_LEVEL),
        score,
        variance,
        third,
        clusters if clusters.examples < len(targets) else None,
    )
    scores = {
        "nll": float(-log_probabilities[rows, targets].mean()),
        "ece": expected_calibration_error(sums),
    }
    probabilities[rows, targets] -= 1
    return scores | {"brier": float(np.square(probabilities).sum() / len(rows))}, verdict.label
