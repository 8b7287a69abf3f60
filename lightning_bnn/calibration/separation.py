r"""How well a score tells out-of-distribution inputs from in-distribution ones.

A score is larger for what looks less familiar: entropy, mutual information, one minus the largest
probability, a standard deviation. With inputs from ``inside`` and from ``outside`` of the
distribution that the model was trained on, and ``outside`` as the positive class:

* AUROC is the chance that an outside input scores higher than an inside one, ties counting half
  (Mann and Whitney, 1947): 1/2 is guessing;
* AUPR is the average precision, :math:`\sum_t (R_t - R_{t-1}) P_t` over the thresholds t: guessing
  gives the share of outside inputs;
* FPR95 is the share of outside inputs taken for inside ones at the lowest threshold that keeps at
  least 95% of the inside ones: 0 is best (Hendrycks and Gimpel, 2017; Liang et al., 2018).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

from lightning_bnn.calibration.bins import Array

__all__ = ["auroc_replicates", "separation"]


# Numbers of float64 that a step of the replicates holds in each temporary array: 4 MB.
_BUDGET = 2**19


def separation(inside: Array, outside: Array) -> dict[str, float]:
    """AUROC, AUPR and FPR95 of a score.

    Args:
        inside: Scores of inputs like those of training, of shape ``(n,)``; not NaN.
        outside: Scores of out-of-distribution inputs, of shape ``(m,)``.

    Returns:
        ``"auroc"``, ``"aupr"`` and ``"fpr95"``; NaN where one side is empty.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.separation import separation
        >>> separation(np.array([0.1, 0.2, 0.3]), np.array([0.25, 0.6]))["fpr95"]
        0.5
    """
    if len(inside) == 0 or len(outside) == 0:
        return dict.fromkeys(("auroc", "aupr", "fpr95"), float("nan"))
    # Only the order counts. torchmetrics takes scores beyond [0, 1] for logits and squashes them,
    # which would tie large ones, so that it gets their ranks in place of the scores themselves.
    names, ranks = np.unique(np.concatenate([inside, outside]), return_inverse=True)
    scores = torch.from_numpy(ranks / len(names))
    is_outside = (torch.arange(len(scores)) >= len(inside)).long()
    threshold = np.partition(inside, kept := (95 * len(inside) + 99) // 100 - 1)[kept]
    return {
        "auroc": float(binary_auroc(scores, is_outside)),
        "aupr": float(binary_average_precision(scores, is_outside)),
        "fpr95": float(np.mean(outside <= threshold)),
    }


def auroc_replicates(
    inside: Array,
    outside: Array,
    inside_weights: NDArray[np.floating],
    outside_weights: NDArray[np.floating],
) -> Array:
    """AUROC under each of R sets of weights, as the bootstrap needs it.

    Args:
        inside: Scores of shape ``(n,)``.
        outside: Scores of shape ``(m,)``.
        inside_weights: Weights of the inside scores, ``(R, n)``.
        outside_weights: Weights of the outside scores, ``(R, m)``.

    Returns:
        Areas of shape ``(R,)``; NaN where a side weighs nothing.

    Example:
        >>> import numpy as np
        >>> from lightning_bnn.calibration.separation import auroc_replicates
        >>> weights = np.array([[1.0, 1.0], [2.0, 0.0]])
        >>> auroc_replicates(np.array([1.0, 3.0]), np.array([2.0, 3.0]), weights, weights)
        array([0.625, 1.   ])
    """
    # In sorted order the weight below a score is a cumulative sum; sorting the other side too
    # makes its look-ups walk through memory.
    inside_order, outside_order = np.argsort(inside), np.argsort(outside)
    ordered, others = inside[inside_order], outside[outside_order]
    below = np.searchsorted(ordered, others, "left")
    up_to = np.searchsorted(ordered, others, "right")
    areas = np.full(len(inside_weights), np.nan)
    step = max(1, _BUDGET // max(1, len(inside), len(outside)))
    for start in range(0, len(areas), step):
        # a row for each score, so that sorting the scores moves whole rows
        near, far = (
            np.ascontiguousarray(weights[start : start + step].T, dtype=np.float64)[order]
            for weights, order in ((inside_weights, inside_order), (outside_weights, outside_order))
        )
        lighter = np.zeros((len(inside) + 1, near.shape[1]))
        np.cumsum(near, axis=0, out=lighter[1:])
        won = np.einsum("ir,ir->r", far, lighter[below] + lighter[up_to]) / 2
        pairs = near.sum(0) * far.sum(0)
        np.divide(won, pairs, out=areas[start : start + step], where=pairs > 0)
    return areas
