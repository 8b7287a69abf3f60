"""Proper scores split into what is unknowable, what was told apart and what was misstated.

Brier score, of K classes: the mean of Σ_k (p_k − y_k)². For each class, with bins of p_k (Murphy
1973; Stephenson, Coelho and Jolliffe 2008, "Two extra components in the Brier score
decomposition"), where a bar is a mean, b a bin of n_b statements and j a statement in it:

    reliability = Σ_b (n_b/n) (p̄_b − ȳ_b)²                  misstated: lower is better
    resolution  = Σ_b (n_b/n) [(ȳ_b − ȳ)² − var_b(p) + 2 cov_b(p, y)]     told apart: higher
    uncertainty = ȳ (1 − ȳ)                                 of the data, whoever predicts
    Brier       = reliability − resolution + uncertainty    exactly, summed over classes

The variance and the covariance within the bins are what makes it exact with any bins.

Negative log-likelihood, by the chain rule. Let c be the largest probability and y the target:

    −log p_y = −log P(is the top class right?) + [if wrong] −log(p_y / (1 − c))

The mean of the last term is ``which_class``. The first is the log score L of the yes-or-no
statement "the top class is right, with probability c". In bins of c (Bröcker 2009, "Reliability,
sufficiency, and the decomposition of proper scores"), with the binary entropy H and divergence KL:

    reliability = Σ_b (n_b/n) KL(ȳ_b ‖ c̄_b)
    uncertainty = H(ȳ)
    resolution  = uncertainty + reliability − L    = Σ_b (n_b/n) KL(ȳ_b ‖ ȳ) − [what bins blur]
    NLL         = reliability − resolution + uncertainty + which_class
"""

from __future__ import annotations

import numpy as np
from scipy.special import entr, rel_entr

from lightning_bnn.calibration.bins import Array, BinSums

__all__ = ["brier_decomposition", "nll_decomposition"]

# A mean of probabilities below 1 can round to 1; the largest number below it stands for it.
_BELOW_ONE = float(np.nextafter(1, 0))


def brier_decomposition(sums: BinSums) -> dict[str, float]:
    """Split the Brier score into reliability, resolution and uncertainty.

    Args:
        sums: The sums of :meth:`BinSums.add_classes`: a group for each class. A single group gives
            the score of a yes-or-no statement, (p − y)².

    Returns:
        ``reliability``, ``resolution``, ``uncertainty``, each summed over the groups; the Brier
        score is reliability − resolution + uncertainty.

    Example:
        >>> from lightning_bnn.calibration.bins import BinSums, width_edges
        >>> sums = BinSums(width_edges(15), groups=2)
        >>> sums.add_classes(np.array([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]))
        >>> parts = brier_decomposition(sums)
        >>> round(parts["reliability"] - parts["resolution"] + parts["uncertainty"], 6)
        0.37
    """
    count = sums.count.sum(axis=1)
    filled = np.maximum(sums.count, 1)  # the sums of an empty bin are 0
    total = np.maximum(count, 1)
    stated, observed = sums.stated / filled, sums.observed / filled
    share = sums.count / total[:, None]
    base = sums.observed.sum(axis=1) / total
    variance = sums.stated_squared - sums.count * stated**2
    covariance = sums.stated_observed - sums.count * stated * observed
    between = (share * (observed - base[:, None]) ** 2).sum(axis=1)
    within = (2 * covariance - variance).sum(axis=1) / total
    return {
        "reliability": float((share * (stated - observed) ** 2).sum()),
        "resolution": float((between + within).sum()),
        "uncertainty": float((base * (1 - base)).sum()),
    }


def nll_decomposition(sums: BinSums, nll: float, which_class: float) -> dict[str, float]:
    """Split the mean negative log-likelihood of classes.

    An infinite score is one of misstatement: it makes the reliability infinite, and the resolution
    stays that of the bins.

    Args:
        sums: The sums of (largest probability, whether it was right), one group.
        nll: The mean of −log p_y.
        which_class: The mean of −log(p_y / (1 − largest probability)) where the top class was
            wrong and 0 where it was right.

    Returns:
        ``uncertainty``, ``resolution``, ``reliability``, ``which_class``; the NLL is
        uncertainty − resolution + reliability + which_class.

    Example:
        >>> from lightning_bnn.calibration.bins import bin_sums, width_edges
        >>> sums = bin_sums(np.array([0.5, 0.5]), np.array([1, 0]), width_edges(15))
        >>> parts = nll_decomposition(sums, nll=np.log(2).item(), which_class=0.0)
        >>> {name: round(part, 4) for name, part in parts.items()}  # a coin, and known to be one
        {'uncertainty': 0.6931, 'resolution': 0.0, 'reliability': 0.0, 'which_class': 0.0}
    """
    count = sums.count[0]
    full = count > 0
    n = count[full]
    share = n / n.sum()
    stated, observed = sums.stated[0, full] / n, sums.observed[0, full] / n
    base = sums.observed[0].sum() / n.sum()
    uncertainty = float(entr(base) + entr(1 - base))
    reliability = float(share @ _divergence(observed, np.minimum(stated, _BELOW_ONE)))
    if np.isfinite(nll):
        resolution = uncertainty + reliability - (nll - which_class)
    else:
        resolution = float(share @ _divergence(observed, np.full_like(observed, base)))
        reliability = reliability if np.isinf(which_class) else float("inf")
    return {
        "uncertainty": uncertainty,
        "resolution": resolution,
        "reliability": reliability,
        "which_class": which_class,
    }


def _divergence(observed: Array, stated: Array) -> Array:
    """Give KL(observed ‖ stated) of yes-or-no events; 0 log 0 = 0."""
    return rel_entr(observed, stated) + rel_entr(1 - observed, 1 - stated)
